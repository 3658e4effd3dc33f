"""Cells on a real JetStream cluster of three nodes: append, follow, take over, restart from the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from qb.replication.jetstream.jetstream_store import JetStreamStore
from qb.replication.journal.trio_timers import TrioTimers
from qb.replication.nats.nats_client import NatsClient
from qb.storage.engine import Topic
from tests.support.cells import Cells, answers, caught_up, proved
from tests.support.nats_cluster import NatsCluster
from tests.support.stores import store

pytestmark = [pytest.mark.cluster, pytest.mark.process, pytest.mark.timeout(120)]


async def cells_on(cluster: NatsCluster, nursery: trio.Nursery, directory: Path, cell: str) -> Cells:
    client, timers = NatsClient(cluster.urls), TrioTimers()
    nursery.start_soon(client.run)
    nursery.start_soon(timers.run)
    await JetStreamStore(client, timers, cell).open()

    def new_store() -> JetStreamStore:
        made = JetStreamStore(client, timers, cell)
        made.most_bytes = 4096  # so that payloads are cut
        return made

    return Cells(nursery, directory, new_store, timers)


async def test_a_follower_takes_over_with_everything_and_a_killed_one_reads_on(
    nats_cluster: NatsCluster, nursery: trio.Nursery, tmp_path: Path
) -> None:
    cells = await cells_on(nats_cluster, nursery, tmp_path, "copies")
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first) as engine:
        await engine.create_topic(Topic(topic="t", partitions=2))
        await store(engine.log("t", 0), *[b"%d" % number for number in range(5_000)], producer_id=3, first_number=1)
        await caught_up(second, first.cell.applied)
        await second.cell.release()
        await store(engine.log("t", 1), b"after the checkpoint")
        await engine.metadata.put("cursor/workers/0", {"settled": 4})
        asked = await answers(engine)
    await first.kill()
    await second.kill()
    second = await cells.node("b")
    async with cells.owner(second) as engine:
        assert await answers(engine) == asked
        await store(engine.log("t", 1), b"of the new owner")
        asked = await answers(engine)
    await second.cell.release()
    third = await cells.node("c")
    await caught_up(third, second.cell.applied)
    assert await answers(third.cell._engine) == asked
    await third.cell.release()
    for node in (second, third):
        await node.kill()
        proved(node.directory)


async def test_a_copy_begins_behind_a_trim_of_a_real_stream(
    nats_cluster: NatsCluster, nursery: trio.Nursery, tmp_path: Path
) -> None:
    cells = await cells_on(nats_cluster, nursery, tmp_path, "trimmed")
    owner = await cells.node("a", segment_bytes=2_000)
    async with cells.owner(owner) as engine:
        await engine.create_topic(Topic(topic="t"))
        log = engine.log("t", 0)
        for number in range(30):
            await store(log, b"%d" % number + b"x" * 400, producer_id=3, first_number=number + 1)
            await owner.cell._checkpoint()
        await owner.cell._engine._drop(log, 4)  # type: ignore[arg-type]
        assert await owner.cell.trim() > 1
        await store(log, b"behind the snapshot")
        asked = await answers(engine)
        new = await cells.node("new")
        await caught_up(new, owner.cell.applied)
        assert await answers(new.cell._engine) == asked
