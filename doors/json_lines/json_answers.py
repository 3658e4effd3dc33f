"""The lines that the broker sends."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import msgspec

from qb.core.wire.errors import BrokerError, UnknownGroup, UnknownPartition, UnknownTopic
from qb.core.wire.frames import Frame

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS = 253_402_300_799_999  # the end of the year 9999: ISO-8601 goes no further
_SHOWN_APART = frozenset({"topic", "partition", "key"})  # properties that have a field of their own

_encode = msgspec.json.Encoder().encode


def success(data: Mapping[str, Any]) -> bytes:
    """Return the answer to a request that was carried out."""
    return line({"ok": True, "data": data})


def failure(text: str) -> bytes:
    """Return the answer to a request that was not."""
    return line({"ok": False, "error": text})


def line(answer: Mapping[str, Any]) -> bytes:
    """Return one line of JSON."""
    return _encode(answer) + b"\n"


def words(error: BrokerError) -> str:
    """Return what this door says of a refusal: a few have a fixed text, the others their own."""
    match error:
        case UnknownTopic():
            return f"TopicNotFound: {error.topic}"
        case UnknownPartition():
            return f"PartitionNotFound: {error.topic}/{error.partition}"
        case UnknownGroup():
            return "Group not found"
        case _:
            return str(error)


def record(message: Frame) -> dict[str, Any]:
    """Return a stored message as this door shows it."""
    shown: dict[str, Any] = {
        "offset": message.sequence_number,
        "timestamp": iso_time(message.timestamp),
        **shown_value(message.body),
        "key": message.properties.get("key"),
    }
    more = own_properties(message)
    if more:
        shown["properties"] = more
    return shown


def own_properties(message: Frame) -> dict[str, str]:
    """Return the publisher's own properties: those that have no field of their own."""
    return {name: text for name, text in message.properties.items() if name not in _SHOWN_APART}


@lru_cache(maxsize=1024)
def iso_time(timestamp_ms: int) -> str:
    """Return a time as ISO-8601 in UTC, to the millisecond; one after the year 9999 as the end of it."""
    moment = _EPOCH + timedelta(milliseconds=min(timestamp_ms, _LAST_MS))
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def shown_value(body: bytes) -> dict[str, str]:
    """Return a body as text, or as base64 with `encoding` beside it if it is not UTF-8."""
    try:
        return {"value": body.decode()}
    except UnicodeDecodeError:
        return {"value": b64encode(body).decode(), "encoding": "base64"}
