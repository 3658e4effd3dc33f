"""What all peers together have not read is bounded, and those that read are not disturbed."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from qb.doors.unread_output import PATIENCE, SMALL, OutputBudget


class ReadingPeer:
    """A peer that has been sent something."""

    def __init__(self, budget: OutputBudget) -> None:
        self._budget = budget
        self._queued = 0
        self.dropped = ""

    def send(self, size: int) -> None:
        self._queued += size
        self._budget.queue(self, size)

    def read(self, size: int) -> None:
        self._queued -= size
        self._budget.unqueue(self, size, all_of_it=not self._queued)

    def give_up(self, why: str) -> None:
        self.dropped = why
        self.read(self._queued)


async def test_while_there_is_no_room_a_peer_that_reads_nothing_is_dropped(autojump_clock: MockClock):
    budget = OutputBudget(100)
    slow, deaf, fresh = (ReadingPeer(budget) for _ in range(3))
    for peer in (slow, deaf):
        peer.send(40)
    await trio.sleep(PATIENCE * 10)
    slow.read(10)
    assert deaf.dropped == ""
    fresh.send(40)
    assert "QB_MAX_UNREAD_BYTES" in deaf.dropped
    assert (slow.dropped, fresh.dropped) == ("", "")
    assert budget.queued == 70


async def test_from_half_of_the_limit_on_it_is_tight():
    budget = OutputBudget(100)
    peer = ReadingPeer(budget)
    peer.send(50)
    assert not budget.is_tight
    peer.send(1)
    assert budget.is_tight
    peer.read(51)
    assert not budget.is_tight


async def test_a_fetch_waits_for_room_which_is_made_by_peers_that_read_or_are_dropped(autojump_clock: MockClock):
    budget = OutputBudget(100)
    reader, deaf = ReadingPeer(budget), ReadingPeer(budget)
    reader.send(50)
    deaf.send(50)
    async with budget.reserved(30):
        pass
    assert deaf.dropped
    assert reader.dropped  # it has not read either
    reader, deaf = ReadingPeer(budget), ReadingPeer(budget)
    reader.send(50)
    deaf.send(50)
    start = trio.current_time()

    async def reads() -> None:
        reader.read(50)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reads)
        async with budget.reserved(30):
            assert trio.current_time() - start < PATIENCE
    assert deaf.dropped == ""


async def test_the_last_quarter_is_for_ordinary_fetches(autojump_clock: MockClock):
    budget = OutputBudget(8 * SMALL)
    peer = ReadingPeer(budget)
    peer.send(6 * SMALL)
    start = trio.current_time()
    async with budget.reserved(SMALL):
        assert trio.current_time() == start
    async with budget.reserved(SMALL + 1):
        assert peer.dropped


async def test_one_answer_that_is_larger_than_the_limit_is_given_when_there_is_nothing_else():
    async with OutputBudget(10).reserved(100):
        pass


async def test_what_is_read_from_disk_for_all_peers_at_the_same_time_is_bounded():
    budget, reading, most = OutputBudget(100), 0, 0
    go_on = trio.Event()

    async def read(size: int) -> None:
        nonlocal reading, most
        async with budget.reserved(size):
            reading += size
            most = max(most, reading)
            await go_on.wait()
            reading -= size

    async with trio.open_nursery() as readers:
        for size in (40, 40, 40, 90, 10):
            readers.start_soon(read, size)
        await wait_all_tasks_blocked()
        go_on.set()
    assert 40 <= most <= 100
    assert reading == 0
