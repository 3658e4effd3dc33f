"""The committer of a cell's owner: durable means committed in the journal; then the work is done on this disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import trio

from qb.replication.engine.payloads import encode_batch, encode_metadata, encode_stage
from qb.replication.engine.snapshots import SnapshotWork
from qb.replication.journal.journal import Journal
from qb.replication.journal.journal_store import JournalError
from qb.storage.commit.batch_commit import BatchCommit
from qb.storage.commit.committer import Work
from qb.storage.commit.completions import Completions
from qb.storage.commit.writer_threads import WorkerSlot
from qb.storage.metadata.metadata_store import MetadataCommit
from qb.storage.signals import Signal
from qb.storage.stages.stage_file import StageWrite

logger = logging.getLogger(__name__)


class Copy(Protocol):
    """The copy on this disk."""

    def uid_of(self, topic: str) -> int: ...
    def apply(self, work: Work, finished: Callable[[Any], None], position: int) -> None: ...


class ReplicatedCommitter:
    """Implements qb.storage.commit.committer.Committer.

    There are two outcomes: a work is committed, or the tenure is lost and nothing is answered any more.
    """

    syncs = syncs_stages = are_wanted = may_hold_loop = False

    def __init__(self, copy: Copy, completions: Completions) -> None:
        self._copy, self._completions = copy, completions
        self._journal: Journal | None = None
        self._slot = WorkerSlot()  # of no thread: works go in the order in which they are submitted
        self._changed = Signal()
        self.open = 0  # works that are not done
        self.lost = trio.Event()
        self.failure: BaseException | None = None  # why it is lost

    def own(self, journal: Journal) -> None:
        """From now on works may be submitted: the journal is ours."""
        self._journal = journal

    def submit(
        self, work: Work, finished: Callable[[Any], None], behind: WorkerSlot | None = None
    ) -> WorkerSlot | None:
        assert self._journal is not None, "only an owner writes"
        self.open += 1
        if not self.lost.is_set():
            self._journal.append(self._payload(work), partial(self._committed, work, finished))
        return self._slot

    def _payload(self, work: Work) -> bytes:
        if isinstance(work, BatchCommit):
            topic, partition = work.where
            return encode_batch(self._copy.uid_of(topic), partition, work.batch, work.ranges)
        if isinstance(work, MetadataCommit):
            return encode_metadata(work.body)
        if isinstance(work, SnapshotWork):
            return work.encode()
        assert isinstance(work, StageWrite)
        return encode_stage(work.stage_id, work.first, work.append_ms, work.pieces)

    def _committed(self, work: Work, finished: Callable[[Any], None], outcome: int | JournalError) -> None:
        if isinstance(outcome, JournalError):
            self.lose(outcome)
        elif not self.lost.is_set():
            with self._completions:
                self._copy.apply(work, partial(self._done, finished), outcome)

    def _done(self, finished: Callable[[Any], None], result: Any) -> None:
        if self.lost.is_set():
            return
        self.open -= 1
        finished(result)
        self._changed.set()

    def lose(self, error: BaseException) -> None:
        """Answer nothing any more: whether what is open was committed will never be known here."""
        if not self.lost.is_set():
            self.failure = error
            self.lost.set()
            logger.error("the tenure is over: %s", error)
            self._changed.set()

    async def deliver(self) -> None:
        """Return when a work was done."""
        await self._changed.wait()

    async def settle(self) -> None:
        """Return when nothing is open, or the tenure is lost."""
        while self.open and not self.lost.is_set():
            await self._changed.wait()
