"""Runs of DATA frames as a STAGE carries them: proved when they come, numbered when they are committed.

Both are done for every message, so each is one tight loop over one buffer; uniform frames need no loop at all.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from qb.core.wire.errors import BadRequest
from qb.core.wire.frames import HEAD, LENGTH, MAX_PROPERTIES, OVERHEAD, MessageType
from qb.core.wire.message_rules import LATEST_MS, NOT_IN_FRAMES, bad_timestamp, reserved_property
from qb.core.wire.runs.uniform_frames import UniformFrames

_RESERVED = re.compile(rb"\0(%b)=" % "|".join(sorted(NOT_IN_FRAMES)).encode())
_PROPERTIES = re.compile(rb"(?:[^=\0]+=[^\0]*\0)*\Z")
_SURELY_EARLIER = LATEST_MS >> 40 << 40  # a time before this has other first three bytes than LATEST_MS
_NUMBER = struct.Struct(">Q")
_NUMBER_AT = 8  # where a frame carries its sequence number
_LONGEST_COMPARED = 100  # bytes of properties; comparing more of them by columns takes longer than the loop


class NumberedFrames(NamedTuple):
    """Frames with their offsets in them."""

    data: bytes
    positions: Sequence[int]  # where each frame starts in data
    end: int  # where the next one stands in the buffer they were taken from


@lru_cache(maxsize=256)
def _up_to_body(properties_length: int) -> struct.Struct:
    """Return a struct for total_length, type, timestamp, properties_length, properties and body_length."""
    return struct.Struct(f">II8xQI{properties_length}sI")


def check_messages(frame: bytes, at: int, topic: str, max_body: int, most: int) -> tuple[int, int]:
    """Return how many messages stand in `frame` from `at` on, and where they end: its end, or after about `most` bytes.

    Raises BadRequest unless they are whole DATA frames for this topic, each one as a publish would have to be.
    """
    begin, end, count, data = f"topic={topic}\0".encode(), len(frame), 0, MessageType.DATA.value
    stop = min(end, at + most)
    length, known = -1, None
    unpack, size = HEAD.unpack_from, end + 1  # so that the first message chooses the struct
    while at < stop:
        if end - at >= size:
            total, kind, timestamp, properties_length, properties, body_length = unpack(frame, at)
            if properties_length == length:
                if kind != data or total != size + body_length or body_length > max_body or total > end - at:
                    raise _bad(at, _what_is_wrong(total, kind, length, body_length, max_body, end - at))
                if timestamp > LATEST_MS:
                    raise _bad(at, bad_timestamp(timestamp))
                if properties != known:  # a publisher often repeats them
                    _check_properties(properties, begin, at)
                    known = properties
                at += total
                count += 1
                if count == 1 and length <= _LONGEST_COMPARED and timestamp < _SURELY_EARLIER:
                    # Perhaps many others are like the first one, their times too: with its first three bytes, none is
                    # later than LATEST_MS.
                    like = UniformFrames.at(frame, at - total, stop).sharing((0, 8), (16, 19), (24, size))
                    if like:
                        count, at = like.count, like.end
                continue
        length = _length_of_properties(frame, at)
        head = _up_to_body(length)
        unpack, size = head.unpack_from, head.size
    return count, at


def _length_of_properties(frame: bytes, at: int) -> int:
    """Return it for the message at `at`. Raises BadRequest if so much cannot stand there."""
    left = len(frame) - at
    if left < OVERHEAD:
        raise _bad(at, f"{left} bytes are too few for a frame")
    length: int = HEAD.unpack_from(frame, at)[4]
    if length > min(left - OVERHEAD, MAX_PROPERTIES):
        raise _bad(at, f"properties_length {length} is too large")
    return length


def _what_is_wrong(total: int, kind: int, length: int, body_length: int, max_body: int, left: int) -> str:
    if kind != MessageType.DATA:
        return f"it has type {kind}, and only DATA ({MessageType.DATA.value}) can be staged"
    if total != OVERHEAD + length + body_length:
        return f"total_length {total} is not 32 + properties_length {length} + body_length {body_length}"
    if total > left:
        return f"it has {total} bytes, of which only {left} are there"
    return f"a body of {body_length} bytes is over this broker's limit of {max_body}"


def _check_properties(properties: bytes, begin: bytes, at: int) -> None:
    if not properties.startswith(begin):
        raise _bad(at, f"its properties do not begin with {begin[:-1].decode()!r}")
    if not _PROPERTIES.match(properties, len(begin)):
        raise _bad(at, "its properties are not each of the form key=value with a NUL behind it")
    try:
        properties.decode()
    except UnicodeDecodeError:
        raise _bad(at, "its properties are not UTF-8") from None
    reserved = _RESERVED.search(properties)
    if reserved:
        raise _bad(at, reserved_property(reserved[1].decode()))


def _bad(at: int, what: str) -> BadRequest:
    return BadRequest(f"the message at byte {at} of this STAGE frame cannot be stored: {what}")


def frames_in(body: bytes) -> Iterator[int]:
    """Yield where each frame of a row of whole frames begins. Raises BadRequest for what is no such row."""
    at = 0
    while at < len(body):
        length = LENGTH.unpack_from(body, at)[0] if len(body) - at >= LENGTH.size else 0
        if not OVERHEAD <= length <= len(body) - at:
            raise BadRequest(f"there is no whole frame at byte {at} of {len(body)} of this TRANSACTION frame")
        yield at
        at += length


def number_messages(frames: bytearray, at: int, first_offset: int, most: int) -> NumberedFrames:
    """Give the frames from `at` on their offsets: `most` bytes of them, but at least one. They have been proved."""
    stop = min(len(frames), at + most)
    rows = UniformFrames.at(frames, at, stop).sharing((0, LENGTH.size))
    if not rows:
        return _number_each(frames, at, first_offset, stop)
    rows.number(first_offset)
    return NumberedFrames(bytes(memoryview(frames)[at : rows.end]), rows.positions, rows.end)


def _number_each(frames: bytearray, at: int, first_offset: int, end: int) -> NumberedFrames:
    """Number the frames up to `end`, but at least one."""
    start, offset = at, first_offset
    unpack, patch = LENGTH.unpack_from, _NUMBER.pack_into
    positions: list[int] = []
    keep = positions.append
    while at < end:
        following = at + unpack(frames, at)[0]
        if following > end and positions:
            break
        patch(frames, at + _NUMBER_AT, offset)
        keep(at - start)
        at = following
        offset += 1
    return NumberedFrames(bytes(memoryview(frames)[start:at]), positions, at)


def skip_messages(frames: bytes | bytearray | memoryview, count: int) -> int:
    """Return where the message stands that has `count` before it."""
    at = 0
    for _ in range(count):
        at += LENGTH.unpack_from(frames, at)[0]
    return at
