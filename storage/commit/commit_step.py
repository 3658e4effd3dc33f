"""Appends of one step of the event loop, committed at its end in one batch for each log."""

from __future__ import annotations

from typing import Protocol

from qb.storage.commit.completions import Completions
from qb.storage.commit.sync_pace import SyncPace


class Committer(Protocol):
    """A log that has gathered runs for a batch."""

    def commit(self, *, alone: bool) -> bool:
        """Begin to make durable what has gathered; `alone`: committing synchronously is acceptable. True: it did."""


class CommitSteps:
    """One step of the event loop, if it was announced: `with commit_step(idle): ...`; nothing may be awaited in it.

    The completions of the step are run at its end, when all its commits have begun.
    """

    def __init__(self, completions: Completions, pace: SyncPace) -> None:
        self._completions = completions
        self._pace = pace
        self._open = self._idle = False
        self.at_once = False  # was all that the last step gave made durable at its end?
        self._waiting: dict[Committer, None] = {}

    def __call__(self, idle: bool) -> CommitSteps:
        self._idle = idle
        self._pace.is_shared = not idle
        return self

    def __enter__(self) -> CommitSteps:
        self._completions.__enter__()
        self._open, self.at_once = True, False
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        try:
            self._commit()
        finally:
            self._completions.__exit__()

    def _commit(self) -> None:
        waiting, self._waiting = self._waiting, {}
        alone = self._idle and len(waiting) == 1
        for each in waiting:
            self.at_once = each.commit(alone=alone)

    @property
    def is_open(self) -> bool:
        """Is this inside a step that was announced?"""
        return self._open

    def commit(self, committer: Committer) -> None:
        """Have a log commit at the end of the step, or now if none was announced."""
        if self._open:
            self._waiting[committer] = None
        else:
            committer.commit(alone=False)
