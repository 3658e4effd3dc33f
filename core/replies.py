"""core.replies: the ACK frames that the broker answers with; nobody builds one by hand.

May import: core.errors, core.frames, the standard library.
Never: trio, socket, storage.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from core.errors import REPLIES, BrokerError, OffsetOutOfRange
from core.frames import Frame, MessageType, encode_frame, encode_head


def now_ms() -> int:
    """Return the wall clock in ms, as frames and seals carry it."""
    return time.time_ns() // 1_000_000


def success(request: Frame, properties: Mapping[str, str] | None = None, body: bytes = b"") -> bytes:
    """Return the answer to a request that was carried out."""
    properties = {"status": "success", **(properties or {})}
    return encode_frame(MessageType.ACK, request.sequence_number, now_ms(), properties, body)


def success_head(request: Frame, properties: Mapping[str, str], body_length: int) -> bytes:
    """Return the same up to its body, which the caller sends along."""
    properties = {"status": "success", **properties}
    return encode_head(MessageType.ACK, request.sequence_number, now_ms(), properties, body_length)


def refusal(number: int, error: BrokerError, count: int | None = None) -> bytes:
    """Return the answer to the request with that number, or to `count` publishes from it on."""
    properties = {"status": "error", "code": REPLIES[type(error)].code.value, "error": str(error).replace("\0", "\\0")}
    if count is not None:
        properties["count"] = str(count)
    if isinstance(error, OffsetOutOfRange):
        properties |= {"first": str(error.first), "end": str(error.end)}
    return encode_frame(MessageType.ACK, number, now_ms(), properties)


def staged(number: int, messages: int) -> bytes:
    """Return the answer to a STAGE whose stage holds so many messages now."""
    return encode_frame(MessageType.ACK, number, now_ms(), {"status": "success", "messages": str(messages)})


def stored(
    number: int,
    count: int,
    topic: str,
    partition: int,
    offset: int,
    durability: str,
    append_ms: int,
    *,
    duplicate: bool,
) -> bytes:
    """Return the answer to `count` publishes from `number` on that are stored from `offset` on."""
    again = "duplicate=true\0" if duplicate else ""
    properties = (
        f"status=success\0topic={topic}\0partition={partition}\0offset={offset}\0"
        f"durability={durability}\0count={count}\0{again}"
    )
    return encode_frame(MessageType.ACK, number, append_ms, properties.encode())
