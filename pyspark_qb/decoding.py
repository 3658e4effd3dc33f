"""pyspark_qb.decoding: stored frames as Arrow columns, in bulk.

May import: core.frames, pyspark_qb.bounds, pyspark_qb.property_columns, pyspark_qb.spans, numpy, pyarrow,
the standard library.
Never: pyspark, sockets, files.

Given where the frames start, numpy picks their heads and Arrow copies their bodies; Python never sees a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from core.frames import HEAD, OVERHEAD, MessageType
from pyspark_qb.bounds import Bounds
from pyspark_qb.property_columns import PropertyColumns, property_columns
from pyspark_qb.spans import Bytes, Numbers, gather, spans

# core.frames.HEAD for numpy; a test proves that they are the same
HEADS = np.dtype([("total", ">u4"), ("type", ">u4"), ("offset", ">u8"), ("timestamp", ">u8"), ("properties", ">u4")])
TIMESTAMP = pa.timestamp("us", tz="UTC")
LAST_MS = np.iinfo(np.int64).max // 1000  # the latest time that a timestamp in microseconds can tell
EVER = Bounds()


class NotStored(Exception):
    """Bytes that are not the frames that they should be; `index` says which is the first."""

    def __init__(self, index: int, offset: int) -> None:
        super().__init__(f"what should be message {offset} is none")
        self.index, self.offset = index, offset


class Chunk(NamedTuple):
    """DATA frames of consecutive messages of one partition; other frames may lie between them."""

    data: Bytes
    positions: Numbers  # where each frame starts
    first_offset: int

    @property
    def next_offset(self) -> int:
        return self.first_offset + len(self.positions)

    def between(self, start: int, end: int) -> Chunk:
        """Return the messages from offset `start` up to, not including, `end`."""
        first = max(start, self.first_offset)
        cut = slice(first - self.first_offset, max(end - self.first_offset, 0))
        return Chunk(self.data, self.positions[cut], first)


class Decoder:
    """Turns chunks of one partition into record batches of the wanted columns."""

    def __init__(self, topic: str, partition: int, columns: Sequence[str], times: Bounds = EVER) -> None:
        self._topic, self._partition = topic, partition
        self._columns, self._times = columns, times

    def decode(self, chunk: Chunk) -> pa.RecordBatch:
        """Return the messages as rows, those of other times left out. Raises NotStored."""
        heads = heads_of(chunk)
        positions, times = chunk.positions, microseconds(heads["timestamp"])
        keep = self._within(times)
        if keep is not None:
            heads, positions, times = heads[keep], positions[keep], times[keep]
        frames = _Frames(chunk.data, positions, heads)
        arrays = [self._column(name, frames, times) for name in self._columns]
        return pa.RecordBatch.from_arrays(arrays, names=list(self._columns))

    def _within(self, times: Numbers) -> Any:
        """Return which of the times are wanted; None: all of them."""
        if self._times == EVER:
            return None
        return (times >= self._times.first) & (times < self._times.end)

    def _column(self, name: str, frames: _Frames, times: Numbers) -> pa.Array:
        match name:
            case "value":
                return frames.bodies()
            case "topic":
                return pa.repeat(self._topic, len(times))
            case "partition":
                return pa.repeat(pa.scalar(self._partition, pa.int32()), len(times))
            case "offset":
                return pa.array(frames.heads["offset"].astype(np.int64))
            case "timestamp":
                return pa.array(times).view(TIMESTAMP)
            case "key":
                return frames.properties().keys()
            case _:
                return frames.properties().maps()


class _Frames:
    """The frames that become rows."""

    def __init__(self, data: Bytes, positions: Numbers, heads: Any) -> None:
        self._data, self._positions, self.heads = data, positions, heads
        self._lengths = heads["properties"].astype(np.int64)
        self._properties: PropertyColumns | None = None

    def bodies(self) -> pa.BinaryArray:
        starts = self._positions + self._lengths + OVERHEAD
        return spans(self._data, starts, self._positions + self.heads["total"])

    def properties(self) -> PropertyColumns:
        """Return the properties, which `key` and `properties` are two columns of."""
        if self._properties is None:
            self._properties = property_columns(self._data, self._positions + HEAD.size, self._lengths)
        return self._properties


def heads_of(chunk: Chunk) -> Any:
    """Return the heads of a chunk's frames as an array of HEADS. Raises NotStored."""
    positions, size = chunk.positions, len(chunk.data)
    inside = (positions >= 0) & (positions <= size - OVERHEAD)
    if not inside.all():
        raise _not_stored(chunk, inside)
    heads = gather(chunk.data, positions, HEADS)
    expected = np.arange(chunk.first_offset, chunk.next_offset, dtype=np.uint64)
    right = (heads["type"] == MessageType.DATA) & (heads["offset"] == expected)
    right &= heads["properties"].astype(np.int64) + OVERHEAD <= heads["total"]
    right &= positions + heads["total"] <= size
    if not right.all():
        raise _not_stored(chunk, right)
    return heads


def microseconds(milliseconds: Any) -> Numbers:
    """Return times as Spark counts them; those too far in the future for it become its last one."""
    times: Numbers = np.minimum(milliseconds, LAST_MS).astype(np.int64)
    return times * 1000


def _not_stored(chunk: Chunk, right: Any) -> NotStored:
    index = int(np.argmin(right))
    return NotStored(index, chunk.first_offset + index)
