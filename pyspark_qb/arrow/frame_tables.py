"""Frames of one length, lying side by side, read as the rows of a table.

Messages are often as long as each other, and have the same properties. Then nothing has to be looked for: a field of
all frames is a column of the table, and the bodies are copied in one go. Seals are gaps in the table.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pyspark_qb.arrow.spans import Bytes, Numbers
from qb.core.wire.frames import HEAD, OVERHEAD, MessageType

LEAST = 64  # frames in a table, on the average, for which it pays
NUMBER = np.dtype(">u8")


class UniformFrames:
    """Frames of consecutive messages that have their length and their properties in common."""

    def __init__(self, tables: FrameTables, heads: FrameTables, properties: bytes) -> None:
        self._tables, self._heads, self.properties = tables, heads, properties

    def milliseconds(self) -> Numbers:
        """Return the timestamp of each."""
        return self._heads.numbers(16)

    def bodies(self) -> pa.BinaryArray:
        """Return the body of each."""
        length, at, count = self._tables.length, self._heads.length, self._tables.count
        ends = np.arange(count + 1, dtype=np.int32) * np.int32(length - at)
        bodies = self._tables.columns(at, length)
        return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(bodies)])


def alike(data: Bytes, positions: Numbers, first_offset: int) -> UniformFrames | None:
    """Return the frames that start at these positions; None: they are not alike, or not frames of these messages."""
    tables = tables_in(data, positions)
    if tables is None:
        return None
    length = int.from_bytes(tables.first(24, HEAD.size))
    body_length = tables.length - OVERHEAD - length
    if body_length < 0:
        return None
    heads = tables.narrowed(OVERHEAD + length)
    properties = heads.first(HEAD.size, HEAD.size + length)
    offsets = np.arange(first_offset, first_offset + len(positions), dtype=np.uint64)
    right = (
        heads.have(0, tables.length.to_bytes(4) + MessageType.DATA.to_bytes(4))
        and np.array_equal(heads.numbers(8), offsets)
        and heads.have(24, length.to_bytes(4) + properties + body_length.to_bytes(4))
    )
    return UniformFrames(tables, heads, properties) if right else None


class FrameTables(NamedTuple):
    """Rows of equal length in a buffer: some side by side, then perhaps a gap, then others."""

    data: Bytes
    length: int  # of a row
    pieces: list[tuple[int, int]]  # where rows begin to lie side by side, and how many of them
    count: int  # type: ignore[assignment]  # of all rows

    def first(self, start: int, stop: int) -> bytes:
        """Return these bytes of the first row."""
        at = self.pieces[0][0]
        return self.data[at + start : at + stop].tobytes()

    def columns(self, start: int, stop: int) -> Bytes:
        """Return these bytes of every row, one row behind the other."""
        if start == stop:
            return np.empty(0, np.uint8)
        kind, done = np.dtype(f"V{stop - start}"), 0  # numpy copies bytes without a meaning fastest
        found = np.empty(self.count, kind)
        for at, count in self.pieces:
            found[done : done + count] = np.ndarray((count,), kind, self.data, at + start, (self.length,))
            done += count
        return found.view(np.uint8)

    def narrowed(self, length: int) -> FrameTables:
        """Return the first bytes of every row as a table of their own: what is looked at often is close together."""
        return FrameTables(self.columns(0, length), length, [(0, self.count)], self.count)

    def numbers(self, at: int) -> Numbers:
        """Return the number of eight bytes that every row has there."""
        numbers: Numbers = self.columns(at, at + NUMBER.itemsize).view(NUMBER).astype(np.uint64)
        return numbers

    def have(self, at: int, same: bytes) -> bool:
        """Do all rows have these bytes there? Then what they have is equal to itself one row further on."""
        size, found = len(same), self.columns(at, at + len(same))
        return found[:size].tobytes() == same and np.array_equal(found[size:], found[:-size])


def tables_in(data: Bytes, positions: Numbers) -> FrameTables | None:
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
    pieces = [(int(positions[first]), end - first) for first, end in pairwise(borders)]
    inside = all(start >= 0 and start + rows * length <= len(data) for start, rows in pieces)
    return FrameTables(data, length, pieces, count) if inside else None
