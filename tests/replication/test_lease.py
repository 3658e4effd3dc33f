"""The lease: an owner answers only while no other can, whatever the clocks, reads and answers do."""

from __future__ import annotations

import random

import pytest
import trio

from qb.core.settings import ClusterSettings
from qb.replication.lease.lease_keeper import LeaseKeeper, boot_time
from qb.replication.lease.lease_state import HOLD, LOOK, RENEW, LeaseRecord, LeaseWatcher, OwnerLease
from qb.replication.lease.lease_store import LeaseStore, LeaseTaken
from qb.replication.nats.nats_client import CONNECT_LIMIT, PING_INTERVAL, NatsClient
from qb.replication.nats.nats_conversation import MOST_PINGS, NatsDisconnected
from tests.support.nats_cluster import NatsCluster

TTL = 10.0
A = LeaseRecord("a")


class TestHolder:
    """The owner's side."""

    def test_the_lease_counts_from_the_sending_of_the_renewal(self) -> None:
        holder = OwnerLease(TTL)
        holder.began(100.0)
        holder.renewed(sent_at=101.0)  # answered whenever
        assert [holder.may_answer(now) for now in (101.0, 108.9, 109.0, 200.0)] == [True, True, False, False]

    def test_a_renewal_that_was_sent_before_the_fence_was_committed_does_not_count(self) -> None:
        holder = OwnerLease(TTL)
        assert not holder.may_answer(100.0)
        holder.began(100.0)
        holder.renewed(sent_at=99.9)
        assert not holder.may_answer(100.1)

    def test_a_late_answer_to_an_early_renewal_shortens_nothing(self) -> None:
        holder = OwnerLease(TTL)
        holder.began(0.0)
        holder.renewed(sent_at=5.0)
        holder.renewed(sent_at=2.0)
        assert holder.may_answer(12.0)

    def test_a_lost_lease_never_comes_back(self) -> None:
        holder = OwnerLease(TTL)
        holder.began(0.0)
        holder.lost()
        holder.renewed(sent_at=1.0)
        assert not holder.may_answer(1.0)

    def test_a_suspended_machine_finds_its_lease_run_out(self) -> None:
        holder = OwnerLease(TTL)
        holder.began(0.0)
        holder.renewed(sent_at=0.0)
        assert not holder.may_answer(3600.0)  # CLOCK_BOOTTIME went on

    def test_a_renewal_that_failed_is_sent_again_soon(self) -> None:
        holder = OwnerLease(TTL)
        assert holder.next_renewal(100.0, True) == 100.0 + RENEW * TTL
        assert holder.next_renewal(100.0, False) == 100.0 + LOOK * TTL


def test_a_nats_server_that_hangs_is_left_before_the_lease_of_an_owner_that_it_serves_runs_out() -> None:
    silent_for = (MOST_PINGS + 1) * PING_INTERVAL + CONNECT_LIMIT
    lasts = HOLD * ClusterSettings().lease_ttl - RENEW * ClusterSettings().lease_ttl
    assert silent_for < lasts


