"""Threads, run inline at a moment that a seed decides: work begins late, and its result comes later still."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import trio

from qb.storage.commit.completions import Completions
from qb.storage.commit.writer_threads import WriterThreads, result_of


class Slot:
    """Where work is done in order."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()


class SimulatedWriters(WriterThreads):
    """Stands for WriterThreads: the same promises, without a thread."""

    chance: Random  # set by installed(), as is:
    slowest: float  # seconds that a piece of work takes at most, before it is done and after

    def __init__(self, name: str, threads: int, completions: Completions) -> None:
        self._completions = completions
        self._changed = trio.lowlevel.ParkingLot()
        self._ready: deque[Slot] = deque()
        self._done: list[tuple[Slot, Any]] = []  # whose results have not been handed over
        self.busy = 0

    def submit(self, work: Callable[[], Any], finished: Callable[[Any], None], behind: Any = None) -> Any:
        self.busy += 1
        if behind is not None and behind.jobs:
            behind.jobs.append((work, finished))
            return behind
        slot = Slot()
        slot.jobs.append((work, finished))
        self._ready.append(slot)
        self._changed.unpark_all()
        return slot

    @property
    def are_wanted(self) -> bool:
        return False

    def start(self) -> None:
        pass

    async def deliver_forever(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                while self._ready:
                    nursery.start_soon(self._work, self._ready.popleft())
                await self._changed.park()

    async def deliver(self) -> None:
        """Do one piece of work and hand its result over."""
        while self._ready:
            await self._work(self._ready.popleft())
        await trio.sleep(self.slowest)

    async def _work(self, slot: Slot) -> None:
        while slot.jobs:
            work, _ = slot.jobs[0]
            try:
                await trio.sleep(self.chance.random() * self.slowest)
            except trio.Cancelled:
                self._ready.append(slot)  # deliver() goes on with it
                raise
            ended = slot, result_of(work)
            self._done.append(ended)
            with trio.CancelScope(shield=True):
                await trio.sleep(self.chance.random() * self.slowest)
            if ended in self._done:
                self._end(ended)

    @property
    def has_results(self) -> bool:
        """Sometimes a step of the event loop finds them, and sometimes it is too early."""
        return bool(self._done) and self.chance.random() < 0.5

    def hand_over(self) -> None:
        while self._done:
            self._end(self._done[0])

    def _end(self, ended: tuple[Slot, Any]) -> None:
        self._done.remove(ended)
        slot, result = ended
        _, finished = slot.jobs.popleft()
        self.busy -= 1
        with self._completions:
            finished(result)

    def stop(self, patience: float) -> None:
        pass

    @property
    def is_stuck(self) -> bool:
        return False

    def close(self) -> None:
        pass


@contextmanager
def installed(chance: Random, slowest: float) -> Iterator[None]:
    """Run what would go to a thread in the event loop, at a moment of chance."""

    async def run_sync(work: Callable[..., Any], *arguments: Any, **_: object) -> Any:
        with trio.CancelScope(shield=True):
            await trio.sleep(chance.random() * slowest)
            return work(*arguments)

    SimulatedWriters.chance, SimulatedWriters.slowest = chance, slowest
    with (
        patch.object(trio.to_thread, "run_sync", run_sync),
        patch("qb.storage.local_engine.WriterThreads", SimulatedWriters),
    ):
        yield
