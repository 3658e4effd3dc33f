"""Appends of one step of the event loop, committed at its end in one batch for each log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio

from qb.storage.commit.completions import Completions
from qb.storage.commit.sync_pace import SyncPace
from qb.storage.commit.writer_threads import WriterThreads
from qb.storage.faults import Faults
from qb.storage.signals import Signal

SOON = 0.02  # seconds that a batch for which no caller waits may wait for company


class BatchSource(Protocol):
    """A log that has gathered runs for a batch."""

    def commit(self, *, alone: bool) -> bool:
        """Begin to make durable what has gathered; `alone`: committing synchronously is acceptable. True: it did."""


class CommitSteps:
    """One step of the event loop, if it was announced: `with commit_step(idle): ...`; nothing may be awaited in it.

    The completions of the step are run at its end, when all its commits have begun. While several peers are served,
    what writer threads have finished meanwhile is handed over there, too: an answer need not wait for the rest of the
    pass. A log whose commit fails by a fault of ours keeps no other from its own; it is tried again soon.
    """

    def __init__(self, completions: Completions, pace: SyncPace, writers: WriterThreads | None = None) -> None:
        """`writers`: whose results are handed over at the end of a step."""
        self._completions = completions
        self._pace = pace
        self._writers = writers
        self._open = self._idle = False
        self.at_once = False  # was all that the last step gave made durable at its end?
        self._waiting: dict[BatchSource, None] = {}
        self._prepares: dict[Callable[[], None], None] = {}
        self._lagging: dict[BatchSource, None] = {}
        self._some_lag = Signal()
        self._faults = Faults()

    def __call__(self, idle: bool) -> CommitSteps:
        self._idle = idle
        self._pace.is_shared = not idle
        return self

    def __enter__(self) -> CommitSteps:
        self._completions.__enter__()
        self._open, self.at_once = True, False
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._prepare()
            self._open = False
            self._commit()
            if not self._idle and self._writers is not None and self._writers.has_results:
                self._writers.hand_over()
        finally:
            self._open = False
            self._completions.__exit__()

    def _prepare(self) -> None:
        while self._prepares:
            prepares, self._prepares = self._prepares, {}
            for each in prepares:
                with self._faults.contained("what precedes the commits of a step"):
                    each()

    def _commit(self) -> None:
        waiting, self._waiting = self._waiting, {}
        alone = self._idle and len(waiting) == 1
        for each in waiting:
            self.at_once = self._commit_one(each, alone)

    def _commit_one(self, source: BatchSource, alone: bool) -> bool:
        try:
            return source.commit(alone=alone)
        except Exception as error:
            self._faults.note(f"the commit of {source}", error)
            self.commit_soon(source)
            return False

    @property
    def is_open(self) -> bool:
        """Is this inside a step that was announced?"""
        return self._open

    def before_commits(self, prepare: Callable[[], None]) -> bool:
        """Have `prepare` called once at the end of the step, before its commits begin; False: none was announced."""
        if self._open:
            self._prepares[prepare] = None
        return self._open

    def commit(self, source: BatchSource) -> None:
        """Have a log commit at the end of the step, or now if none was announced."""
        if self._open:
            self._waiting[source] = None
        else:
            source.commit(alone=False)

    def commit_soon(self, source: BatchSource) -> None:
        """Have a log commit within SOON, if it has not until then."""
        self._lagging[source] = None
        self._some_lag.set()

    def commit_what_lags(self) -> None:
        """Have the logs commit now that may do so soon."""
        lagging, self._lagging = self._lagging, {}
        with self._completions:
            for each in lagging:
                self._commit_one(each, False)

    async def run(self) -> None:
        """Have logs commit that may do so soon, until cancelled."""
        while True:
            while not self._lagging:
                await self._some_lag.wait()
            await trio.sleep(SOON)
            self.commit_what_lags()