class TestWatcher:
    """A candidate's side."""

    def test_a_lease_that_stands_still_for_its_time_may_be_taken(self) -> None:
        watcher = LeaseWatcher(TTL)
        outcomes = []
        for now in (0.0, 4.0, 8.0, 9.9, 10.0):
            watcher.saw(now, now, 5, A)
            outcomes.append(watcher.may_take_over())
        assert outcomes == [False, False, False, False, True]

    def test_a_renewal_begins_the_time_anew(self) -> None:
        watcher = LeaseWatcher(TTL)
        for now, revision in ((0.0, 5), (9.0, 5), (9.5, 6), (18.0, 6)):
            watcher.saw(now, now, revision, A)
        assert not watcher.may_take_over()

    def test_time_in_which_looks_failed_does_not_count(self) -> None:
        watcher = LeaseWatcher(TTL)
        watcher.saw(0.0, 0.0, 5, A)
        watcher.failed()
        assert not watcher.may_take_over()
        watcher.saw(60.0, 60.0, 5, A)  # NATS was electing a leader for a minute
        assert not watcher.may_take_over()
        watcher.saw(70.0, 70.0, 5, A)
        assert watcher.may_take_over()

    def test_a_slow_look_counts_from_its_answer_and_up_to_its_sending(self) -> None:
        watcher = LeaseWatcher(TTL)
        watcher.saw(0.0, 4.0, 5, A)
        watcher.saw(13.9, 15.0, 5, A)
        assert not watcher.may_take_over()

    @pytest.mark.parametrize("record", [None, LeaseRecord("a", released=True)], ids=["never taken", "released"])
    def test_a_free_lease_may_be_taken_at_once(self, record: LeaseRecord | None) -> None:
        watcher = LeaseWatcher(TTL)
        assert not watcher.may_take_over()
        watcher.saw(0.0, 0.0, 1, record)
        assert watcher.may_take_over()

    def test_an_owner_whose_port_refuses_may_be_replaced_at_once(self) -> None:
        watcher = LeaseWatcher(TTL)
        watcher.saw(0.0, 0.0, 1, A)
        assert watcher.may_take_over(owner_refuses=True)


class FaultyLease:
    """A lease in memory; answers get lost, and reads may be outdated."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._history: list[tuple[int, LeaseRecord | None]] = [(0, None)]
        self.fails = 0.0

    def connection(self) -> FaultyConnection:
        return FaultyConnection(self)

    async def answer(self) -> None:
        await trio.sleep(self._draw.uniform(0, 0.2))
        if self._draw.random() < self.fails:
            await trio.sleep(2)
            raise NatsDisconnected("lost")

    async def read(self) -> tuple[int, LeaseRecord | None]:
        outdated = self._draw.random() < self.fails
        found = self._history[max(-len(self._history), -self._draw.randrange(1, 6))] if outdated else self._history[-1]
        await self.answer()
        return found

    async def write(self, revision: int, record: LeaseRecord) -> int:
        await self.answer()  # lost on the way
        if self._history[-1][0] != revision:
            raise LeaseTaken("taken")
        self._history.append((revision + 1, record))
        await self.answer()  # the answer is lost
        return revision + 1


class FaultyConnection:
    """One broker's way to it, which can be cut."""

    def __init__(self, lease: FaultyLease) -> None:
        self._lease = lease
        self.is_cut = False

    async def read(self) -> tuple[int, LeaseRecord | None]:
        await self._check()
        return await self._lease.read()

    async def write(self, revision: int, record: LeaseRecord) -> int:
        await self._check()
        return await self._lease.write(revision, record)

    async def _check(self) -> None:
        if self.is_cut:
            await trio.sleep(2)
            raise NatsDisconnected("cut")


@pytest.mark.parametrize("seed", range(20))
async def test_two_brokers_never_answer_at_the_same_time(seed: int, autojump_clock) -> None:
    draw = random.Random(seed)
    lease = FaultyLease(draw)
    ways = [lease.connection() for _ in range(3)]
    keepers = [LeaseKeeper(way, f"broker{n}", ttl=TTL, clock=trio.current_time) for n, way in enumerate(ways)]  # type: ignore[arg-type]
    owners: set[int] = set()

    async def live(keeper: LeaseKeeper) -> None:
        epoch = 0
        while True:
            await keeper.claim()
            epoch += 1
            await keeper.hold(epoch)

    async with trio.open_nursery() as nursery:
        for keeper in keepers:
            nursery.start_soon(live, keeper)
        for second in range(2500):
            lease.fails = 0.3 if second // 200 % 2 else 0.0
            if second % 250 == 0:
                for way, keeper in zip(ways, keepers, strict=True):
                    way.is_cut = draw.random() < (0.8 if keeper.may_answer() else 0.2)
            await trio.sleep(draw.uniform(0, 0.2))
            answering = {number for number, keeper in enumerate(keepers) if keeper.may_answer()}
            assert len(answering) <= 1
            owners |= answering
        nursery.cancel_scope.cancel()
    assert owners, "no broker ever answered"


