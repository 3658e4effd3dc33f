"""The layout of a frame, defined once and executed fast.

`definition()` is the format for people, tools and tests; the struct objects below are what runs, and a test proves
that the two agree. construct's own parsers accept truncated input, so they never see bytes from the network.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from qb.core.wire.errors import BadRequest, MessageTooLarge, PeerMisbehaved

if TYPE_CHECKING:
    import construct


class MessageType(IntEnum):
    """What a frame is for. 1 to 9 are the basic dialect; ours start at 16."""

    DATA = 1
    ACK = 2
    HEARTBEAT = 3
    CREATE_TOPIC = 4
    CREATE_SUBSCRIPTION = 5
    DELETE_SUBSCRIPTION = 6
    SUBSCRIBE = 7
    UNSUBSCRIBE = 8
    PUBLISH = 9
    HELLO = 16
    REQUEST = 17
    GOODBYE = 18
    DELIVER = 19
    SETTLE = 20
    FETCH = 21
    STAGE = 22
    TRANSACTION = 23
    COMPRESSED = 24
    PUBLISH_RUN = 25
    SEAL = 32


HEAD = struct.Struct(">IIQQI")  # total_length, type, sequence_number, timestamp, properties_length
LENGTH = struct.Struct(">I")
LENGTH_AND_TYPE = struct.Struct(">II")
TYPE_AND_SEQUENCE = struct.Struct(">IQ")  # what turns a PUBLISH into the stored DATA, four bytes into the frame

OVERHEAD = HEAD.size + LENGTH.size  # a frame without properties and body: 32 bytes
MAX_PROPERTIES = 65_536
PROBE = 2**64 - 1  # the sequence number of a HEARTBEAT that asks "are you there?" and is answered, never counted

# Property names that the broker gives a meaning; a publisher cannot use them for its own.
RESERVED = frozenset({"topic", "partition", "key", "subscription_id", "client_id", "publisher_id"})


Frames = bytes | bytearray  # whole frames, back to back, that are not changed any more


class Frame(NamedTuple):
    """One whole frame, for requests and replies; messages in bulk travel as runs of bytes."""

    type: int
    sequence_number: int
    timestamp: int
    properties: dict[str, str]
    body: bytes


def too_large(body_length: int, properties_length: int, max_body: int) -> MessageTooLarge | None:
    """Return what is to be said if the body or the properties are over their limit, each with its own numbers."""
    if body_length > max_body:
        return MessageTooLarge(f"a body of {body_length} bytes is", body_length, max_body)
    if properties_length > MAX_PROPERTIES:
        return MessageTooLarge(f"properties of {properties_length} bytes are", properties_length, MAX_PROPERTIES)
    return None


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return `key=value` NUL for each property. Raises BadRequest for what the format cannot carry."""
    for key, value in properties.items():
        if not key or "=" in key or "\0" in key:
            raise BadRequest(f"property name {key!r} must not be empty nor hold '=' or NUL")
        if "\0" in value:
            raise BadRequest(f"the value of property {key!r} must not hold NUL")
    try:
        return "".join([f"{key}={value}\0" for key, value in properties.items()]).encode()
    except UnicodeEncodeError:
        raise BadRequest("properties must be valid Unicode text") from None


def decode_properties(encoded: bytes) -> dict[str, str]:
    """Return the properties in order; the first of a repeated name counts. Raises PeerMisbehaved."""
    if not encoded:
        return {}
    if encoded[-1]:
        raise PeerMisbehaved("the last property does not end with NUL")
    try:
        items = encoded[:-1].decode().split("\0")
    except UnicodeDecodeError:
        raise PeerMisbehaved("properties are not UTF-8") from None
    properties: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise PeerMisbehaved(f"property {item[:80]!r} is not of the form key=value")
        properties.setdefault(key, value)
    return properties


def encode_frame(
    type: int,
    sequence_number: int = 0,
    timestamp: int = 0,
    properties: Mapping[str, str] | bytes = b"",
    body: bytes | bytearray | memoryview = b"",
) -> bytes:
    """Return the frame's bytes. Raises BadRequest for properties that the format cannot carry."""
    return b"".join((encode_head(type, sequence_number, timestamp, properties, len(body)), body))


def encode_head(
    type: int, sequence_number: int, timestamp: int, properties: Mapping[str, str] | bytes, body_length: int
) -> bytes:
    """Return a frame up to its body, for those who send a long body without copying it."""
    if not isinstance(properties, bytes):
        properties = encode_properties(properties)
    total = OVERHEAD + len(properties) + body_length
    head = HEAD.pack(total, type, sequence_number, timestamp, len(properties))
    return b"".join((head, properties, LENGTH.pack(body_length)))


def frame_length(buffer: bytes | bytearray | memoryview, position: int = 0) -> int:
    """Return total_length of the frame at `position`; four bytes must be there."""
    return LENGTH.unpack_from(buffer, position)[0]  # type: ignore[no-any-return]


def decode_frame(buffer: bytes | bytearray | memoryview, position: int = 0, *, lend: bool = False) -> Frame:
    """Return the whole frame at `position`. Raises PeerMisbehaved when its lengths do not add up.

    The caller has made sure that `total_length` bytes are there. With `lend` the body is a memoryview of the buffer and
    not a copy: for long ones, whose readers know it.
    """
    total, type, sequence_number, timestamp, properties_length = HEAD.unpack_from(buffer, position)
    properties_at = position + HEAD.size
    body_length_at = properties_at + properties_length
    if properties_length > total - OVERHEAD:
        raise PeerMisbehaved(f"properties_length {properties_length} does not fit a frame of {total} bytes")
    (body_length,) = LENGTH.unpack_from(buffer, body_length_at)
    if OVERHEAD + properties_length + body_length != total:
        raise PeerMisbehaved(
            f"total_length {total} is not 32 + properties_length {properties_length} + body_length {body_length}"
        )
    body_at = body_length_at + LENGTH.size
    properties = decode_properties(bytes(buffer[properties_at:body_length_at]))
    body = memoryview(buffer)[body_at : body_at + body_length]  # a slice of a bytearray would be a second copy
    return Frame(type, sequence_number, timestamp, properties, body if lend else bytes(body))  # type: ignore[arg-type]


def data_frames(data: bytes | memoryview) -> Iterator[Frame]:
    """Return the messages among stored frames."""
    at = 0
    while at < len(data):
        frame = decode_frame(data, at)
        if frame.type == MessageType.DATA:
            yield frame
        at += frame_length(data, at)


def definition() -> construct.Construct:
    """Return the frame as a construct definition (imported here: construct is slow to load and only tools need it)."""
    import construct as c

    return c.Struct(
        "total_length" / c.Rebuild(c.Int32ub, lambda this: OVERHEAD + len(this.properties) + len(this.body)),
        "message_type" / c.Int32ub,
        "sequence_number" / c.Int64ub,
        "timestamp" / c.Int64ub,
        "properties" / c.Prefixed(c.Int32ub, c.GreedyBytes),
        "body" / c.Prefixed(c.Int32ub, c.GreedyBytes),
    )
