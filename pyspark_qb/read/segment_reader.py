"""Proved messages out of the files of one segment.

docs/STORAGE.md is the contract: a batch is proved by its seal before its messages are given out, and an index is no
evidence. So frames are looked for where the index says, and where one is not there the log is walked instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np

from pyspark_qb.arrow.decoding import FrameChunk, NotStored, heads_of
from pyspark_qb.arrow.spans import Numbers
from qb.core.wire.errors import LogDamaged
from qb.storage.files import read_all
from qb.storage.log.sealed_batches import (
    BadBatch,
    FrameStarts,
    IncompleteBatch,
    SealedBatch,
    around,
    find_seal,
    next_batch,
    walk,
)
from qb.storage.log.segment import FIRST_LOOK
from qb.storage.log.segment_index import ENTRY

WINDOW_BYTES = 4 << 20  # of a log, read, proved and given out at a time
WINDOW_ENTRIES = 1 << 15  # of an index


class SegmentFiles(NamedTuple):
    """One segment, as its files were found."""

    log_path: str
    index_path: str
    base_offset: int
    next_offset: int
    size: int  # of the log, up to where its last whole batch ends
    indexed: int  # the first offset of a batch; those before it have an entry in the index
    indexed_size: int  # where that batch begins


@contextmanager
def opened(files: SegmentFiles) -> Iterator[SegmentReader]:
    """Lend a reader of a segment. Raises FileNotFoundError."""
    with ExitStack() as stack:
        log = stack.enter_context(open(files.log_path, "rb", buffering=0)).fileno()
        has_index = files.indexed > files.base_offset
        index = stack.enter_context(open(files.index_path, "rb", buffering=0)).fileno() if has_index else -1
        yield SegmentReader(files, log, index)


class SegmentReader:
    """Reads one segment. Raises LogDamaged where the log is not what was written."""

    def __init__(self, files: SegmentFiles, log: int, index: int) -> None:
        self._files, self._log, self._index = files, log, index

    def chunks(self, start: int, end: int) -> Iterator[FrameChunk]:
        """Yield proved batches, several in a chunk, that hold the offsets from `start` up to, not including, `end`."""
        position, offset = self._files.indexed_size, self._files.indexed
        if start < offset:
            position, offset = 0, self._files.base_offset  # of a batch; nothing before it is wanted any more
            try:
                position, offset = self._batch_of(start)
                while offset < min(end, self._files.indexed):
                    chunk, size = self._window(position, offset)
                    yield chunk
                    position, offset = position + size, chunk.next_offset
            except (NotStored, BadBatch):
                pass  # the index is wrong or the log is damaged: the walk finds out
        if offset < end:
            yield from self._walked(position, offset, start, end)

    def first_at(self, time_ms: int) -> int:
        """Return the first offset that was appended at a time or later, or the end of the segment."""
        position, offset = self._before(time_ms)
        for batch in self._walk(position, offset):
            if batch.append_ms >= time_ms and batch.positions:
                return batch.first_offset
        return self._files.next_offset

    def _before(self, time_ms: int) -> tuple[int, int]:
        """Return position and first offset of a batch that was appended before a time, or of the segment's first."""
        base, count = self._files.base_offset, self._files.indexed - self._files.base_offset
        number = bisect_left(range(count), time_ms, key=lambda number: int(self._entries(number, 1)[0, 1]))
        try:
            position, offset = self._batch_of(base + number - 1) if number else (0, base)
            batch = next(walk(self._read, position, self._files.size, offset, WINDOW_BYTES))
            return (position, offset) if batch.append_ms < time_ms else (0, base)
        except BadBatch:
            return 0, base

    def without_tear(self) -> SegmentFiles | None:
        """Return the segment up to where its sealed batches end; None if there is none. For the newest segment."""
        files, begin = self._files, (0, self._files.base_offset)
        try:
            if files.indexed > files.base_offset:
                begin = self._batch_of(files.indexed - 1)
                next(walk(self._read, begin[0], files.size, begin[1], WINDOW_BYTES))
        except BadBatch:
            begin = 0, files.base_offset  # the index is wrong
        size, end = self._follow(*begin)
        if not size:
            return None
        known = (end, size) if end == files.indexed else (begin[1], begin[0])
        return SegmentFiles(files.log_path, files.index_path, files.base_offset, end, size, *known)

    def _follow(self, position: int, offset: int) -> tuple[int, int]:
        """Return where the batches from `position` on end, and the next offset; a torn tail was never acked."""
        try:
            for batch in walk(self._read, position, self._files.size, offset, WINDOW_BYTES):
                position, offset = batch.end, batch.next_offset
        except BadBatch as bad:
            rest = self._read(bad.position, self._files.size - bad.position)
            if find_seal(rest, bad.offset) is not None:
                raise LogDamaged(self._files.log_path, bad.position, bad.what) from bad
        return position, offset

    # By walking

    def _walked(self, position: int, offset: int, start: int, end: int) -> Iterator[FrameChunk]:
        """Yield the batches with what is wanted, walking from a batch before it."""
        for batch in self._walk(position, offset):
            if batch.next_offset > start:
                positions = np.array(batch.positions, np.int64)
                yield FrameChunk(np.frombuffer(batch.raw, np.uint8), positions, batch.first_offset)
            if batch.next_offset >= end:
                return
        what = f"it ends before offset {end}, but the next segment begins with {self._files.next_offset}"
        raise LogDamaged(self._files.log_path, self._files.size, what)

    def _walk(self, position: int, offset: int) -> Iterator[SealedBatch]:
        try:
            yield from walk(self._read, position, self._files.size, offset, WINDOW_BYTES)
        except BadBatch as bad:
            raise LogDamaged(self._files.log_path, bad.position, bad.what) from bad

    def _read(self, position: int, length: int) -> bytes:
        return read_all(self._log, length, position)

    # By the index

    def _entries(self, number: int, count: int) -> Numbers:
        """Return rows of position and append time; fewer where the index ends."""
        data = read_all(self._index, count * ENTRY.size, number * ENTRY.size)
        whole = len(data) // ENTRY.size
        return np.frombuffer(data, ">u8", 2 * whole).astype(np.int64).reshape(-1, 2)

    def _batch_of(self, offset: int) -> tuple[int, int]:
        """Return position and first offset of the batch that holds `offset`. Raises BadBatch."""
        position = int(self._entries(offset - self._files.base_offset, 1)[0, 0])
        look = FIRST_LOOK
        while 0 <= position < self._files.size:
            data = self._read(position, min(look, self._files.size - position))
            try:
                back, first_offset = around(memoryview(data), offset)
                return max(position - back, 0), first_offset
            except IncompleteBatch:
                if position + look >= self._files.size:
                    break
                look *= 4
        raise BadBatch(position, offset, "the index points to no record of a sealed batch")

    def _window(self, position: int, offset: int) -> tuple[FrameChunk, int]:
        """Return the batches from `position` on, as many as fit into a window, and how many bytes they are.

        Raises NotStored or BadBatch where the index and the log do not agree.
        """
        size, count = WINDOW_BYTES, WINDOW_ENTRIES
        while True:
            chunk, is_all = self._frames(position, offset, size, count)
            ends = chunk.positions + heads_of(chunk)["total"]
            following = np.append(chunk.positions[1:], len(chunk.data))
            sealed = np.flatnonzero(ends != following)  # what follows these is not the next message
            if len(sealed):
                _prove(chunk, position, sealed + 1, ends[sealed], following[sealed])
                last = int(sealed[-1])
                return chunk._replace(positions=chunk.positions[: last + 1]), int(following[last])
            if is_all:
                raise BadBatch(position, offset, "the batch has no seal")
            size, count = 4 * size, 4 * count

    def _frames(self, position: int, offset: int, size: int, count: int) -> tuple[FrameChunk, bool]:
        """Return what the index says of about so many bytes and entries, and whether that is all that is left."""
        left = self._files.indexed - offset
        borders = self._entries(offset - self._files.base_offset, min(count + 1, left))[:, 0]
        if left <= count:
            borders = np.append(borders, self._files.indexed_size)
        frames = max(int(np.searchsorted(borders, position + size, side="right")) - 1, 1)
        end = int(borders[frames])
        if not position < end <= self._files.size:
            raise BadBatch(position, offset, "the index points out of the log")
        data = np.frombuffer(self._read(position, end - position), np.uint8)
        return FrameChunk(data, borders[:frames] - position, offset), frames == left


def _prove(chunk: FrameChunk, position: int, counts: Numbers, seals: Numbers, ends: Numbers) -> None:
    """Check the batches of a chunk: they end at `ends`, with a seal each, when so many messages are through.

    Raises BadBatch. heads_of() has checked that the messages have their offsets.
    """
    view, first, start = memoryview(chunk.data.data), 0, 0
    for count, seal, end in zip(counts.tolist(), seals.tolist(), ends.tolist(), strict=True):
        known = FrameStarts()
        known.positions, known.at = [0] * (count - first), seal - start  # how many there are is all that is asked
        try:
            batch = next_batch(view[start:end], position + start, chunk.first_offset + first, known)
        except IncompleteBatch:
            raise BadBatch(position + start, chunk.first_offset + first, "the batch has no whole seal") from None
        if batch.end != position + end or len(batch.positions) != count - first:
            raise BadBatch(position + start, chunk.first_offset + first, "the index is wrong about the batch")
        first, start = count, end
