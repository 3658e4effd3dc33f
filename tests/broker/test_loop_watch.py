"""Passes of the event loop are measured, and what held it is named."""

from __future__ import annotations

import pytest
import trio

from qb.core.loop_watch import LoopWatch
from qb.core.pacing import portions, working_on


class HeldClock:
    """A clock that only moves when a test holds the event loop."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    held = HeldClock()
    monkeypatch.setattr("qb.core.pacing.perf_counter", held)
    return held


async def one_pass() -> None:
    """Return when the loop has looked at its sockets and timers twice at least."""
    for _ in range(3):
        await trio.lowlevel.checkpoint()


async def test_every_pass_is_counted_by_how_long_it_took(clock):
    watch = LoopWatch(clock)
    with watch.watching():
        clock.now += 0.02
        await one_pass()
    assert watch.lag.counts[watch.lag.bounds.index(0.025)] == 1
    assert watch.lag.counts[0] >= 1
    assert watch.lag.total == pytest.approx(0.02)
    assert watch.stalled_so_far() == 0


async def test_a_stall_is_logged_with_what_took_longest_in_it(clock, caplog):
    watch = LoopWatch(clock)
    with watch.watching():
        await one_pass()
        working_on("peer-1", "HEARTBEAT")
        clock.now += 0.1
        working_on("peer-2", "REQUEST", "describe_topics")
        clock.now += 3.0
        working_on("peer-3", "HEARTBEAT")
        await one_pass()
    assert "the event loop was held for 3100 ms, 3000 of them by peer-2 REQUEST describe_topics" in caplog.text
    assert watch.stalled_so_far() == pytest.approx(3.1)


async def test_a_portion_after_a_checkpoint_is_charged_to_its_request(clock, caplog):
    watch = LoopWatch(clock)
    with watch.watching():
        working_on("peer", "REQUEST", "commit_offsets")
        async for portion in portions(range(2), size=1):
            clock.now += portion[0]
        await one_pass()
    assert "held for 1000 ms, 1000 of them by peer REQUEST commit_offsets" in caplog.text


async def test_stalls_that_follow_each_other_fill_no_log(clock, caplog):
    watch = LoopWatch(clock)
    with watch.watching():
        for _ in range(20):
            clock.now += 0.125
            await one_pass()
    assert caplog.text.count("was held") == 3
    assert "7 more since the last such line" in caplog.text


async def test_a_stall_counts_while_it_lasts_and_a_wait_that_ends_late_is_one(clock):
    watch = LoopWatch(clock)
    with watch.watching():
        await one_pass()
        clock.now += 5
        assert watch.stalled_so_far() == 5
        await one_pass()
        assert watch.stalled_so_far() == 5
        watch.before_io_wait(timeout=2)
        clock.now += 10  # it should have been woken after 2: the process did not run
        watch.after_io_wait(timeout=2)
        assert watch.stalled_so_far() == 13
