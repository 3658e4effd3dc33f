"""The seam between what a running broker makes durable and where it becomes so.

Three kinds of work pass through it: batches of logs, changes of the metadata, frames of stages. `LocalCommitter` gives
them to writer threads, which sync. Another committer may make them durable elsewhere first, and have them carried out
on this disk when that is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from qb.storage.commit.sync_pace import SyncPace
from qb.storage.commit.writer_threads import WorkerSlot, WriterThreads


class Work(Protocol):
    """Something that is to be durable."""

    def carry_out(self) -> Any:
        """Write it to this disk, and sync it if the committer says so. Blocks; returns the result or what failed."""


class Committer(Protocol):
    """Takes works in order. All methods belong to the event loop."""

    syncs: bool  # must batches be synced by the work? Else they need not be, or the committer has made them durable
    syncs_stages: bool  # and the frames of stages, which are durable whatever the settings say?

    def submit(
        self, work: Work, finished: Callable[[Any], None], behind: WorkerSlot | None = None
    ) -> WorkerSlot | None:
        """Make a work durable, then call `finished` with its result, or with its exception, in the event loop.

        Returns the slot that has it, None if it waits for one. More work of the same log can be put `behind` it.
        """

    @property
    def are_wanted(self) -> bool:
        """Do works wait for a slot? Then no log should keep one busy with a second batch."""

    @property
    def may_hold_loop(self) -> bool:
        """May a short work be carried out right here instead of being submitted?"""

    async def deliver(self) -> None:
        """Wait until there are results and hand them over: for an end at which no other task does."""


class LocalCommitter:
    """Durable means synced on this disk."""

    def __init__(self, writers: WriterThreads, pace: SyncPace, *, syncs: bool) -> None:
        self.syncs, self.syncs_stages = syncs, True
        self._writers, self._pace = writers, pace

    def submit(
        self, work: Work, finished: Callable[[Any], None], behind: WorkerSlot | None = None
    ) -> WorkerSlot | None:
        return self._writers.submit(work.carry_out, finished, behind)

    @property
    def are_wanted(self) -> bool:
        return self._writers.are_wanted

    @property
    def may_hold_loop(self) -> bool:
        return self._pace.may_hold_loop

    async def deliver(self) -> None:
        await self._writers.deliver()
