"""Timers on the clock of trio."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

import trio

from qb.storage.signals import Signal


class TrioTimers:
    """Calls that are due later, made by one task."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._earlier = Signal()

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it once in run(), when so many seconds have passed. Does not block."""
        due = trio.current_time() + seconds
        if not self._due or due < self._due[0][0]:
            self._earlier.set()
        heapq.heappush(self._due, (due, next(self._numbers), call))

    async def run(self) -> None:
        """Make the calls, until it is cancelled."""
        while True:
            with trio.move_on_at(self._due[0][0] if self._due else math.inf):
                await self._earlier.wait()
            now = trio.current_time()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
