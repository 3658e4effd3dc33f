"""One .log and its .idx; knows the byte layout, knows no neighbours."""

from __future__ import annotations

import os
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from qb.storage.engine import ProducerRange
from qb.storage.files import (
    CACHED_AT_MOST,
    OpenFiles,
    create_file,
    datasync,
    read_all,
    read_cached,
    reserve,
    sync_directory,
    write_durably,
    write_parts,
)
from qb.storage.log.recent_batches import StoredBatch
from qb.storage.log.record_positions import RecordPositions
from qb.storage.log.sealed_batches import BadBatch, IncompleteBatch, Read, SealedBatch, around, prove, seal, walk
from qb.storage.log.segment_identity import identity_of
from qb.storage.log.segment_index import IndexEntries, IndexFile

FIRST_LOOK = 64 * 1024  # what is read at first to find the seal of a batch
LONGEST = 8 * 1024 * 1024  # what is read beyond what was asked for, to end with a batch
FEW_MORE = 256  # index entries read beyond those that are probably enough
SMALL = 64 * 1024  # bytes of a batch for which room is kept ready behind the log
RESERVE_FROM = 16 * 1024  # bytes of a log from which on that is done: as much again as it has, but at most
RESERVE = 1024 * 1024
PROOF_WINDOW = 1024 * 1024  # bytes that a proof reads at a time


