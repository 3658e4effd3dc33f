"""storage.commit: one batch on its way to stable storage; the only place that writes and syncs messages.

May import: core.errors, storage.batches, storage.engine, storage.files, storage.index, storage.remembered,
    storage.segment, storage.tail, the standard library.
Never: trio, the state of a log: it may run in a writer thread and hands back what became of the batch.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import NamedTuple

from core.errors import BrokerError, DiskFull, LogPoisoned
from storage.batches import seal
from storage.engine import Range, Run
from storage.files import OpenFiles, SyncFailed
from storage.index import encode
from storage.remembered import continues
from storage.segment import Segment
from storage.tail import Stored

SHORT = 16_384  # bytes that are written in no time
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Committed(NamedTuple):
    """A batch that is durable."""

    segment: Segment  # where it lies: the one of the commit, or a new one
    size: int  # of the segment, with it
    batch: Stored
    ranges: Sequence[Range]
    sync_seconds: float


class Failed(NamedTuple):
    """A batch of which nothing was kept."""

    error: BrokerError
    poisoned: bool  # and nothing more may be written to the log
    segment: Segment | None = None  # the new one, where only that could be made


class Commit(NamedTuple):
    """What a log hands to a writer thread. Nobody else writes that log meanwhile."""

    name: str  # topic/partition, for people
    files: OpenFiles
    segment: Segment
    runs: Sequence[Run]
    append_ms: int
    sync: bool
    remembered: Sequence[Range] | None  # start a new segment with these; None: go on with this one

    @property
    def is_short(self) -> bool:
        """Is it one small write and its sync?"""
        return self.remembered is None and sum([len(run.data) for run in self.runs]) <= SHORT

    def carry_out(self) -> Committed | Failed:
        """Write and sync the batch. Blocks; never raises OSError."""
        if self.remembered is None:
            return self._write(self.segment)
        try:
            segment = self._follow(self.remembered)
        except OSError as error:
            return self._failed(error)
        result = self._write(segment)
        return result._replace(segment=segment)

    def _follow(self, remembered: Sequence[Range]) -> Segment:
        """Close the segment and return the one that follows. Raises OSError, and then has changed nothing."""
        if not self.sync:
            self.segment.sync()
        self.segment.index.sync()
        base_offset = self.runs[0].first_offset
        try:
            return Segment.create(self.files, self.segment.directory, base_offset, self.append_ms, remembered)
        except OSError:
            self._remove(Segment(self.files, self.segment.directory, base_offset))
            raise

    def _remove(self, segment: Segment) -> None:
        # A new segment that stayed behind would contradict what this one still takes.
        try:
            segment.delete()
        except OSError as error:
            raise SyncFailed(error.errno, f"{error.strerror}, and what it left cannot be deleted") from error

    def _write(self, segment: Segment) -> Committed | Failed:
        batch, ranges = assemble(self.runs, self.append_ms)
        size = segment.size
        try:
            sync_seconds = segment.write(batch.data, size, sync=self.sync)
        except OSError as error:
            return self._cut(segment, size, error)
        segment.index.append(encode(batch.positions, self.append_ms, size))
        return Committed(segment, size + len(batch.data), batch, ranges, sync_seconds)

    def _cut(self, segment: Segment, size: int, failure: OSError) -> Failed:
        """Take back what may have been written: none of it will be acked."""
        try:
            segment.cut(size)
        except OSError as error:
            text = f"{failure.strerror}, and its remains cannot be cut off: {error.strerror}"
            failure = SyncFailed(failure.errno, text)
        return self._failed(failure)

    def _failed(self, failure: OSError) -> Failed:
        if isinstance(failure, SyncFailed):
            text = f"{self.name} takes no more messages until the broker restarts: {failure.strerror}"
            return Failed(LogPoisoned(text), poisoned=True)
        kind = DiskFull if failure.errno in NO_ROOM else LogPoisoned
        return Failed(kind(f"{self.name} could not store the message: {failure.strerror}"), poisoned=False)


def assemble(runs: Sequence[Run], append_ms: int) -> tuple[Stored, Sequence[Range]]:
    """Return the runs as one sealed batch, and the publish numbers that it holds."""
    datas = [run.data for run in runs]
    positions = runs[0].positions if len(runs) == 1 else _positions(runs)
    ranges = _ranges(runs)
    first_offset = runs[0].first_offset
    end = seal(datas, first_offset, len(positions), append_ms, ranges)
    return Stored(first_offset, append_ms, b"".join((*datas, end)), positions), ranges


def _positions(runs: Sequence[Run]) -> Sequence[int]:
    positions: list[int] = []
    start = 0
    for run in runs:
        positions += [start + position for position in run.positions]
        start += len(run.data)
    return positions


def _ranges(runs: Sequence[Run]) -> Sequence[Range]:
    """Return the numbers of idempotent producers, neighbours merged."""
    ranges: list[Range] = []
    for run in runs:
        if not run.producer_id:
            continue
        new = Range(run.producer_id, run.first_number, run.first_offset, len(run.positions))
        if ranges and continues(ranges[-1], new):
            ranges[-1] = ranges[-1]._replace(count=ranges[-1].count + new.count)
        else:
            ranges.append(new)
    return ranges
