"""Runs that wait for their batch to be written."""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

from qb.core.wire.errors import BrokerError
from qb.storage.commit.completions import Completions
from qb.storage.engine import AppendRun, Done
from qb.storage.signals import Signal


class WaitingRun(NamedTuple):
    """A run whose publisher has not been answered yet."""

    run: AppendRun
    done: Done
    since: float  # on time.perf_counter()


class PendingRuns:
    """The runs of one log that go into its next batch, in order."""

    def __init__(self, limit: int) -> None:
        self._limit = limit  # bytes; beyond it nothing is refused, but has_room is False and publishers wait
        self._waiting: list[WaitingRun] = []
        self.size = 0  # how many bytes have gathered
        self._taken = Signal()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def has_room(self) -> bool:
        return self.size < self._limit

    async def wait_for_room(self) -> None:
        """Return when has_room."""
        while not self.has_room:
            await self._taken.wait()

    @property
    def runs(self) -> list[AppendRun]:
        """What has gathered."""
        return [waiting.run for waiting in self._waiting]

    def add(self, run: AppendRun, done: Done) -> None:
        """Let one more run wait."""
        self._waiting.append(WaitingRun(run, done, time.perf_counter()))
        self.size += len(run.data)

    def take(self) -> list[WaitingRun]:
        """Return everything that has gathered and begin anew."""
        taken, self._waiting, self.size = self._waiting, [], 0
        self._taken.set()
        return taken

    def take_some(self, most: int) -> list[WaitingRun]:
        """Return the first runs, as many as have `most` bytes together, but at least one."""
        if self.size <= most:
            return self.take()
        count = size = 0
        for waiting in self._waiting:
            more = size + len(waiting.run.data)
            if count and more > most:
                break
            count, size = count + 1, more
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self.size -= size
        self._taken.set()
        return taken


def answer(completions: Completions, waiting: list[WaitingRun], error: BrokerError | None, append_ms: int) -> None:
    """Queue the call of each run's `done`; runs in a row that have the same one share a call."""
    last: Done | None = None
    runs: list[AppendRun] = []
    for run, done, _ in waiting:
        if done == last:
            runs.append(run)
            continue
        last, runs = done, [run]
        completions.add(partial(done, runs, error, append_ms))
