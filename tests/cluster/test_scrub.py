"""Three real NATS nodes: one that is away, and one whose disk has flipped bytes, are found and repaired."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from qb.cli.cluster.repair_commands import _set_aside
from qb.cli.cluster.repair_plan import RepairPlan
from qb.cluster.health.journal_watch import JournalWatch
from qb.cluster.health.nats_monitor import NatsMonitor
from qb.cluster.scrub.node_pass import NodePass, NodesProof
from qb.cluster.scrub.scrub_pace import ScrubPace
from qb.core.broker.cell_report import NodeState
from qb.replication.jetstream.jetstream_store import JetStreamStore
from qb.replication.journal.journal import Journal
from qb.replication.journal.trio_timers import TrioTimers
from qb.replication.nats.nats_client import NatsClient
from tests.support.nats_cluster import NatsCluster, NatsNode
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.process, pytest.mark.timeout(120)]

RECORDS = 200
FOUND_WITHIN = 10.0  # seconds, as docs/CLUSTER.md promises


class Watched:
    """A journal with records in it, and what is known of its nodes."""

    def __init__(self, cluster: NatsCluster) -> None:
        self.cluster = cluster
        self.client, self.timers = NatsClient(cluster.urls), TrioTimers()
        self.store = JetStreamStore(self.client, self.timers, "main")
        monitors = [NatsMonitor(node.monitor) for node in cluster.nodes]
        self.watch = JournalWatch(self.client, self.store.stream, monitors)
        self.last = 0

    async def fill(self) -> None:
        await self.store.open()
        self.watch.identity = self.store.identity
        journal = Journal(self.store, self.timers, "owner")
        await journal.take_over()
        committed: list[object] = []
        for number in range(RECORDS):
            journal.append(b"payload %d " % number + b"x" * 2_000, committed.append)
        await until(lambda: len(committed) == RECORDS)
        self.last = journal.point.position

    async def state_of(self, node: NatsNode, state: NodeState) -> str:
        """Wait until a node is in a state; returns why."""
        await until(lambda: self._row(node) == state, 30)
        return next(each.why for each in self.watch.state.nodes if each.name == node.name)

    def _row(self, node: NatsNode) -> NodeState | None:
        return next((each.state for each in self.watch.state.nodes if each.name == node.name), None)

    async def prove(self, pace: ScrubPace | None = None) -> NodesProof:
        async def is_current(node: str) -> bool:
            return True

        names = [node.name for node in self.cluster.nodes]
        return await NodePass(self.client, self.store.stream, pace or ScrubPace(), is_current).run(names, 1, self.last)


class TrimmingPace(ScrubPace):
    """Has the journal trimmed when the first node was read for the first time."""

    def __init__(self, trim: Callable[[], None]) -> None:
        super().__init__()
        self._trim: Callable[[], None] | None = trim

    def pause(self, size: int, seconds: float) -> float:
        if trim := self._trim:
            self._trim = None
            trim()
            return 1.0
        return super().pause(size, seconds)


def flip_a_byte(node: NatsNode, of: bytes) -> None:
    """Change one byte in the block in which some payload lies."""
    for path in sorted(node.store.glob("jetstream/*/streams/QB_main/msgs/*.blk")):
        data = bytearray(path.read_bytes())
        if (at := data.find(of)) >= 0:
            data[at + len(of) + 100] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError(f"{of!r} is in no block of {node.name}")


def damages(proof: NodesProof) -> dict[str, int]:
    assert all(not each.note for each in proof.nodes), proof
    return {each.node: each.damaged for each in proof.nodes}


async def test_a_node_that_is_away_and_one_with_flipped_bytes_are_found_and_repaired(
    tmp_path: Path, nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = NatsCluster(tmp_path)
    try:
        cluster.start()
        watched = Watched(cluster)
        for task in (watched.client.run, watched.timers.run, watched.watch.run):
            nursery.start_soon(task)
        await watched.fill()
        for node in cluster.nodes:
            await watched.state_of(node, NodeState.CURRENT)
        assert damages(await watched.prove()) == {"n0": 0, "n1": 0, "n2": 0}

        proof = await watched.prove(TrimmingPace(lambda: nursery.start_soon(watched.store.trim, 60)))
        assert damages(proof) == {"n0": 0, "n1": 0, "n2": 0}, "what is trimmed during a pass is not missing"

        victim = next(
            node for node in cluster.nodes if node.name == next(
                each.name for each in watched.watch.state.nodes if each.role == "replica"
            )
        )  # fmt: skip
        caplog.set_level(logging.INFO, logger="qb.cluster")
        victim.stop()
        await until(lambda: f"NATS node {victim.name} is away" in caplog.text, FOUND_WITHIN)
        assert "is away" in await watched.state_of(victim, NodeState.AWAY)
        flip_a_byte(victim, b"payload 77 ")
        victim.start()
        await watched.state_of(victim, NodeState.CURRENT)
        await until(lambda: f"NATS node {victim.name} is well again" in caplog.text)
        assert caplog.text.count(f"NATS node {victim.name} is away") == 1

        proof = await watched.prove()
        assert damages(proof) == {node.name: int(node is victim) for node in cluster.nodes}, proof
        watched.watch.damaged = damages(proof)
        assert (await watched.state_of(victim, NodeState.DAMAGED)).startswith("has 1 damaged records")

        victim.stop()
        await watched.state_of(victim, NodeState.AWAY)
        _set_aside(RepairPlan(victim.name, "nats", [], [], True), victim.store)
        victim.start()
        watched.watch.damaged = {}
        await watched.state_of(victim, NodeState.CURRENT)
        assert damages(await watched.prove()) == {"n0": 0, "n1": 0, "n2": 0}
    finally:
        cluster.kill()
