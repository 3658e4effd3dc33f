"""How long the event loop is held by its tasks, and what held it.

Between two looks at sockets and timers the loop runs every task that is ready. What becomes ready meanwhile waits, so
the length of such a pass is the lag of the loop. It is measured for every pass, without a timer or a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import perf_counter

import trio

from qb.core.pacing import current
from qb.storage.measures import SECONDS, Histogram

log = logging.getLogger("qb.event_loop")

STALL = 0.05  # seconds: a pass that takes longer is logged, and is not counted as the silence of peers
BETWEEN_LINES = 1.0  # seconds between two lines of the log at least


class LoopWatch(trio.abc.Instrument):
    """Measures the passes of one event loop."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.lag = Histogram(SECONDS)  # of every pass, in seconds
        self._stalled = 0.0  # seconds, of all stalls that are over
        self._clock = clock
        self._began = clock()
        self._waits_until = float("inf")
        self._logged = float("-inf")
        self._unlogged = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the event loop that runs this, until the context is left."""
        self._began = current.new_pass = current.pass_began = self._clock()
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            current.pass_began = inf
            trio.lowlevel.remove_instrument(self)

    def stalled_so_far(self) -> float:
        """Return for how many seconds the loop has been stalled since the start, this pass included."""
        held = self._clock() - self._began
        return self._stalled + held if held > STALL else self._stalled

    def before_io_wait(self, timeout: float) -> None:
        """A pass is over: called by trio."""
        now = self._clock()
        held = now - self._began
        self._waits_until = now + timeout
        lag = self.lag
        if held <= lag.bounds[0]:
            lag.counts[0] += 1
            lag.total += held
            return
        lag.observe(held)
        if held > STALL:
            self._note(held, now)

    def after_io_wait(self, timeout: float) -> None:
        """A pass begins: called by trio. A wait that ended late is a stall too: the process did not run."""
        self._began = current.new_pass = current.pass_began = now = self._clock()
        if now - self._waits_until > STALL:
            self._stalled += now - self._waits_until

    def _note(self, held: float, now: float) -> None:
        """Count a stall, and log it unless another one has just been logged."""
        self._stalled += held
        longest, name = current.longest(now)
        if now - self._logged < BETWEEN_LINES:
            self._unlogged += 1
            return
        more = f"; {self._unlogged} more since the last such line" if self._unlogged else ""
        log.warning("the event loop was held for %.0f ms, %.0f of them by %s%s", 1e3 * held, 1e3 * longest, name, more)
        self._logged, self._unlogged = now, 0