async def test_an_owner_that_is_cut_off_stops_answering_before_another_broker_has_the_lease(autojump_clock) -> None:
    lease = FaultyLease(random.Random(0))
    way = lease.connection()
    first = LeaseKeeper(way, "first", ttl=TTL, clock=trio.current_time)  # type: ignore[arg-type]
    second = LeaseKeeper(lease, "second", ttl=TTL, clock=trio.current_time)  # type: ignore[arg-type]
    await first.claim()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.hold, 1)
        await trio.sleep(5)
        assert first.may_answer()
        way.is_cut = True
        began = trio.current_time()
        await second.claim()
        assert not first.may_answer()
        assert TTL / 2 < trio.current_time() - began < TTL * 2
        way.is_cut = False
        await trio.sleep(TTL)
        assert first.is_lost
        nursery.cancel_scope.cancel()


async def test_an_owner_that_releases_is_followed_at_once(autojump_clock) -> None:
    lease = FaultyLease(random.Random(0))
    first, second = (LeaseKeeper(lease, name, ttl=TTL, clock=trio.current_time) for name in ("first", "second"))  # type: ignore[arg-type]
    await first.claim()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.hold, 1)
        await trio.sleep(5)
        assert first.may_answer()
        await first.release()
        assert not first.may_answer()
        began = trio.current_time()
        await second.claim()
        assert trio.current_time() - began < 1
        nursery.cancel_scope.cancel()


async def test_a_process_that_follows_an_owner_does_not_wait_for_its_lease_to_run_out(autojump_clock) -> None:
    lease = FaultyLease(random.Random(0))
    ended = LeaseKeeper(lease, "a", ttl=TTL, clock=trio.current_time)  # type: ignore[arg-type]
    await ended.claim()
    began = trio.current_time()
    anew = LeaseKeeper(lease, "a", ttl=TTL, clock=trio.current_time, predecessor=ended.token)  # type: ignore[arg-type]
    await anew.claim()
    assert trio.current_time() - began < 1
    began = trio.current_time()
    await LeaseKeeper(lease, "a", ttl=TTL, clock=trio.current_time).claim()  # type: ignore[arg-type]
    assert trio.current_time() - began >= TTL, "a name alone proves nothing"


async def test_a_new_owner_answers_soon_after_a_renewal_of_it_was_lost(autojump_clock, nursery: trio.Nursery) -> None:
    lease = FaultyLease(random.Random(0))
    connection = lease.connection()
    keeper = LeaseKeeper(connection, "a", ttl=TTL, clock=trio.current_time)  # type: ignore[arg-type]
    await keeper.claim()
    connection.is_cut = True
    nursery.start_soon(keeper.hold, 1)
    await trio.sleep(1)
    connection.is_cut = False
    began = trio.current_time()
    await keeper.confirmed()
    assert trio.current_time() - began < 2 + 2 + LOOK * TTL, "the calls that were cut, and no quarter of the lease"


def test_the_clock_goes_on_while_the_machine_sleeps() -> None:
    assert boot_time() > 0


@pytest.mark.cluster
@pytest.mark.process
async def test_the_lease_in_a_bucket_of_nats_is_changed_by_compare_and_set(
    nats_cluster: NatsCluster, nursery: trio.Nursery
) -> None:
    client = NatsClient(nats_cluster.urls)
    nursery.start_soon(client.run)
    store = LeaseStore(client, "cell", timeout=20.0)
    await store.open()
    await store.open()
    assert await store.read() == (0, None)
    revision = await store.write(0, A)
    assert await store.read() == (revision, A)
    with pytest.raises(LeaseTaken):
        await store.write(0, LeaseRecord("b"))
    later = await store.write(revision, LeaseRecord("a", number=1))
    assert later > revision
    other = LeaseStore(client, "another", timeout=20.0)
    assert await other.read() == (0, None)
