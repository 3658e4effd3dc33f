"""Owners that are stopped or killed, and a NATS leader that is killed, on a real cluster: a ledger counts the acks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import trio

from qb.replication.jetstream.jetstream_api import call_when_ready
from qb.replication.jetstream.jetstream_store import JetStreamStore
from qb.replication.journal import takeover
from qb.replication.journal.journal import Journal, JournalEntry
from qb.replication.journal.journal_records import decode
from qb.replication.journal.trio_timers import TrioTimers
from qb.replication.nats.nats_client import NatsClient
from tests.support.journal_contract import Outcomes, collected, look
from tests.support.journal_ledger import WINDOW, OwnerProcess, check
from tests.support.late_network import LateNetwork
from tests.support.nats_cluster import NatsCluster, NatsNode
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.process, pytest.mark.kill, pytest.mark.timeout(180)]


@pytest.fixture
def start_owner() -> Iterator[Callable[[str, str], OwnerProcess]]:
    started: list[OwnerProcess] = []

    def start(url: str, cell: str) -> OwnerProcess:
        started.append(OwnerProcess(url, cell))
        return started[-1]

    yield start
    for owner in started:
        owner.kill()


class Successor:
    """The owner in this process."""

    def __init__(self, client: NatsClient, timers: TrioTimers, cell: str) -> None:
        self.client = client
        self.store = JetStreamStore(client, timers, cell)
        self.journal = Journal(self.store, timers, "successor", window=WINDOW)
        self.outcomes = Outcomes(self.journal)

    async def entries(self) -> list[JournalEntry]:
        """Append a last payload, and return everything up to it."""
        self.outcomes.append(b"the last one")
        await self.outcomes.wait(len(self.outcomes.all) + 1)
        entries: list[JournalEntry] = []
        async with aclosing(self.journal.follow()) as following:
            async for some in following:
                entries += some
                if entries[-1].payload == b"the last one":
                    break
        return entries


async def successor(nursery: trio.Nursery, urls: list[str], cell: str) -> Successor:
    client, timers = NatsClient(urls), TrioTimers()
    nursery.start_soon(client.run)
    nursery.start_soon(timers.run)
    made = Successor(client, timers, cell)
    await made.store.open()
    return made


async def take_over_while_its_appends_are_late(
    nats_cluster: NatsCluster, nursery: trio.Nursery, start_owner: Callable[[str, str], OwnerProcess], cell: str
) -> int:
    """Stop an owner whose appends are on their way, take over, let them arrive, let it go on, and check its acks.

    Returns how many of its records were stored behind the fence.
    """
    new = await successor(nursery, nats_cluster.urls, cell)
    network = LateNetwork(nats_cluster.nodes[0].port)
    await nursery.start(network.run)
    owner = start_owner(f"nats://127.0.0.1:{network.port}", cell)
    await until(lambda: len(owner.acks) >= 50)
    network.hold()
    await until(lambda: network.held.count(b"HPUB") >= 8)
    owner.signal(signal.SIGSTOP)
    taken = await new.journal.take_over()
    network.release()
    owner.signal(signal.SIGCONT)
    await until(lambda: owner.is_fenced)
    entries = await new.entries()
    check(owner, entries)
    behind = await look(new.store, taken.tenure.position + 1, end=entries[-1].position + 1)
    records = [decode(each.data) for each in behind]
    return sum(record is not None and record.epoch < taken.tenure.epoch for record in records)


async def test_no_append_of_a_stopped_owner_is_stored_behind_the_fence(
    nats_cluster: NatsCluster, nursery: trio.Nursery, start_owner: Callable[[str, str], OwnerProcess]
) -> None:
    assert await take_over_while_its_appends_are_late(nats_cluster, nursery, start_owner, "late") == 0


async def test_behind_a_fence_of_one_record_they_would_be_stored_but_not_acked(
    nats_cluster: NatsCluster,
    nursery: trio.Nursery,
    start_owner: Callable[[str, str], OwnerProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(takeover, "fence_size", lambda point: 1)
    assert await take_over_while_its_appends_are_late(nats_cluster, nursery, start_owner, "naive") > 0


async def test_everything_that_a_killed_owner_acked_is_there(
    nats_cluster: NatsCluster, nursery: trio.Nursery, start_owner: Callable[[str, str], OwnerProcess]
) -> None:
    new = await successor(nursery, nats_cluster.urls, "killed")
    owner = start_owner(nats_cluster.urls[1], "killed")
    await until(lambda: len(owner.acks) >= 100)
    owner.kill()
    taken = await new.journal.take_over()
    assert taken.tenure.epoch == owner.epoch + 1
    check(owner, await new.entries())


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    """Three nodes that a test may harm."""
    cluster = NatsCluster(tmp_path)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


PAYLOADS = [b"%d" % number for number in range(400)]


async def appending(nursery: trio.Nursery, cluster: NatsCluster) -> Successor:
    """Return an owner that has 400 payloads to append, and has begun."""
    owner = await successor(nursery, cluster.urls, "harmed")
    await owner.journal.take_over()
    owner.outcomes.append(*PAYLOADS[:100])
    await owner.outcomes.wait(50)
    owner.outcomes.append(*PAYLOADS[100:])
    return owner


async def leader_of(owner: Successor, cluster: NatsCluster) -> NatsNode:
    info = await call_when_ready(owner.client, f"STREAM.INFO.{owner.store.stream}")
    return next(node for node in cluster.nodes if node.name == info["cluster"]["leader"])


async def check_everything(owner: Successor) -> None:
    """All payloads are committed, each once, in order, and lie where their acks say."""
    await owner.outcomes.wait(len(PAYLOADS))
    entries = await collected(owner.journal, len(PAYLOADS))
    assert [(entry.payload, entry.position) for entry in entries if entry.payload] == owner.outcomes.all
    assert [payload for payload, _ in owner.outcomes.all] == PAYLOADS


async def test_a_nats_leader_that_is_killed_loses_and_doubles_nothing(
    own_cluster: NatsCluster, nursery: trio.Nursery
) -> None:
    owner = await appending(nursery, own_cluster)
    (await leader_of(owner, own_cluster)).kill()
    await check_everything(owner)


async def test_a_nats_cluster_that_is_killed_as_a_whole_and_started_again_loses_and_doubles_nothing(
    own_cluster: NatsCluster, nursery: trio.Nursery
) -> None:
    owner = await appending(nursery, own_cluster)
    own_cluster.kill()
    await until(lambda: not owner.client.is_connected)
    own_cluster.start()
    await check_everything(owner)


async def test_a_follower_goes_on_when_the_node_that_served_it_is_killed(
    own_cluster: NatsCluster, nursery: trio.Nursery
) -> None:
    owner = await appending(nursery, own_cluster)
    follower = await successor(nursery, own_cluster.urls[::-1], "harmed")
    found: list[JournalEntry] = []

    async def follow() -> None:
        found.extend(await collected(follower.journal, len(PAYLOADS)))

    async with trio.open_nursery() as following:
        following.start_soon(follow)
        await until(lambda: follower.client.server is not None)
        server = follower.client.server
        assert server is not None
        next(node for node in own_cluster.nodes if node.name == server.server_name).kill()
    assert [entry.payload for entry in found if entry.payload] == PAYLOADS
    await check_everything(owner)
