"""The ACK frames that the broker answers with; they are built nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from qb.core.wire.clock import now_ms
from qb.core.wire.errors import REPLIES, BrokerError, NotOwner, OffsetOutOfRange, QuotaExceeded
from qb.core.wire.frames import HEAD, LENGTH, OVERHEAD, Frame, MessageType, encode_frame, encode_head

ACK = int(MessageType.ACK)
NO_BODY = LENGTH.pack(0)


class SessionEnded(Exception):
    """A request was refused in a way that the connection does not survive; the peer has been answered."""


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
    if isinstance(error, QuotaExceeded):
        properties["retry_after"] = f"{error.retry_after:g}"
    if isinstance(error, OffsetOutOfRange):
        properties |= {"first": str(error.first), "end": str(error.end)}
    if isinstance(error, NotOwner):
        properties |= {"cell": error.cell, "epoch": str(error.epoch)}
        properties |= {"owner": error.owner} if error.owner else {}
    return encode_frame(MessageType.ACK, number, now_ms(), properties)


def staged(number: int, messages: int) -> bytes:
    """Return the answer to a STAGE whose stage holds so many messages now."""
    return encode_frame(MessageType.ACK, number, now_ms(), {"status": "success", "messages": str(messages)})


def stored(
    number: int,
    count: int,
    offset: int,
    topic: str,
    partition: int,
    durability: str,
    append_ms: int,
    duplicate: bool,
    unverified: bool = False,
) -> bytes:
    """Return the answer to `count` publishes from `number` on that are stored from `offset` on.

    `unverified`: a duplicate of a message that is no longer there to compare it with.
    """
    before, between = _around_the_offset(topic, partition, durability)
    again = b"duplicate=true\0unverified=true\0" if unverified else b"duplicate=true\0" if duplicate else b""
    properties = b"%b%d%b%d\0%b" % (before, offset, between, count, again)
    head = HEAD.pack(OVERHEAD + len(properties), ACK, number, append_ms, len(properties))
    return head + properties + NO_BODY


@lru_cache(maxsize=1024)
def _around_the_offset(topic: str, partition: int, durability: str) -> tuple[bytes, bytes]:
    """Return what stands in such an answer before the offset, and between it and the count."""
    before = f"status=success\0topic={topic}\0partition={partition}\0offset="
    return before.encode(), f"\0durability={durability}\0count=".encode()
