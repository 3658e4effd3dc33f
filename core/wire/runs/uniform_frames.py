"""Frames of one length, side by side in a buffer, as a table: a row is a frame, a column a byte of every frame.

Messages often have the same length and the same properties. Then a column is a slice with a step, and what a loop does
frame by frame is done column by column: rows are compared, numbered and given another head.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from qb.core.wire.frames import LENGTH

LEAST = 64  # rows for which columns are faster than a loop
NUMBER = slice(8, 16)  # where a frame has its number
_LOW = 14  # the column of the last two bytes of a number
_PERIOD = 1 << 16  # so many numbers have all but their last two bytes in common
_SECOND_LAST = b"".join([bytes([byte]) * 256 for byte in range(256)])  # what numbers below _PERIOD have there
_LAST = bytes(range(256)) * 256


class UniformFrames(NamedTuple):
    """So many frames of one length. False if they are too few for columns to be faster than a loop."""

    data: Any  # bytes, a bytearray to write to, or what numpy reads of them
    start: int
    length: int
    count: int  # type: ignore[assignment]  # of rows: a table has no other use for this name

    def __bool__(self) -> bool:
        return self.count >= LEAST

    @classmethod
    def at(cls, data: bytes | bytearray, start: int, end: int, most: int | None = None) -> UniformFrames:
        """Return what stands from `start` to `end`, taken for frames as long as the first: `most` of them at most.

        Nothing but the length of the first one is known of them: see sharing().
        """
        (length,) = LENGTH.unpack_from(data, start)
        count = (end - start) // length if length else 0
        return cls(data, start, length, count if most is None or count < most else most)

    @property
    def end(self) -> int:
        return self.start + self.count * self.length

    @property
    def positions(self) -> range:
        """Where each frame starts, counted from the first."""
        return range(0, self.count * self.length, self.length)

    def first(self, start: int, stop: int) -> bytes:
        """Return these bytes of the first row."""
        return bytes(self.data[self.start + start : self.start + stop])

    # Reading

    def sharing(self, *spans: tuple[int, int]) -> UniformFrames:
        """Return the rows at the front that have the bytes of the first one in these spans of columns."""
        data, start, length = self.data, self.start, self.length
        count = self._probably_sharing(*spans[-1])
        end = start + count * length
        for begin, stop in spans:
            for at in range(start + begin, start + stop):
                found = data[at:end:length]
                if found != found[:1] * count:
                    count = _equal(found, found[:1] * count)
                    end = start + count * length
        return UniformFrames(data, start, length, count)

    def sharing_head(self, size: int) -> UniformFrames:
        """Return the rows at the front that have the first one's head of `size` bytes, with numbers that follow by one.

        They end where the last two bytes of the numbers begin anew.
        """
        rows = self.sharing((0, _LOW), (NUMBER.stop, size))
        data, start, length, count = rows
        low = int.from_bytes(data[start + _LOW : start + NUMBER.stop])
        count = min(count, _PERIOD - low)
        for column, numbers in ((_LOW, _SECOND_LAST), (_LOW + 1, _LAST)):
            found = data[start + column : start + count * length : length]
            count = _equal(found, numbers[low : low + count])
        return UniformFrames(data, start, length, count)

    def _probably_sharing(self, begin: int, stop: int) -> int:
        """Return which row, counted from 1, is probably the last that shares these columns with the first one.

        It is, where rows of another kind begin once: a few looks save columns of rows that do not belong.
        """
        data, length, begin, stop = self.data, self.length, self.start + begin, self.start + stop
        first = data[begin:stop]
        like, unlike = min(self.count, 1), self.count + 1
        middle = min(self.count, 2)
        while unlike - like > 1:
            at = (middle - 1) * length
            if data[begin + at : stop + at] == first:
                like = middle
            else:
                unlike = middle
            middle = (like + unlike) // 2 if like > 2 or unlike <= self.count else self.count
        return like

    # Writing: `data` must be a bytearray

    def give_head(self, head: bytes) -> None:
        """Give all rows another head, with numbers that follow by one; their heads agree but for such numbers."""
        self.fill(0, head)
        self._number(_LOW, int.from_bytes(head[NUMBER]))

    def fill(self, column: int, shared: bytes) -> None:
        """Give all rows these bytes from a column on; the rows agree there, numbers apart."""
        data, start, end, length = self.data, self.start + column, self.end, self.length
        assert isinstance(data, bytearray)
        for at, (old, new) in enumerate(zip(data[start : start + len(shared)], shared, strict=True), start):
            if old != new:
                data[at:end:length] = bytes((new,)) * self.count

    def number(self, first: int) -> None:
        """Give the rows numbers from `first` on."""
        self._number(NUMBER.start, first)

    def _number(self, column: int, first: int) -> None:
        """Write the numbers from `first` on, from this column of theirs on: all of them if the ones before change."""
        data, start, end, length = self.data, self.start, self.end, self.length
        assert isinstance(data, bytearray)
        if first % _PERIOD + self.count > _PERIOD:
            column = NUMBER.start
        for at, values in enumerate(_numbers(first, self.count, column - NUMBER.start), start + column):
            data[at:end:length] = values


def build(head: bytes, bodies: Sequence[bytes]) -> bytearray:
    """Return a frame for each of the bodies, which have one length; numbers follow that of the head by one."""
    frames = bytearray(head).join([b"", *bodies])
    UniformFrames(frames, 0, len(frames) // len(bodies), len(bodies)).give_head(head)
    return frames


def _equal(found: bytes | bytearray, expected: bytes | bytearray) -> int:
    """Return how many bytes at the front are the same."""
    if found == expected:
        return len(found)
    low, high = 0, len(expected) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if found[:middle] == expected[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _numbers(first: int, count: int, column: int) -> list[bytes]:
    """Return the columns of so many numbers from `first` on, from this one of the eight on."""
    low = first % _PERIOD
    if low + count <= _PERIOD:
        columns = [bytes((byte,)) * count for byte in first.to_bytes(8)[column:6]]
        return [*columns, _SECOND_LAST[low : low + count], _LAST[low : low + count]]
    numbers = array("Q", range(first, first + count))
    if sys.byteorder == "little":
        numbers.byteswap()
    encoded = numbers.tobytes()
    return [encoded[each::8] for each in range(column, 8)]
