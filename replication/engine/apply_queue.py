"""Works of the journal, carried out on this disk one after another, in the order of the journal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from qb.storage.commit.batch_commit import FailedBatch
from qb.storage.commit.committer import Work
from qb.storage.commit.completions import Completions
from qb.storage.commit.writer_threads import WorkerSlot, WriterThreads, result_of
from qb.storage.signals import Signal


class CopyFailed(OSError):
    """The disk of a copy did not take what the journal has."""


class ApplyQueue:
    """One thread and the works that wait for it. Belongs to the event loop.

    Everything that it is given is in the journal for good. So a work that fails here ends the queue: nothing behind it
    is carried out, and `broken` is set.
    """

    def __init__(self, thread: WriterThreads, completions: Completions) -> None:
        self._thread, self._completions = thread, completions
        self._slot: WorkerSlot | None = None
        self._changed = Signal()
        self.broken = trio.Event()
        self.failure: BaseException | None = None

    @property
    def waiting(self) -> int:
        """How many works are not done."""
        return self._thread.busy

    def put(self, work: Work, finished: Callable[[Any], None], *, is_short: bool = False) -> None:
        """Have a work done, then call `finished` with its result. A short one is done here if nothing is before it."""
        if self.failure is not None:
            return
        if is_short and not self._thread.busy:
            with self._completions:
                self._done(finished, result_of(work.carry_out))
        else:
            behind = self._slot if self._thread.busy else None
            self._slot = self._thread.submit(self._unless_broken(work), partial(self._done, finished), behind)

    def _unless_broken(self, work: Work) -> Callable[[], Any]:
        return lambda: self.failure or result_of(work.carry_out)

    def _done(self, finished: Callable[[Any], None], result: Any) -> None:
        if self.failure is None:
            if isinstance(result, FailedBatch):
                result = CopyFailed(f"this copy ends here: {result.error}")
            if isinstance(result, BaseException):
                self.end(result)
            else:
                finished(result)
        self._changed.set()

    async def reached(self, done: trio.Event) -> bool:
        """Return when an event is set by a work, and whether it is: False if the queue is broken before."""
        while not done.is_set() and self.failure is None:
            await self._changed.wait()
        return done.is_set()

    def end(self, failure: BaseException) -> None:
        """Do nothing more."""
        self.failure = self.failure or failure
        self.broken.set()
        self._changed.set()

    async def drained(self) -> None:
        """Return when all that was given is done, or the queue is broken."""
        while self._thread.busy and self.failure is None:
            await self._changed.wait()
