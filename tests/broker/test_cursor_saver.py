"""The saver: acks become durable soon enough for the windows, not more often than that, and whatever the disk does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from qb.core.push.active_subscription import ActiveSubscription
from qb.core.push.cursor_saver import QUICK, RETRY, SAVE_INTERVAL, SPACING, CursorSaver
from qb.core.subscriptions.subscription import Subscription
from qb.core.subscriptions.subscription_options import parse_options
from qb.core.wire.errors import BrokerError, DiskFull


class Disk:
    """Metadata whose transactions take as long as the test says, and fail when it says so."""

    def __init__(self) -> None:
        self.seconds = 0.001
        self.full = False
        self.transactions: list[tuple[float, list[str]]] = []  # when each began, and the keys in it
        self._soon: dict[str, Any] = {}
        self._busy = False

    def put_soon(self, key: str, value: Any) -> None:
        self._soon[key] = value

    async def flush(self) -> None:
        self.transactions.append((trio.current_time(), list(self._soon)))
        self._soon.clear()
        await trio.sleep(self.seconds)
        if self.full:
            raise DiskFull("no space left")

    async def put(self, key: str, value: Any) -> int:
        self.put_soon(key, value)
        await self.flush()
        return 1

    def put_then(self, values: dict[str, Any], done: Callable[[BrokerError | None], None]) -> None:
        assert not self._busy, "one transaction at a time"
        self._busy = True
        self._soon |= values
        trio.lowlevel.spawn_system_task(self._then, done)

    async def _then(self, done: Callable[[BrokerError | None], None]) -> None:
        error = None
        try:
            await self.flush()
        except DiskFull as refusal:
            error = refusal
        self._busy = False
        done(error)

    @property
    def times(self) -> list[float]:
        return [when for when, _ in self.transactions]


class Broker:
    """What the broker does with its subscriptions, without messages: deliver, ack, have it saved."""

    def __init__(self, saver: CursorSaver, disk: Disk) -> None:
        self.saver, self.disk = saver, disk
        self.pushed: list[tuple[str, int]] = []

    def add(self, name: str, window: int) -> ActiveSubscription:
        options = parse_options({"max_in_flight": window})
        active = ActiveSubscription(name, "t", 0, Subscription(name, options, {0: 0}, Random(1)), {})
        active.to_save()
        active.subscription.join("w")
        self.serve(active)
        return active

    def serve(self, active: ActiveSubscription) -> None:
        wanted = active.subscription.wanted(0)
        active.subscription.offer(0, wanted.start, len(wanted))
        for deliver in active.subscription.decide(trio.current_time()):
            self.pushed += [(active.name, offset) for run in deliver.runs for offset in run]  # type: ignore[union-attr]
        self.saver.note(active)

    def ack(self, active: ActiveSubscription, first: int, end: int) -> None:
        assert active.subscription.ack("w", 0, [range(first, end)], trio.current_time()) == end - first
        self.serve(active)

    def count(self, active: ActiveSubscription) -> int:
        return sum(1 for name, _ in self.pushed if name == active.name)


@pytest.fixture
def clock() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0)


@asynccontextmanager
async def a_saver() -> AsyncIterator[Broker]:
    disk = Disk()
    saver = CursorSaver(disk, lambda active: broker.serve(active))  # type: ignore[arg-type]
    broker = Broker(saver, disk)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(saver.run)
        yield broker
        nursery.cancel_scope.cancel()


async def test_with_a_window_of_one_each_ack_is_saved_at_once(clock: trio.testing.MockClock) -> None:
    async with a_saver() as broker:
        active = broker.add("s", window=1)
        began = trio.current_time()
        for offset in range(100):
            assert broker.count(active) == offset + 1
            broker.ack(active, offset, offset + 1)
            assert broker.count(active) == offset + 1, "not before it is durable"
            await trio.sleep(broker.disk.seconds)
            await trio.testing.wait_all_tasks_blocked()
        assert trio.current_time() - began < 0.2
        assert len(broker.disk.transactions) == 100


async def test_what_may_wait_is_saved_together_and_nothing_is_saved_twice(clock: trio.testing.MockClock) -> None:
    async with a_saver() as broker:
        subscriptions = [broker.add(f"s{number}", window=100) for number in range(20)]
        for active in subscriptions:
            broker.ack(active, 0, 10)
            await trio.sleep(SAVE_INTERVAL / 100)
        await trio.sleep(10)
        assert sum(len(keys) for _, keys in broker.disk.transactions) <= 2 * 20, "acks, then pushes"
        assert len(broker.disk.transactions) <= 4
        assert all(broker.count(active) == 110 for active in subscriptions)


async def test_a_save_begins_while_the_other_half_is_handled_and_the_next_one_follows_it(
    clock: trio.testing.MockClock,
) -> None:
    async with a_saver() as broker:
        active = broker.add("s", window=10)
        broker.disk.seconds = 1.0
        broker.ack(active, 0, 5)
        await trio.sleep(0.5)
        began = trio.current_time()
        broker.ack(active, 5, 10)
        await trio.sleep(1.0)
        assert broker.disk.times[1:2] == [pytest.approx(began + 0.5)], "right after the one that was under way"
        assert broker.count(active) == 15


async def test_whole_windows_are_saved_while_acks_come_faster_than_saves(clock: trio.testing.MockClock) -> None:
    async with a_saver() as broker:
        active, acked = broker.add("s", window=10), 0
        broker.disk.seconds = 0.01
        for _ in range(1_000):
            first, acked = acked, min(acked + 5, broker.count(active))
            if acked > first:
                broker.ack(active, first, acked)
            await trio.sleep(0.001)
        saves = len(broker.disk.transactions)
    assert acked > 500
    assert saves < acked / 8, "one for ten acks, and not one for five, once it is known how long a save takes"


async def test_half_a_window_does_not_wait_for_the_other_half_for_long(clock: trio.testing.MockClock) -> None:
    async with a_saver() as broker:
        active = broker.add("s", window=10)
        for half in range(0, 200, 5):
            broker.ack(active, half, half + 5)
            await trio.sleep(QUICK * broker.disk.seconds)
            assert broker.count(active) >= half + 10, "the other half is still being handled"
            await trio.sleep(broker.disk.seconds)


async def test_a_subscriber_with_nothing_free_waits_for_its_few_acks_a_moment_at_most(
    clock: trio.testing.MockClock,
) -> None:
    async with a_saver() as broker:
        active = broker.add("s", window=10)
        await trio.sleep(1)
        before = len(broker.disk.transactions)
        for offset in range(4):
            broker.ack(active, offset, offset + 1)
            await trio.sleep(SPACING / 8)
        await trio.sleep(SPACING)
        assert broker.count(active) == 14
        assert len(broker.disk.transactions) - before == 2, "the first one at once, the others together"


async def test_a_disk_that_refuses_is_tried_again_and_no_subscription_waits_for_ever(
    clock: trio.testing.MockClock,
) -> None:
    async with a_saver() as broker:
        active, other = broker.add("s", window=2), broker.add("other", window=2)
        broker.disk.full = True
        broker.ack(active, 0, 2)
        with pytest.raises(DiskFull):
            await broker.saver.save(other)
        broker.ack(other, 0, 1)
        for _ in range(1000):
            broker.serve(active)  # whatever else happens meanwhile
            await trio.sleep(RETRY / 100)
        assert broker.count(active) == 2, "nothing is pushed that could not be kept track of"
        assert len(broker.disk.transactions) <= 2 * 10 + 2, "not again and again"
        broker.disk.full = False
        await trio.sleep(2 * RETRY)
        assert broker.count(active) == 4
        assert broker.count(other) == 3


async def test_an_idle_subscription_is_not_saved(clock: trio.testing.MockClock) -> None:
    async with a_saver() as broker:
        active = broker.add("s", window=2)
        broker.ack(active, 0, 2)
        await trio.sleep(10)
        before = len(broker.disk.transactions)
        active.subscription.pause()
        broker.ack(active, 2, 4)
        await trio.sleep(1000)
        assert len(broker.disk.transactions) == before + 1
        assert broker.count(active) == 4


async def test_a_subscription_that_was_removed_is_not_written_again(clock: trio.testing.MockClock) -> None:
    async with a_saver() as broker:
        active = broker.add("s", window=1)
        broker.disk.full = True
        broker.ack(active, 0, 1)
        await trio.sleep(RETRY / 2)
        active.gone = True
        await trio.sleep(10 * RETRY)
        assert len(broker.disk.transactions) == 1


async def test_what_is_out_of_date_is_saved_in_the_end(clock: trio.testing.MockClock) -> None:
    async with a_saver() as broker:
        subscriptions = [broker.add("a", window=9), broker.add("b", window=9)]
        await trio.sleep(1)
        subscriptions[0].subscription.pause()
        await broker.saver.finish(subscriptions)
        assert broker.disk.transactions[-1][1] == ["cursor/a/head"]
