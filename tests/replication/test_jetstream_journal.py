"""The journal on a real JetStream cluster of three nodes keeps the same contract as the one in memory."""

from __future__ import annotations

import itertools

import pytest
import trio

from qb.replication.jetstream.jetstream_api import StreamUnfit, call_when_ready, stream_config
from qb.replication.jetstream.jetstream_store import JetStreamStore
from qb.replication.journal.journal import Journal
from qb.replication.journal.trio_timers import TrioTimers
from qb.replication.nats.nats_client import NatsClient
from tests.support.journal_contract import JournalContract, MakeJournal, MakeStore, StoreContract
from tests.support.nats_cluster import NatsCluster

pytestmark = [pytest.mark.cluster, pytest.mark.process, pytest.mark.timeout(120)]
CELLS = itertools.count()


@pytest.fixture
async def timers(nursery: trio.Nursery) -> TrioTimers:
    timers = TrioTimers()
    nursery.start_soon(timers.run)
    return timers


@pytest.fixture
async def client(nats_cluster: NatsCluster, nursery: trio.Nursery) -> NatsClient:
    client = NatsClient(nats_cluster.urls)
    nursery.start_soon(client.run)
    return client


@pytest.fixture
async def stores(client: NatsClient, timers: TrioTimers) -> MakeStore:
    """Makes stores of one new cell."""
    cell = f"cell{next(CELLS)}"
    await JetStreamStore(client, timers, cell).open()
    return lambda: JetStreamStore(client, timers, cell)


@pytest.fixture
def new_store(stores: MakeStore) -> MakeStore:
    return stores


@pytest.fixture
def new_journal(stores: MakeStore, timers: TrioTimers) -> MakeJournal:
    return lambda owner, **options: Journal(stores(), timers, owner, **options)


class TestJetStreamStore(StoreContract):
    pass


class TestJetStreamJournal(JournalContract):
    pass


UNFIT = {
    "allow_atomic": False,
    "num_replicas": 1,
    "storage": "memory",
    "max_age": 3_600_000_000_000,
    "max_msgs": 1000,
    "allow_direct": False,
}


async def test_a_stream_that_could_lose_records_or_take_half_a_fence_is_refused(
    client: NatsClient, timers: TrioTimers
) -> None:
    for option, value in UNFIT.items():
        cell = f"unfit_{option}"
        config = stream_config(f"QB_{cell}", [f"qb.{cell}.>"], 3) | {option: value}
        await call_when_ready(client, f"STREAM.CREATE.QB_{cell}", config)
        with pytest.raises(StreamUnfit, match=f"stream QB_{cell} cannot be used as a journal"):
            await JetStreamStore(client, timers, cell).open()
        await call_when_ready(client, f"STREAM.DELETE.QB_{cell}")
