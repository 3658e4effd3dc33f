"""Work of which each item takes a while, by a clock that nothing else moves on: the items of a pass are counted."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from qb.core import pacing
from qb.core.loop_watch import LoopWatch
from tests.support.push_peers import a_fast_peer, a_topic

COST = 0.004  # seconds that a round, or a snapshot, pretends to take
IN_A_TURN = 4  # as many begin before a turn of 15 ms is over
SUBSCRIPTIONS = 40


class SlowWork(trio.abc.Instrument):
    """A clock that nothing but work moves on, and the work of each pass of the event loop."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.passes: list[list[str]] = []
        self._spent = 0.0

    def clock(self) -> float:
        return self._spent

    def do(self, name: str) -> None:
        self._spent += COST
        self.done.append(name)

    def before_io_wait(self, timeout: float) -> None:
        if self.done:
            self.passes.append(self.done)
            self.done = []


def slow_work(monkeypatch: pytest.MonkeyPatch) -> SlowWork:
    """Let passes of the event loop be measured by a clock of this work."""
    work = SlowWork()
    monkeypatch.setattr(pacing, "perf_counter", work.clock)
    monkeypatch.setattr(LoopWatch.__init__, "__defaults__", (work.clock,))
    return work


async def subscribed(connect: Any, mode: str) -> list[Any]:
    """Join all subscriptions, one peer for every ten of them."""
    operator = await a_topic(connect)
    peers = [await a_fast_peer(connect) for _ in range(SUBSCRIPTIONS // 10)]
    for number in range(SUBSCRIPTIONS):
        name = f"s{number}"
        await operator.call("create_subscription", subscription_id=name, topic="a", options={"mode": mode})
        await peers[number // 10].ask(7, 2, subscription_id=name)
    return peers