class Segment:
    """A row of batches from `base_offset` on.

    Its extent (size, next_offset, last_ms) moves in the event loop when a batch is durable. Methods that take a size
    may run in any thread and look at nothing behind it.
    """

    def __init__(self, files: OpenFiles, directory: Path, base_offset: int) -> None:
        self.directory = directory
        self.base_offset = base_offset
        self.log_path, self.index_path = segment_name(directory, base_offset)
        self.index = IndexFile(files, self.index_path)
        self.size = 0
        self.next_offset = base_offset
        self.first_ms = 0  # when its oldest record was appended
        self.last_ms = 0  # and its newest
        self._files = files
        self._has_remains = False  # may a power cut bring back what was cut?
        self._reserved = 0  # up to here the log has room that is zeros until it is written
        self._starts: dict[int, int] = {}  # where batches begin that readers will ask for next: offset -> position

    @property
    def count(self) -> int:
        return self.next_offset - self.base_offset

    def extend(self, size: int, next_offset: int, last_ms: int) -> None:
        """Take note of a batch that is durable."""
        if not self.count:
            self.first_ms = last_ms
        self.size, self.next_offset, self.last_ms = size, next_offset, last_ms

    # Writing: one thread at a time

    @classmethod
    def create(
        cls,
        files: OpenFiles,
        directory: Path,
        base_offset: int,
        created_ms: int,
        ranges: Iterable[ProducerRange],
        home: Path | None = None,
    ) -> Segment:
        """Return a new segment whose first batch and name are on stable storage.

        `home` is the name that its directory is going to have, if it has another one yet.

        Raises OSError, and then may have left files that the next try replaces.
        """
        segment = cls(files, directory, base_offset)
        first = seal((), base_offset, 0, created_ms, (identity_of(home or directory), *ranges))
        files.forget(segment.log_path, segment.index_path)
        for path in (segment.log_path, segment.index_path):
            os.close(create_file(path))
        try:
            segment.write((first,), 0, sync=True)
            sync_directory(directory)
        except OSError as error:
            error.filename = error.filename or segment.log_path
            raise
        segment.extend(len(first), base_offset, created_ms)
        segment.index.believed = True
        return segment

    def write(self, parts: Sequence[bytes | bytearray | memoryview], position: int, *, sync: bool) -> float:
        """Write a batch at `position`, to stable storage if `sync`; returns how many seconds that took, 0 without.

        Raises OSError, and SyncFailed where the sync failed; what was written stands in the file then: see cut().
        """
        with self._files.use(self.log_path) as fd:
            if not sync:
                write_parts(fd, parts, position)
                return 0.0
            started = time.perf_counter()
            end = position + sum(map(len, parts))
            if self._reserved < end <= position + SMALL and position >= RESERVE_FROM:
                self._reserved = end + min(position, RESERVE)
                reserve(fd, position, self._reserved - position)
            write_durably(fd, parts, position)
            return time.perf_counter() - started

    def sync(self) -> None:
        """Block until the log is on stable storage. Raises OSError."""
        with self._files.use(self.log_path) as fd:
            datasync(fd)

    def cut(self, size: int) -> None:
        """Cut the log back to `size`. Raises OSError. Until trim(), a power cut may bring back what was cut."""
        with self._files.use(self.log_path) as fd:
            os.ftruncate(fd, size)
        self._reserved, self._has_remains = 0, True

    def trim(self, size: int) -> None:
        """Let the log end with its first `size` bytes, durably: no room kept ready, no remains. Raises OSError.

        Behind the end of a segment that has a follower, anything else would be damage.
        """
        if self._reserved > size or self._has_remains:
            self.cut(size)
            self.sync()
            self._has_remains = False

    def delete(self) -> None:
        """Delete the files; the log first, since an index alone means nothing."""
        self._files.forget(self.log_path, self.index_path)
        Path(self.log_path).unlink(missing_ok=True)
        Path(self.index_path).unlink(missing_ok=True)

    # Reading: any thread

    def open(self) -> AbstractContextManager[int]:
        """Lend the log's descriptor. Raises FileNotFoundError."""
        return self._files.use(self.log_path)

    def read(self, offset: int, max_bytes: int, size: int, *, cached: bool = False) -> list[StoredBatch]:
        """Return proved batches, the first one holding `offset`, until they have about `max_bytes`.

        With `cached`, raises BlockingIOError where the disk would be asked. Raises BadBatch if the log is damaged,
        FileNotFoundError if it has been dropped.
        """
        if cached and 2 * max_bytes > CACHED_AT_MOST:
            raise BlockingIOError  # with the batch that it ends in, it would be too much
        with self._files.use(self.log_path, if_open=cached) as fd:
            read = reader(fd, cached=cached)
            try:
                return self._read(read, offset, max_bytes, size, cached)
            except BadBatch as error:
                if cached:
                    raise BlockingIOError from error
            self.rebuild_index(size)  # proves the whole segment, so what fails now is the log itself
            return self._read(read, offset, max_bytes, size, cached)

    def first_at(self, time_ms: int, count: int, size: int) -> int:
        """Return the first of the `count` records here that was appended at `time_ms` or later; raises as read()."""
        offset = self.base_offset + self.index.first_at(time_ms, count)
        if not self._is_first_at(offset, time_ms, count, size):
            self.rebuild_index(size)
            offset = self.base_offset + self.index.first_at(time_ms, count)
        return offset

    def prove(self, size: int, proved: Callable[[int], None]) -> None:
        """Prove every seal up to `size`. Blocks; `proved` is called with the size of each batch, and may block too.

        Raises BadBatch, FileNotFoundError if it has been dropped, OSError.
        """
        with self._files.use(self.log_path) as fd:
            for batch in walk(reader(fd), 0, size, self.base_offset, window=PROOF_WINDOW):
                proved(len(batch.raw))

    def rebuild_index(self, size: int) -> None:
        """Write the index anew from the log. Raises BadBatch, OSError."""
        entries = IndexEntries()
        with self._files.use(self.log_path) as fd:
            for batch in walk(reader(fd), 0, size, self.base_offset):
                add_to_index(entries, batch)
        self.index.replace(entries.encode())
        self.index.believed = True

    def _read(self, read: Read, offset: int, max_bytes: int, size: int, cached: bool) -> list[StoredBatch]:
        start, first_offset = self._batch_of(read, offset, size, cached)
        found: list[StoredBatch] = []
        if self.index.believed:
            least = offset + 1 - first_offset
            found = self._read_by_index(read, first_offset, least, max_bytes, size, cached)
        return found or self._read_by_walking(read, start, first_offset, offset, max_bytes, size)

    def _remember(self, offset: int, position: int) -> None:
        """A batch begins there, and a reader will ask for it next."""
        if len(self._starts) > 64:
            self._starts.clear()
        self._starts[offset] = position

    def _read_by_walking(
        self, read: Read, start: int, first_offset: int, offset: int, max_bytes: int, size: int
    ) -> list[StoredBatch]:
        found: list[StoredBatch] = []
        for batch in walk(read, start, size, first_offset, window=max_bytes + FIRST_LOOK):
            positions = array("I", batch.positions)
            found.append(StoredBatch(batch.first_offset, batch.append_ms, (bytes(batch.raw),), positions))
            if batch.next_offset > offset and batch.end - start >= max_bytes:
                break
        self._remember(batch.next_offset, batch.end)
        return found

    def _read_by_index(
        self, read: Read, first_offset: int, least: int, max_bytes: int, size: int, cached: bool
    ) -> list[StoredBatch]:
        """Return the batches from `first_offset` on, at least so many records, without following every frame.

        The records of a batch have their append time in common, so where it changes a batch ends. Returns nothing where
        that is too far away: after the clock was set back, a long row of batches has the same time.
        """
        first = first_offset - self.base_offset
        count = max(least, max_bytes * self.count // self.size) + FEW_MORE
        while True:
            positions = self.index.entries(first, count, cached=cached)
            ends = len(positions) < count or positions[-1] >= size  # does it reach to the end of what we may see?
            known = bisect_left(positions, size)
            if known < least:
                raise BadBatch(size, first_offset, "the index has no such record")
            wanted = max(least, bisect_left(positions, positions[0] + max_bytes, hi=known))
            number = bisect_right(range(known), positions.time(wanted - 1), key=positions.time)
            if positions[number - 1] - positions[0] > max_bytes + LONGEST:
                return []
            if ends or number < known:
                stop = positions[number] if number < known else size
                return [self._prove(read, first_offset, positions.first(number), stop)]
            count *= 2

    def _prove(self, read: Read, first_offset: int, positions: RecordPositions, stop: int) -> StoredBatch:
        """Return the batches with records at these positions as one."""
        start = positions[0]
        data = read(start, stop - start)
        append_ms, size = prove(memoryview(data), positions, first_offset)
        self._remember(first_offset + len(positions), start + size)
        return StoredBatch(first_offset, append_ms, (data[:size],), positions.since(start))

    def _batch_of(self, read: Read, offset: int, size: int, cached: bool) -> tuple[int, int]:
        """Return position and first offset of the batch that holds `offset`, as its seal says."""
        known = self._starts.get(offset)
        if known is not None:
            return known, offset
        position, _ = self.index.entry(offset - self.base_offset, cached=cached)
        look = FIRST_LOOK
        while True:
            look = min(look, size - position)
            if look <= 0:
                raise BadBatch(position, offset, "the index points behind the log")
            try:
                back, first_offset = around(memoryview(read(position, look)), offset)
            except IncompleteBatch:
                if look == size - position:
                    raise BadBatch(position, offset, "the record's batch has no seal") from None
                look *= 4
            else:
                return max(position - back, 0), first_offset

    def _is_first_at(self, offset: int, time_ms: int, count: int, size: int) -> bool:
        """Say whether the seals agree with what the index says of a time."""
        last = self.base_offset + count
        before = offset == self.base_offset or self._time_of(offset - 1, size) < time_ms
        return before and (offset == last or self._time_of(offset, size) >= time_ms)

    def _time_of(self, offset: int, size: int) -> int:
        return next(batch.append_ms for batch in self.read(offset, 1, size) if batch.next_offset > offset)


def segment_name(directory: Path, base_offset: int) -> tuple[str, str]:
    """Return the paths of a segment's log and index."""
    name = str(directory / f"{base_offset:020}")
    return name + ".log", name + ".idx"


def add_to_index(entries: IndexEntries, batch: SealedBatch) -> None:
    """Add what the index holds of a batch."""
    entries.add([batch.position + position for position in batch.positions], batch.append_ms)


def reader(fd: int, *, cached: bool = False) -> Read:
    """Return how to read the file; with `cached` it raises BlockingIOError where the disk would be asked."""
    get = read_cached if cached else read_all
    return lambda position, length: get(fd, length, position)
