"""Stored frames as Arrow columns, in bulk.

Given where the frames start, numpy picks their heads and Arrow copies their bodies; Python never sees a message.
Uniform frames are read faster still.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from pyspark_qb.arrow.bounds import Bounds
from pyspark_qb.arrow.frame_columns import UniformMessages, uniform_messages
from pyspark_qb.arrow.property_columns import PropertyColumns, SameProperties, property_columns
from pyspark_qb.arrow.spans import Bytes, Numbers, gather, spans
from qb.core.wire.frames import HEAD, OVERHEAD, MessageType

# qb.core.wire.frames.HEAD for numpy; a test proves that they are the same
HEADS = np.dtype([("total", ">u4"), ("type", ">u4"), ("offset", ">u8"), ("timestamp", ">u8"), ("properties", ">u4")])
TIMESTAMP = pa.timestamp("us", tz="UTC")
LAST_MS = np.iinfo(np.int64).max // 1000  # the latest time that a timestamp in microseconds can hold
EVER = Bounds()


class NotStored(Exception):
    """Bytes that are not the frames that they should be; `index` says which is the first."""

    def __init__(self, index: int, offset: int) -> None:
        super().__init__(f"what should be message {offset} is none")
        self.index, self.offset = index, offset


class FrameChunk(NamedTuple):
    """DATA frames of consecutive messages of one partition; other frames may lie between them."""

    data: Bytes
    positions: Numbers  # where each frame starts
    first_offset: int

    @property
    def next_offset(self) -> int:
        return self.first_offset + len(self.positions)

    def between(self, start: int, end: int) -> FrameChunk:
        """Return the messages from offset `start` up to, not including, `end`."""
        first = max(start, self.first_offset)
        cut = slice(first - self.first_offset, max(end - self.first_offset, 0))
        return FrameChunk(self.data, self.positions[cut], first)


class Decoder:
    """Turns chunks of one partition into record batches of the wanted columns."""

    def __init__(self, topic: str, partition: int, columns: Sequence[str], times: Bounds = EVER) -> None:
        self._columns, self._times = columns, times
        self._topic = _Repeated(pa.scalar(topic))
        self._partition = _Repeated(pa.scalar(partition, pa.int32()))

    def decode(self, chunk: FrameChunk) -> pa.RecordBatch:
        """Return the messages as rows, those of other times left out. Raises NotStored."""
        frames = self._frames(chunk)
        return pa.RecordBatch.from_arrays([self._column(name, frames) for name in self._columns], list(self._columns))

    def _frames(self, chunk: FrameChunk) -> _Frames:
        if self._times == EVER:
            uniform = uniform_messages(chunk.data, chunk.positions, chunk.first_offset)
            if uniform is not None:
                return _UniformRows(uniform, chunk)
            return _Scattered(chunk.data, chunk.positions, heads_of(chunk))
        heads = heads_of(chunk)
        times = microseconds(heads["timestamp"])
        keep = (times >= self._times.first) & (times < self._times.end)
        return _Scattered(chunk.data, chunk.positions[keep], heads[keep])

    def _column(self, name: str, frames: _Frames) -> pa.Array:
        match name:
            case "value":
                return frames.bodies()
            case "topic":
                return self._topic.rows(len(frames))
            case "partition":
                return self._partition.rows(len(frames))
            case "offset":
                return pa.array(frames.offsets())
            case "timestamp":
                return pa.array(microseconds(frames.milliseconds())).view(TIMESTAMP)
            case "key":
                return frames.properties.keys()
            case _:
                return frames.properties.maps()


class _Repeated:
    """One value in every row; made once, for as many rows as there ever were."""

    def __init__(self, value: pa.Scalar) -> None:
        self._value, self._rows = value, pa.repeat(value, 0)

    def rows(self, count: int) -> pa.Array:
        if len(self._rows) < count:
            self._rows = pa.repeat(self._value, count)
        return self._rows[:count]


class _Frames(Protocol):
    """The frames that become rows."""

    @property
    def properties(self) -> PropertyColumns:
        """The properties, which `key` and `properties` are two columns of."""

    def __len__(self) -> int: ...
    def offsets(self) -> Numbers: ...
    def milliseconds(self) -> Any: ...
    def bodies(self) -> pa.BinaryArray: ...


class _UniformRows:
    """Frames of one length with the same properties."""

    def __init__(self, found: UniformMessages, chunk: FrameChunk) -> None:
        self._chunk = chunk
        self.bodies, self.milliseconds = found.bodies, found.milliseconds
        self.properties: PropertyColumns = SameProperties(found.properties, len(self))

    def __len__(self) -> int:
        return len(self._chunk.positions)

    def offsets(self) -> Numbers:
        return np.arange(self._chunk.first_offset, self._chunk.next_offset)


class _Scattered:
    """Frames of any length, anywhere."""

    def __init__(self, data: Bytes, positions: Numbers, heads: Any) -> None:
        self._data, self._positions, self._heads = data, positions, heads
        self._lengths = heads["properties"].astype(np.int64)

    def __len__(self) -> int:
        return len(self._positions)

    def offsets(self) -> Numbers:
        found: Numbers = self._heads["offset"].astype(np.int64)
        return found

    def milliseconds(self) -> Any:
        return self._heads["timestamp"]

    def bodies(self) -> pa.BinaryArray:
        starts = self._positions + self._lengths + OVERHEAD
        return spans(self._data, starts, self._positions + self._heads["total"])

    @cached_property
    def properties(self) -> PropertyColumns:
        return property_columns(self._data, self._positions + HEAD.size, self._lengths)


def heads_of(chunk: FrameChunk) -> Any:
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


def _not_stored(chunk: FrameChunk, right: Any) -> NotStored:
    index = int(np.argmin(right))
    return NotStored(index, chunk.first_offset + index)
