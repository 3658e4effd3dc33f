"""Requests that are not answered in time are given up, in their order, with one timer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from qb.replication.jetstream.answer_limit import AnswerLimit


class CountedTimers:
    """Timers that say how often they were asked for a call."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self.asked = 0

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.asked += 1
        self._nursery.start_soon(self._call, seconds, call)

    async def _call(self, seconds: float, call: Callable[[], None]) -> None:
        await trio.sleep(seconds)
        call()


@pytest.fixture
def timers(autojump_clock: MockClock, nursery: trio.Nursery) -> CountedTimers:
    return CountedTimers(nursery)


async def test_what_is_not_answered_is_given_up_in_time_and_in_order(timers: CountedTimers) -> None:
    limit, given_up = AnswerLimit(timers, 5.0), []
    began = trio.current_time()

    def give_up(token: str) -> None:
        given_up.append((token, round(trio.current_time() - began)))

    for token in ("a", "b", "c"):
        limit.add(token, partial(give_up, token))
        await trio.sleep(1.0)
    limit.answered("b")
    await trio.sleep(10.0)
    assert given_up == [("a", 5), ("c", 7)]


async def test_requests_that_are_answered_cost_no_timer_each(timers: CountedTimers) -> None:
    limit, given_up = AnswerLimit(timers, 5.0), []  # type: ignore[var-annotated]
    for number in range(1000):
        limit.add(str(number), partial(given_up.append, number))
        await trio.sleep(0.01)
        limit.answered(str(number))
    assert timers.asked <= 3
    limit.add("late", partial(given_up.append, "late"))
    await trio.sleep(20.0)
    assert given_up == ["late"]
