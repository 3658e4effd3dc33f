"""The log of one partition, made of segments; it never sees a byte layout.

Everything here belongs to the event loop. Commits run in writer threads, one at a time for a log, and come back as
results; while one is under way, arriving runs gather for the next. A short one that comes alone, on a disk that has
been quick, is not worth a change of threads.
"""

from __future__ import annotations

import errno
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import trio

from qb.core.wire.errors import BrokerError, Internal, LogDamaged, LogPoisoned, OffsetOutOfRange, UnknownTopic
from qb.storage.clean_stop import LogEnd
from qb.storage.commit.batch_commit import BatchCommit, CommitQueue, CommittedBatch, FailedBatch, assemble, fault
from qb.storage.commit.completions import Watchers
from qb.storage.commit.pending_runs import PendingRuns, WaitingRun, answer
from qb.storage.commit.writer_threads import WorkerSlot, result_of
from qb.storage.engine import AppendRun, Done, LogState, ProducerRange, StoredChunk
from qb.storage.files import LOST, OpenFiles
from qb.storage.log.log_context import HOUR_MS, LogContext, TopicHealth
from qb.storage.log.log_extents import LogExtent, dropped_segments
from qb.storage.log.log_recovery import RecoveredLog, prove_again
from qb.storage.log.recent_batches import RecentBatches, StoredBatch, cut, extend, joined
from qb.storage.log.sealed_batches import BadBatch
from qb.storage.log.segment import Segment
from qb.storage.log.segment_index import encode
from qb.storage.signals import Signal

logger = logging.getLogger(__name__)

# At most so much goes into one batch: measured, more of it is no faster and takes memory and time from others.
COMMIT_BYTES = 2 * 1024 * 1024
Found = TypeVar("Found")


class PendingBatch:
    """A batch on its way to the disk, and the runs that wait for it."""

    __slots__ = ("commit", "slot", "waiting")

    def __init__(self, waiting: list[WaitingRun], commit: BatchCommit) -> None:
        self.waiting, self.commit = waiting, commit
        self.slot: WorkerSlot | None = None  # where its writer has it, once that is known


class NewBeginning(NamedTuple):
    """A segment that begins a log whose older messages are needed no more."""

    files: OpenFiles
    directory: Path
    first_offset: int
    created_ms: int
    ranges: Sequence[ProducerRange]

    def carry_out(self) -> Segment:
        """Make it. Blocks. Raises OSError."""
        return Segment.create(self.files, self.directory, self.first_offset, self.created_ms, self.ranges)


