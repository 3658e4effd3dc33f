"""Uniform frames read by numpy: a field of all frames is a column, several bytes wide, copied in one go.

The tables are those of qb.core.wire.runs.uniform_frames; seals between the frames are gaps between tables.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pyspark_qb.arrow.spans import Bytes, Numbers
from qb.core.wire.frames import HEAD, OVERHEAD, MessageType
from qb.core.wire.runs.uniform_frames import LEAST, NUMBER, UniformFrames

BIG_ENDIAN = np.dtype(">u8")
TIMESTAMP_AT = 16


class FrameColumns(NamedTuple):
    """Rows of equal length: some side by side, then perhaps a gap, then others."""

    tables: list[UniformFrames]
    length: int  # of a row
    count: int  # type: ignore[assignment]  # of all rows

    def columns(self, start: int, stop: int) -> Bytes:
        """Return these bytes of every row, one row behind the other."""
        if start == stop:
            return np.empty(0, np.uint8)
        kind, done = np.dtype(f"V{stop - start}"), 0  # numpy copies bytes without a meaning fastest
        found = np.empty(self.count, kind)
        for data, at, length, count in self.tables:
            found[done : done + count] = np.ndarray((count,), kind, data, at + start, (length,))
            done += count
        return found.view(np.uint8)

    def narrowed(self, length: int) -> FrameColumns:
        """Return the first bytes of every row as a table of their own: what is looked at often is close together."""
        return FrameColumns([UniformFrames(self.columns(0, length), 0, length, self.count)], length, self.count)

    def numbers(self, at: int) -> Numbers:
        """Return the number of eight bytes that every row has there."""
        numbers: Numbers = self.columns(at, at + BIG_ENDIAN.itemsize).view(BIG_ENDIAN).astype(np.uint64)
        return numbers

    def have(self, at: int, same: bytes) -> bool:
        """Do all rows have these bytes there? Then what they have is equal to itself one row further on."""
        size, found = len(same), self.columns(at, at + len(same))
        return found[:size].tobytes() == same and np.array_equal(found[size:], found[:-size])


class UniformMessages(NamedTuple):
    """Consecutive messages whose frames have their length and their properties in common."""

    frames: FrameColumns
    heads: FrameColumns  # what stands before the bodies
    properties: bytes

    def milliseconds(self) -> Numbers:
        """Return the timestamp of each."""
        return self.heads.numbers(TIMESTAMP_AT)

    def bodies(self) -> pa.BinaryArray:
        """Return the body of each."""
        length, at, count = self.frames.length, self.heads.length, self.frames.count
        ends = np.arange(count + 1, dtype=np.int32) * np.int32(length - at)
        bodies = self.frames.columns(at, length)
        return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(bodies)])


def uniform_messages(data: Bytes, positions: Numbers, first_offset: int) -> UniformMessages | None:
    """Return the frames that start at these positions; None: they are not uniform, or not frames of these messages."""
    frames = columns_in(data, positions)
    if frames is None:
        return None
    first = frames.tables[0]
    length = int.from_bytes(first.first(HEAD.size - 4, HEAD.size))
    body_length = frames.length - OVERHEAD - length
    if body_length < 0:
        return None
    heads = frames.narrowed(OVERHEAD + length)
    properties = first.first(HEAD.size, HEAD.size + length)
    offsets = np.arange(first_offset, first_offset + len(positions), dtype=np.uint64)
    right = (
        heads.have(0, frames.length.to_bytes(4) + MessageType.DATA.to_bytes(4))
        and np.array_equal(heads.numbers(NUMBER.start), offsets)
        and heads.have(HEAD.size - 4, length.to_bytes(4) + properties + body_length.to_bytes(4))
    )
    return UniformMessages(frames, heads, properties) if right else None


def columns_in(data: Bytes, positions: Numbers) -> FrameColumns | None:
    """Return rows that begin at the positions, all as long as the first; None if few of them lie side by side."""
    count = len(positions)
    if count < LEAST:
        return None
    steps = np.diff(positions)
    length = int(steps[0])
    gaps = np.flatnonzero(steps != length)
    if length < OVERHEAD or (len(gaps) + 1) * LEAST > count:
        return None
    borders = [0, *(gaps + 1).tolist(), count]
    tables = [UniformFrames(data, int(positions[first]), length, end - first) for first, end in pairwise(borders)]
    inside = all(table.start >= 0 and table.end <= len(data) for table in tables)
    return FrameColumns(tables, length, count) if inside else None
