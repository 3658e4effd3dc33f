"""Frames of one length, lying side by side, read and written as the rows of a table.

Messages are often as long as each other, and have the same properties. Then their heads have the same byte in the same
column, numbers apart, and a column is a slice with a step: what a loop does frame by frame is done column by column.
"""

from __future__ import annotations

from collections.abc import Sequence

from qb.core.wire.frames import frame_length

LEAST = 64  # frames for which columns are faster than a loop
PERIOD = 1 << 16  # so many numbers have all but their last two bytes in common
_NUMBER = slice(8, 16)  # where a head has its number
_HIGH, _LOW = 14, 15  # the columns of its last two bytes
_HIGHS = b"".join([bytes([high]) * 256 for high in range(256)])  # what numbers below PERIOD have there
_LOWS = bytes(range(256)) * 256


def count_alike(buffer: bytearray, start: int, end: int, head_size: int, then: int, most: int | None = None) -> int:
    """Return how many frames from `start` on have the head of the first, with numbers that follow by one.

    No more than fit before `end`, than `most`, and than can get the numbers from `then` on; 0 if they are too few.
    """
    length = frame_length(buffer, start)
    count = (end - start) // length
    count = count if most is None else min(count, most)
    if count < LEAST:
        return 0
    head = bytes(buffer[start : start + head_size])
    number = int.from_bytes(head[_NUMBER])
    count = min(count, numbers_left(number), numbers_left(then))
    count = _last_like(buffer, start, length, head, count)
    columns = dict(zip((_HIGH, _LOW), _last_bytes(number, count), strict=True))
    for at in range(head_size):
        found = buffer[start + at : start + count * length : length]
        expected = columns[at][:count] if at in columns else head[at : at + 1] * count
        if found != expected:
            count = _equal(found, expected)
            if count < LEAST:
                return 0
    return count if count >= LEAST else 0


def _last_like(buffer: bytearray, start: int, length: int, head: bytes, count: int) -> int:
    """Return which of so many frames, counted from 1, is probably the last with this head, but for its number.

    So it is where frames that go elsewhere begin once: a few looks spare columns of what does not belong to the row.
    """
    before, after = slice(0, _NUMBER.start), slice(_NUMBER.stop, len(head))
    like, unlike = 1, count + 1
    middle = count
    while unlike - like > 1:
        at = start + (middle - 1) * length
        other = buffer[at : at + len(head)]
        if other[before] == head[before] and other[after] == head[after]:
            like = middle
        else:
            unlike = middle
        middle = (like + unlike) // 2
    return like


def give_head(buffer: bytearray, start: int, count: int, head: bytes) -> None:
    """Give so many frames of one length, whose heads are alike, this one instead, with numbers that follow by one."""
    length, old = frame_length(buffer, start), bytes(buffer[start : start + len(head)])
    stop = start + count * length
    for at, (before, after) in enumerate(zip(old, head, strict=True)):
        if before != after:
            buffer[start + at : stop : length] = head[at : at + 1] * count
    high, low = _last_bytes(int.from_bytes(head[_NUMBER]), count)
    buffer[start + _HIGH : stop : length] = high
    buffer[start + _LOW : stop : length] = low


def table(head: bytes, bodies: Sequence[bytes]) -> bytearray:
    """Return a frame for each of the bodies, all as long as each other, with numbers that follow by one.

    There must not be more of them than numbers_left().
    """
    frames = bytearray(head).join([b"", *bodies])
    give_head(frames, 0, len(bodies), head)
    return frames


def _equal(one: bytearray, two: bytes) -> int:
    """Return how many bytes at the front are the same."""
    low, high = 0, len(two)
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == two[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def numbers_left(number: int) -> int:
    """Return how many numbers, from this one on, have all but their last two bytes in common."""
    return PERIOD - number % PERIOD


def _last_bytes(number: int, count: int) -> tuple[bytes, bytes]:
    """Return the last byte but one, and the last byte, of so many numbers from this one on."""
    first = number % PERIOD
    return _HIGHS[first : first + count], _LOWS[first : first + count]