class LocalLog:
    """One partition in files; what its methods promise stands in qb.storage.engine.PartitionLog."""

    def __init__(
        self, topic: str, partition: int, shared: LogContext, health: TopicHealth, found: RecoveredLog
    ) -> None:
        self.topic = topic
        self.partition = partition
        self._name = f"{topic}/{partition}"  # for people
        self.published_messages = 0
        self.published_bytes = 0
        self._shared = shared
        self._health = health
        self._segments = found.segments
        self._producer_ranges = found.producer_ranges
        self._first_offset = found.first_offset  # what lies before is dropped, though its segment may be here
        self._durable_offset = found.segments[-1].next_offset if found.segments else 0
        self._end_offset = self._next_offset = self._durable_offset
        self._held = False  # does the visible end stand still?
        self._held_reason: str | None = None  # why that lasts; None: it is expected to end at once
        self._last_ms = max([segment.last_ms for segment in found.segments], default=0)
        self._tail = RecentBatches()
        self._gathering = PendingRuns(shared.settings.max_pending_bytes)
        self._writing: list[PendingBatch] = []  # two at most
        self._shown_early: list[StoredBatch] = []  # readers may see them, and they are not durable here
        self._is_poisoned = False  # is it unknown what the file holds behind the durable end?
        self._is_stuck = False  # is something being written whose waiters were answered already?
        self._is_reopening = False  # does a thread prove the files anew?
        self._indexing = False  # are entries of the index being written?
        self._idle = Signal()
        self._watchers = Watchers()
        self._refusal: BrokerError | None = None  # poisoned, deleted or shut down: why nothing is appended any more
        health.damage = health.damage or found.damage

    # Where it begins and ends

    @property
    def first_offset(self) -> int:
        return max(self._first_offset, self._segments[0].base_offset) if self._segments else 0

    @property
    def end_offset(self) -> int:
        return self._end_offset

    @property
    def durable_offset(self) -> int:
        return self._durable_offset

    @property
    def next_offset(self) -> int:
        return self._next_offset

    def hold(self, end_offset: int | None = None, reason: str | None = None) -> None:
        self._held, self._held_reason = True, reason
        if end_offset is not None:
            self._end_offset = min(self._end_offset, end_offset)

    def release(self, shown_to: int = 0) -> None:
        self._held, self._held_reason = False, None
        self._show_early(shown_to)
        self._end_offset = max(self._end_offset, self._durable_offset, shown_to)
        self._shared.completions.notify(self._watchers)

    def _show_early(self, shown_to: int) -> None:
        """Keep for readers what they may see before it is durable."""
        runs = [each.run for pending in self._writing for each in pending.waiting]
        for run in [*runs, *self._gathering.runs] if shown_to > self._end_offset else ():
            if self._end_offset <= run.first_offset < shown_to:
                self._shown_early.append(StoredBatch(run.first_offset, 0, (bytes(run.data),), run.positions))

    @property
    def segments(self) -> list[Segment]:
        """All segments, the newest last."""
        return list(self._segments)

    @property
    def closed_segments(self) -> list[Segment]:
        """The segments that are never written again and that readers may see, oldest first."""
        return [segment for segment in self._segments[:-1] if segment.next_offset <= self._end_offset]

    @property
    def is_deleted(self) -> bool:
        return isinstance(self._refusal, UnknownTopic)

    @property
    def size(self) -> int:
        return sum([segment.size for segment in self._segments])

    def ranges(self) -> Iterable[ProducerRange]:
        return list(self._producer_ranges)

    def state(self) -> LogState:
        status, reason = ("held", self._held_reason) if self._held_reason else ("ok", None)
        if isinstance(self._refusal, LogPoisoned):
            status, reason = "poisoned", str(self._refusal)
        if self._health.damage:
            status, reason = "damaged", str(self._health.damage)
        return LogState(
            partition=self.partition,
            first_offset=self.first_offset,
            next_offset=self._end_offset,
            bytes=self.size,
            segments=len(self._segments),
            status=status,
            reason=reason,
        )

    def watch(self, moved: Callable[[], None]) -> Callable[[], None]:
        return self._watchers.add(moved)

    # Appending

    @property
    def has_room(self) -> bool:
        return self._gathering.has_room

    async def wait_for_room(self) -> None:
        await self._gathering.wait_for_room()

    def check_writable(self) -> None:
        self._check_damage()
        if self._refusal:
            raise self._refusal.with_traceback(None)

    def append(self, run: AppendRun, done: Done, *, lags: bool = False) -> None:
        if self._refusal or self._health.damage:
            self.check_writable()
        assert run.first_offset == self._next_offset, (run.first_offset, self._next_offset)
        self._next_offset += len(run.positions)
        self._gathering.add(run, done)
        if lags and self._gathering.size < COMMIT_BYTES:
            self._shared.commit_steps.commit_soon(self)
        elif not self._writing or self._gathering.size >= COMMIT_BYTES:
            self._shared.commit_steps.commit(self)

    def write_now(self) -> None:
        if self._gathering:
            self._shared.commit_steps.commit(self)

    def commit(self, *, alone: bool = False) -> bool:
        """Have what has gathered written and synced: in a writer thread or, if it is short and alone, right here: True.

        While a batch is being written the next one is made only when it is full, and waits behind it.
        """
        shared, segment = self._shared, self._segments[-1]
        before = self._writing[-1] if self._writing else None
        if not self._gathering.size or (before and not self._may_follow(before)):
            return False
        now = max(shared.clock(), self._last_ms)
        position = before.commit.end if before else segment.size
        is_full = self._is_full(segment, position, now)
        if is_full and before:
            return False
        self._last_ms = now
        waiting = self._gathering.take_some(COMMIT_BYTES)
        try:
            batch, ranges = assemble([each.run for each in waiting], now)
        except Exception as error:
            self._fail(error, waiting)
            return False
        queue = before.commit.queue if before else CommitQueue()
        new_segment_ranges = list(self._producer_ranges) if is_full else None
        where, sync = (self.topic, self.partition), shared.committer.syncs
        commit = BatchCommit(where, shared.files, segment, position, batch, ranges, queue, sync, new_segment_ranges)
        pending = PendingBatch(waiting, commit)
        self._writing.append(pending)
        if alone and not before and commit.is_short and shared.committer.may_hold_loop:
            self._committed(pending, result_of(commit.carry_out))
            return True
        slot = before.slot if before else None
        pending.slot = shared.committer.submit(commit, partial(self._committed, pending), slot)
        return False

    def _may_follow(self, before: PendingBatch) -> bool:
        """May a batch be put behind this one? Not behind one that begins a segment: its end is not known yet."""
        if len(self._writing) > 1 or before.slot is None or before.commit.starts_segment:
            return False
        return self._gathering.size >= COMMIT_BYTES and not self._shared.committer.are_wanted

    def _is_full(self, segment: Segment, size: int, now: int) -> bool:
        settings = self._shared.settings
        old = now - segment.first_ms >= settings.segment_hours * HOUR_MS
        return segment.count > 0 and (old or size >= settings.segment_bytes)

    def _committed(self, pending: PendingBatch, result: CommittedBatch | FailedBatch | BaseException) -> None:
        """Take note of what became of a batch."""
        if pending not in self._writing:
            return  # one before it has failed, or its waiters were answered already
        if isinstance(result, CommittedBatch):
            self._writing.remove(pending)
            self._advance(result)
            self._take_in(result)
            if self._gathering:
                self.commit()  # now, so that the disk works while the answers are given
            self._answer(pending.waiting, None, result.batch.append_ms)
            if not self._held:
                self._shared.completions.notify(self._watchers)
            if pending.waiting:
                self._count(pending.waiting, result)
        else:
            self._fail(result)
        if not self._writing:
            self._idle.set()

    def _fail(self, failure: FailedBatch | BaseException, waiting: Sequence[WaitingRun] = ()) -> None:
        """Refuse these, and all else that waits, being written or not."""
        error = self._take_back(failure)
        self._answer([*self._drop_pending(error), *waiting, *self._gathering.take()], error, 0)

    def _answer(self, waiting: list[WaitingRun], error: BrokerError | None, append_ms: int) -> None:
        answer(self._shared.completions, waiting, error, append_ms)

    def _drop_pending(self, error: BrokerError) -> list[WaitingRun]:
        """Stop waiting for what is being written, and let nothing begin that is not; returns the waiting runs."""
        dropped, self._writing = self._writing, []
        for pending in dropped:
            pending.commit.queue.failure = pending.commit.queue.failure or FailedBatch(error, poisoned=True)
        return [each for pending in dropped for each in pending.waiting]

    def _count(self, answered: list[WaitingRun], committed: CommittedBatch) -> None:
        batch, measures = committed.batch, self._shared.measures
        self.published_messages += len(batch.positions)
        self.published_bytes += batch.size
        measures.commit_messages.observe(len(batch.positions))
        measures.commit_bytes.observe(batch.size)
        self._shared.pace.note(committed.sync_seconds)
        if committed.sync_seconds:
            measures.sync_seconds.observe(committed.sync_seconds)
        now = time.perf_counter()
        measures.ack_seconds.observe(*[now - waiting.since for waiting in answered])

    def _advance(self, committed: CommittedBatch) -> None:
        """Make a durable batch part of the log, and visible unless the end is held."""
        segment, position, batch, _, _ = committed
        if segment is not self._segments[-1]:
            self._segments.append(segment)
        segment.extend(position + batch.size, batch.next_offset, batch.append_ms)
        self._durable_offset = batch.next_offset
        self._shared.extents.moved(self, batch.first_offset)
        if self._shown_early:
            self._shown_early = [each for each in self._shown_early if each.next_offset > batch.next_offset]
        if not self._held:
            self._end_offset = max(self._end_offset, batch.next_offset)

    def _take_in(self, committed: CommittedBatch) -> None:
        """Keep what readers, the next segment and the next start will ask for."""
        segment, position, batch, ranges, _ = committed
        segment.index.append(encode(batch.positions, batch.append_ms, position))
        if segment.index.is_due and not self._indexing:
            self._indexing = True
            self._shared.writers.submit(self.write_indexes, self._indexed)
        self._producer_ranges.add(ranges)
        self._shared.memory.keep(self._tail, batch)

    def _indexed(self, _: object) -> None:
        self._indexing = False
        self._idle.set()

    def _take_back(self, failure: FailedBatch | BaseException) -> BrokerError:
        """Forget the offsets that were given out; returns why."""
        self._shared.measures.failed_commits += 1
        self._next_offset = self._durable_offset
        if not isinstance(failure, FailedBatch):
            logger.error("a commit failed by a fault of ours", exc_info=failure)
            failure = fault(self._name, failure)
        if self._shown_early and not failure.poisoned:
            text = f"{self._name} takes no more messages until the broker restarts, which stores what it shows already"
            failure = failure._replace(error=LogPoisoned(f"{text}: {failure.error}"), poisoned=True)
        if failure.segment:
            self._segments.append(failure.segment)
        if failure.poisoned:
            self._is_poisoned = True
            self._refusal = self._refusal or failure.error
        logger.error("%s", failure.error)
        return failure.error

    # Opening anew

    @property
    def may_reopen(self) -> bool:
        """Is it poisoned, with nothing in the way of opening it anew? What it shows early only a start can store."""
        in_use = self._writing or self._indexing or self._is_stuck or self._shown_early
        poisoned = self._is_poisoned and isinstance(self._refusal, LogPoisoned)
        return poisoned and bool(self._segments) and not in_use and not self._health.damage

    async def reopen(self) -> None:
        """Prove a poisoned log as a start does, behind a cut to what was durable, and take messages again.

        Raises OSError if the disk still fails. What was durable and is not there stops the topic.
        """
        refusal, segments = self._refusal, self._segments
        extent = LogExtent(self.first_offset, self._durable_offset)
        self._is_reopening = True
        try:
            found = await trio.to_thread.run_sync(prove_again, self._shared.files, segments[-1], extent)
        finally:
            self._is_reopening = False
            self._idle.set()
        if self._refusal is not refusal or self._segments is not segments:
            return  # it was deleted, ended or shortened meanwhile
        if found.damage:
            self.report_damage(found.damage)
            return
        self._segments, self._producer_ranges = found.segments, found.producer_ranges
        self._refusal, self._is_poisoned = None, False
        logger.warning("%s was proved anew and takes messages again", self._name)

    # Following another broker, which has made the batches durable

    def may_replay(self, append_ms: int) -> bool:
        """May replay() be called before what it was given last is written? Not at the border of a segment."""
        if not self._writing:
            return True
        before = self._writing[-1].commit
        return not (before.starts_segment or self._is_full(before.segment, before.end, append_ms))

    def replay(self, batch: StoredBatch, ranges: Sequence[ProducerRange]) -> tuple[BatchCommit, Callable[[Any], None]]:
        """Return the work that brings the next batch here, and what takes its result. Works are done in their order."""
        assert batch.first_offset == self._next_offset, (self._name, batch.first_offset, self._next_offset)
        shared, segment = self._shared, self._segments[-1]
        before = self._writing[-1].commit if self._writing else None
        is_full = before is None and self._is_full(segment, segment.size, batch.append_ms)
        pending = PendingBatch(
            [],
            BatchCommit(
                (self.topic, self.partition),
                shared.files,
                segment,
                before.end if before else segment.size,
                batch,
                ranges,
                before.queue if before else CommitQueue(),
                sync=shared.committer.syncs,
                new_segment_ranges=list(self._producer_ranges) if is_full else None,
            ),
        )
        self._writing.append(pending)
        self._next_offset, self._last_ms = batch.next_offset, batch.append_ms
        return pending.commit, partial(self._committed, pending)

    def begin_at(
        self, first_offset: int, created_ms: int, ranges: Sequence[ProducerRange], doom: Callable[[list[Segment]], None]
    ) -> tuple[NewBeginning, Callable[[Any], None]]:
        """Return the work by which an empty log begins with an offset, and what takes its result.

        `doom` is given the segment in whose place it comes, for its files to be deleted.
        """
        assert not self._next_offset
        directory = self._segments[-1].directory
        beginning = NewBeginning(self._shared.files, directory, first_offset, created_ms, ranges)
        return beginning, partial(self._began, ranges, doom)

    def _began(self, ranges: Sequence[ProducerRange], doom: Callable[[list[Segment]], None], segment: Segment) -> None:
        empty, self._segments = self._segments, [segment]
        self._next_offset = self._durable_offset = self._end_offset = segment.base_offset
        self._last_ms = max(self._last_ms, segment.last_ms)
        self._producer_ranges.add(ranges)
        doom(empty)

    def first_after(self, count: int) -> int:
        """Return where the log begins when its `count` oldest closed segments are dropped."""
        return self._segments[min(count, len(self._segments) - 1)].base_offset

    def drop_before(self, first_offset: int) -> list[Segment]:
        """Let the log begin there; returns the segments of which nothing is left, for their files to be deleted."""
        self._first_offset = max(self._first_offset, first_offset)
        return self.drop_first(dropped_segments([segment.base_offset for segment in self._segments], first_offset))

    @property
    def newest_segment(self) -> Segment:
        return self._segments[-1]

    @property
    def damage(self) -> LogDamaged | None:
        """What is wrong with the log, or with another one of its topic."""
        return self._health.damage

    # Ending

    def refuse(self, error: BrokerError) -> None:
        """Take no more runs, and give back those that are not being written yet."""
        self._refusal = error
        given_back = self._gathering.take()
        self._next_offset -= sum([len(waiting.run.positions) for waiting in given_back])
        self._answer(given_back, error, 0)

    def abandon(self, error: BrokerError) -> None:
        """Answer also for what is being written: its result will not be waited for."""
        self.refuse(error)
        self._is_stuck = bool(self._writing)
        self._answer(self._drop_pending(error), error, 0)
        self._idle.set()

    def refuse_lost(self, paths: Sequence[str]) -> None:
        """Answer for everything and stop serving the whole topic, if the newest file is among those that are lost."""
        path = self._segments[-1].log_path if self._segments else ""
        if path in paths and not isinstance(self._refusal, LogDamaged):
            damage = LogDamaged(path, 0, LOST)
            self.report_damage(damage)
            self.abandon(damage)

    def write_indexes(self) -> None:
        """Write what waits in memory for indexes, also for those whose segment was closed on a full disk. Blocks."""
        for segment in [*self._segments]:
            segment.index.write()

    def tidy(self) -> LogEnd | None:
        """Leave files that the next start finds whole; returns where the log ends, if that is known. Blocks."""
        if not self._segments or self.is_deleted:
            return None
        segment = self._segments[-1]
        if not self._indexing:
            self.write_indexes()
        if self._is_stuck or self._is_poisoned or self._health.damage:
            return None
        try:
            segment.trim(segment.size)
            if not self._shared.committer.syncs:
                segment.sync()
        except OSError:
            return None
        return LogEnd(segment.size, segment.next_offset)

    async def wait_until_idle(self) -> None:
        """Return when nothing is being written, and no thread proves the files anew."""
        while self._writing or self._indexing or self._is_reopening:
            await self._idle.wait()

    def forget(self) -> None:
        """Give back memory and descriptors; the files have been taken away."""
        for segment in self._segments:
            self._shared.files.forget(segment.log_path, segment.index_path)
        self._shared.extents.forget(self)
        self._shared.memory.drop(self._tail)
        self._shared.reads.drop(self)
        self._shared.completions.notify(self._watchers)

    async def note_first(self) -> None:
        """Note durably where the log begins, before anything is deleted that it had. Raises BrokerError."""
        await self._shared.extents.note_first(self)

    def drop_first(self, count: int) -> list[Segment]:
        """Take the oldest closed segments out of the log; returns them, for their files to be deleted."""
        count = min(count, len(self._segments) - 1)
        dropped, self._segments = self._segments[:count], self._segments[count:]
        return dropped

    # Reading

    def read_recent(self, offset: int, max_bytes: int) -> StoredChunk | None:
        if self._health.damage or not self.first_offset <= offset <= self._end_offset:
            return None
        if offset == self._end_offset:
            return StoredChunk(offset, b"", ())
        if offset >= self._durable_offset:
            return self._visible(cut(self._early_from(offset), 0, offset, max_bytes))
        recent = self._tail.read(offset, max_bytes)
        if recent and self._shown_early and recent.next_offset == self._durable_offset:
            recent = extend(recent, self._shown_early, max_bytes - recent.size)
        return self._visible(recent or self._shared.reads.read(self, offset, max_bytes))

    def _early_from(self, offset: int) -> list[StoredBatch]:
        return [batch for batch in self._shown_early if batch.next_offset > offset]

    async def read(self, offset: int, max_bytes: int) -> StoredChunk:
        await trio.lowlevel.checkpoint()
        self._check_readable()
        recent = self.read_recent(offset, max_bytes)
        if recent is not None:
            return recent
        self._check_offset(offset, self._end_offset)
        batches = await self._read_batches(offset, max_bytes)
        self._shared.reads.keep(self, batches)
        chunk = self._visible(self._shared.reads.read(self, offset, max_bytes))
        assert chunk is not None
        return chunk

    async def read_whole(self, offset: int, max_bytes: int) -> StoredChunk:
        await trio.lowlevel.checkpoint()
        self._check_readable()
        if offset == self._end_offset:
            return StoredChunk(offset, b"", ())
        self._check_offset(offset, self._end_offset)
        if offset >= self._durable_offset:
            chunk = joined(self._early_from(offset))
        else:
            chunk = self._tail.read_whole(offset, max_bytes) or joined(await self._read_batches(offset, max_bytes))
        visible = self._visible(chunk)
        assert visible is not None
        return visible

    async def read_durable(self, offset: int, max_bytes: int) -> StoredChunk:
        await trio.lowlevel.checkpoint()
        self._check_readable()
        self._check_offset(offset, self._durable_offset)
        recent = self._tail.read(offset, max_bytes)
        return recent or cut(await self._read_batches(offset, max_bytes), 0, offset, max_bytes)

    def _visible(self, chunk: StoredChunk | None) -> StoredChunk | None:
        if chunk is None or chunk.next_offset <= self._end_offset:
            return chunk
        return chunk.first(self._end_offset - chunk.first_offset)

    async def _read_batches(self, offset: int, max_bytes: int) -> list[StoredBatch]:
        segment = self._segment_of(offset)
        read = partial(segment.read, offset, max_bytes, segment.size)
        try:
            return read(cached=True)
        except BlockingIOError:
            return await self.look(segment, offset, read)

    async def offset_for_time(self, time_ms: int) -> int:
        await trio.lowlevel.checkpoint()
        self._check_readable()
        for segment in self._segments:
            if segment.count and segment.last_ms >= time_ms:
                find = partial(segment.first_at, time_ms, segment.count, segment.size)
                return min(await self.look(segment, segment.base_offset, find), self._end_offset)
        return self._end_offset

    def _check_offset(self, offset: int, end: int) -> None:
        if not self.first_offset <= offset < end:
            raise OffsetOutOfRange(self.topic, self.partition, offset, self.first_offset, end)

    def _segment_of(self, offset: int) -> Segment:
        self._check_offset(offset, self._durable_offset)
        return self._segments[bisect_right(self._segments, offset, key=lambda segment: segment.base_offset) - 1]

    async def look(self, segment: Segment, offset: int, find: Callable[[], Found]) -> Found:
        """Return what `find` finds in a segment, in a worker thread.

        Raises what explains why it cannot: OffsetOutOfRange, UnknownTopic, LogDamaged (and stops the topic), Internal.
        """
        try:
            found = await trio.to_thread.run_sync(find)
        except BadBatch as bad:
            self.report_damage(LogDamaged(segment.log_path, bad.position, bad.what))
        except FileNotFoundError as missing:
            self._check_readable()
            self._segment_of(offset)  # raises if retention has dropped it meanwhile
            self.report_damage(LogDamaged(str(missing.filename), 0, "the file is missing"))
        except OSError as error:
            if error.errno != errno.EIO:
                raise Internal(f"{segment.log_path} cannot be read now: {error}") from error
            self.report_damage(LogDamaged(segment.log_path, 0, f"it cannot be read: {error.strerror}"))
        self._check_readable()
        return found

    def _check_readable(self) -> None:
        self._check_damage()
        if self.is_deleted and self._refusal:
            raise self._refusal.with_traceback(None)

    # Damage

    def report_damage(self, damage: LogDamaged) -> None:
        """Stop serving the whole topic."""
        if self._health.damage is None:
            logger.error("%s/%d: %s", self.topic, self.partition, damage)
            self._health.damage = damage

    def _check_damage(self) -> None:
        if self._health.damage:
            raise self._health.damage.with_traceback(None)
