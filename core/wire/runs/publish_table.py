"""Many publishes in one frame, PUBLISH_RUN: a table of lengths, then frames whose heads are for the broker to write.

So a client does not pack a head for each message, and a broker need not follow the frames one by one.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import (
    HEAD,
    LENGTH,
    LENGTH_AND_TYPE,
    OVERHEAD,
    Frames,
    MessageType,
    decode_properties,
    encode_head,
)
from qb.core.wire.whole_numbers import whole_number

FEATURE = "publish_runs"  # what HELLO and its answer call it
LEAST = 64  # messages from which on a table pays
MOST_MESSAGES = 8_192  # in one frame: with as many keys they are 20 ms of work, in one step
MOST_BYTES = 2 * 1024 * 1024  # of such a frame, which is handled when it is whole

_ENTRY = 4  # bytes of a length in the table
_LENGTH_TYPE_NUMBER = struct.Struct(">IIQ")
_PROPERTIES_LENGTH_AT = HEAD.size - LENGTH.size


class PublishTable(NamedTuple):
    """The lengths of publishes whose frames stand in a row, and the number of the first one. They add up."""

    first_number: int
    bodies: array[int]  # how long each body is
    properties: array[int]  # how long the properties of each are
    frames_at: int  # where in the PUBLISH_RUN frame the first of them begins


def publish_run(first_number: int, bodies: Sequence[int], properties: Sequence[int], longest: int) -> bytes:
    """Return what stands before the frames of a run whose bodies and properties have these lengths.

    Lists are quickest. Nothing, if it would be longer than `longest` bytes, or have too many messages.
    """
    count, table = len(bodies), array("I", bodies) + array("I", properties)
    size = OVERHEAD * count + sum(bodies) + sum(properties)
    if sys.byteorder == "little":
        table.byteswap()
    encoded = table.tobytes()
    head = encode_head(MessageType.PUBLISH_RUN, first_number, 0, {"count": str(count)}, len(encoded) + size)
    return head + encoded if count <= MOST_MESSAGES and len(head) + len(encoded) + size <= longest else b""


def read_table(frame: bytes | bytearray | memoryview) -> PublishTable:
    """Return the table of a whole PUBLISH_RUN frame. Raises PeerMisbehaved unless its lengths add up."""
    total, _, number, _, properties_length = HEAD.unpack_from(frame)
    body_length = total - OVERHEAD - properties_length
    table_at = OVERHEAD + properties_length
    if body_length < 0 or LENGTH.unpack_from(frame, table_at - LENGTH.size)[0] != body_length:
        raise PeerMisbehaved(f"the lengths of a PUBLISH_RUN frame of {total} bytes do not add up")
    properties = decode_properties(bytes(frame[HEAD.size : table_at - LENGTH.size]))
    count = whole_number(properties.get("count", ""), least=1, most=MOST_MESSAGES)
    if count is None:
        raise PeerMisbehaved(f"PUBLISH_RUN needs a property 'count' from 1 to {MOST_MESSAGES}")
    if number + count > 1 << 64:
        raise PeerMisbehaved(f"the numbers of a PUBLISH_RUN frame from {number} on are too large")
    frames_at = table_at + 2 * _ENTRY * count
    table = array("I", bytes(frame[table_at:frames_at]) if frames_at <= total else b"")
    if sys.byteorder == "little":
        table.byteswap()
    if sum(table) + OVERHEAD * count != total - frames_at:
        raise PeerMisbehaved(f"the table of a PUBLISH_RUN frame does not say how long its {count} frames are")
    return PublishTable(number, table[:count], table[count:], frames_at)


def is_publish_run(frames: Frames) -> bool:
    """Say whether these frames are a PUBLISH_RUN."""
    return len(frames) >= OVERHEAD and LENGTH_AND_TYPE.unpack_from(frames)[1] == MessageType.PUBLISH_RUN


def as_publishes(frame: Frames | memoryview) -> bytearray:
    """Return the PUBLISH frames that a PUBLISH_RUN frame stands for. Raises as read_table()."""
    first_number, bodies, properties, frames_at = read_table(frame)
    frames, at, kind = bytearray(frame[frames_at:]), 0, MessageType.PUBLISH.value
    patch_head, patch = _LENGTH_TYPE_NUMBER.pack_into, LENGTH.pack_into
    for number, (body_length, length) in enumerate(zip(bodies, properties, strict=True), first_number):
        total = OVERHEAD + length + body_length
        patch_head(frames, at, total, kind, number)
        patch(frames, at + _PROPERTIES_LENGTH_AT, length)
        patch(frames, at + HEAD.size + length, body_length)
        at += total
    return frames
