"""One batch on its way to stable storage; the only place that writes and syncs messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qb.core.wire.errors import BrokerError, DiskFull, LogPoisoned
from qb.storage.engine import AppendRun, ProducerRange, Where
from qb.storage.files import NO_ROOM, OpenFiles, SyncFailed
from qb.storage.log.producer_ranges import continues
from qb.storage.log.recent_batches import StoredBatch
from qb.storage.log.sealed_batches import seal
from qb.storage.log.segment import Segment

SHORT = 16_384  # bytes that are written in no time
LONG = 65_536  # bytes of a run, on the average, from which on runs are not copied together


class CommittedBatch(NamedTuple):
    """A batch that is durable."""

    segment: Segment  # where it lies: the one of the commit, or a new one
    position: int  # in the segment
    batch: StoredBatch
    ranges: Sequence[ProducerRange]
    sync_seconds: float


class FailedBatch(NamedTuple):
    """A batch of which nothing was kept."""

    error: BrokerError
    poisoned: bool  # and nothing more may be written to the log
    segment: Segment | None = None  # the new one, where only that could be made


class CommitQueue:
    """Commits that a thread carries out one after another: when one fails, those behind it must not be written."""

    __slots__ = ("failure",)

    def __init__(self) -> None:
        self.failure: FailedBatch | None = None


class BatchCommit(NamedTuple):
    """What a log hands to a committer. Only commits of the same queue write that log meanwhile, in their order."""

    where: Where
    files: OpenFiles
    segment: Segment
    position: int  # where in the segment it goes
    batch: StoredBatch
    ranges: Sequence[ProducerRange]
    queue: CommitQueue
    sync: bool
    new_segment_ranges: Sequence[ProducerRange] | None  # start a new segment with these; None: go on with this one

    @property
    def name(self) -> str:
        """What people call the log."""
        return "{}/{}".format(*self.where)

    @property
    def end(self) -> int:
        """Where in the segment the next one goes."""
        return self.position + self.batch.size

    @property
    def starts_segment(self) -> bool:
        """Does a new segment begin with it?"""
        return self.new_segment_ranges is not None

    @property
    def is_short(self) -> bool:
        """Is it one small write and its sync?"""
        return not self.starts_segment and self.batch.size <= SHORT

    def carry_out(self) -> CommittedBatch | FailedBatch:
        """Write and sync the batch, unless one before it in its queue has failed. Blocks; never raises OSError."""
        if self.queue.failure:
            return self.queue.failure
        try:
            result = self._write_to_new() if self.starts_segment else self._write_to(self.segment, self.position)
        except BaseException as error:
            self.queue.failure = fault(self.name, error)
            raise
        if isinstance(result, FailedBatch):
            self.queue.failure = result
        return result

    def _write_to_new(self) -> CommittedBatch | FailedBatch:
        assert self.new_segment_ranges is not None
        try:
            segment = self._follow(self.new_segment_ranges)
        except OSError as error:
            return self._failed(error)
        return self._write_to(segment, segment.size)._replace(segment=segment)

    def _follow(self, ranges: Sequence[ProducerRange]) -> Segment:
        """Close the segment and return the one that follows. Raises OSError, and then has changed nothing."""
        self.segment.trim(self.position)
        if not self.sync:
            self.segment.sync()
        self.segment.index.sync()
        first_offset, append_ms = self.batch.first_offset, self.batch.append_ms
        try:
            return Segment.create(self.files, self.segment.directory, first_offset, append_ms, ranges)
        except OSError:
            self._remove(Segment(self.files, self.segment.directory, first_offset))
            raise

    def _remove(self, segment: Segment) -> None:
        # A new segment that stayed behind would contradict what this one still takes.
        try:
            segment.delete()
        except OSError as error:
            raise SyncFailed(error.errno, f"{error.strerror}, and what it left cannot be deleted") from error

    def _write_to(self, segment: Segment, position: int) -> CommittedBatch | FailedBatch:
        try:
            sync_seconds = segment.write(self.batch.parts, position, sync=self.sync)
        except OSError as error:
            return self._cut(segment, position, error)
        return CommittedBatch(segment, position, self.batch, self.ranges, sync_seconds)

    def _cut(self, segment: Segment, size: int, failure: OSError) -> FailedBatch:
        """Take back what may have been written: none of it will be acked."""
        try:
            segment.cut(size)
        except OSError as error:
            text = f"{failure.strerror}, and its remains cannot be cut off: {error.strerror}"
            failure = SyncFailed(failure.errno, text)
        return self._failed(failure)

    def _failed(self, failure: OSError) -> FailedBatch:
        file = failure.filename or self.segment.log_path
        if isinstance(failure, SyncFailed):
            text = f"{self.name} takes no messages until {file} has been proved anew: {failure.strerror}"
            return FailedBatch(LogPoisoned(text), poisoned=True)
        kind = DiskFull if failure.errno in NO_ROOM else LogPoisoned
        return FailedBatch(
            kind(f"{self.name} could not store the message in {file}: {failure.strerror}"), poisoned=False
        )


def fault(name: str, error: BaseException) -> FailedBatch:
    """Return the outcome of a fault of ours: what is on the disk is unknown, so nothing more is written."""
    return FailedBatch(LogPoisoned(f"{name} failed: {error!r}"), poisoned=True)


def assemble(runs: Sequence[AppendRun], append_ms: int) -> tuple[StoredBatch, Sequence[ProducerRange]]:
    """Return the runs as one sealed batch, and the publish numbers that it holds."""
    parts: Sequence[bytes | bytearray] = [run.data for run in runs]
    positions, ranges, first_offset = _positions(runs), _ranges(runs), runs[0].first_offset
    parts = [*parts, seal(parts, first_offset, len(positions), append_ms, ranges)]
    if sum(map(len, parts)) < LONG * len(runs):
        parts = (b"".join(parts),)
    return StoredBatch(first_offset, append_ms, parts, positions), ranges


def _positions(runs: Sequence[AppendRun]) -> Sequence[int]:
    """Return where the records of all runs start; of records that are all as long as each other, a range."""
    if len(runs) == 1:
        return runs[0].positions
    positions: list[int] = []
    start = 0
    lengths = {_length(run) for run in runs}
    if 0 not in lengths and len(lengths) == 1:
        return range(0, sum([len(run.data) for run in runs]), lengths.pop())
    for run in runs:
        positions += [start + position for position in run.positions]
        start += len(run.data)
    return positions


def _length(run: AppendRun) -> int:
    """Return how long each record is if all are as long as each other and known to be, else 0."""
    return run.positions.step if isinstance(run.positions, range) else 0


def _ranges(runs: Sequence[AppendRun]) -> Sequence[ProducerRange]:
    """Return the numbers of idempotent producers, neighbours merged."""
    ranges: list[ProducerRange] = []
    for run in runs:
        if not run.producer_id:
            continue
        new = ProducerRange(run.producer_id, run.first_number, run.first_offset, len(run.positions))
        if ranges and continues(ranges[-1], new):
            ranges[-1] = ranges[-1]._replace(count=ranges[-1].count + new.count)
        else:
            ranges.append(new)
    return ranges
