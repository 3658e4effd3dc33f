"""The rules that every message must keep, whichever door or client it comes from, with the words for each breach."""

from __future__ import annotations

from collections.abc import Iterable

from qb.core.wire.errors import BadRequest
from qb.core.wire.frames import RESERVED

# The properties of a PUBLISH frame, and of a staged message, that are fields of the frame: the broker gives them their
# meaning. In all doors and clients they have parameters of their own, and none takes them as properties of a user.
FRAME_FIELDS = frozenset({"topic", "partition", "key", "client_id", "publisher_id"})
LATEST_MS = 253_402_300_799_999  # the end of the year 9999, which is the last that all doors and clients can show
NOT_IN_FRAMES = RESERVED - FRAME_FIELDS  # names that only the broker writes into a frame


def reserved_property(name: str) -> str:
    """Return the words for a property of a user that has a reserved name."""
    return f"property name {name!r} is reserved: the broker gives it a meaning of its own; choose another name"


def bad_timestamp(timestamp_ms: int) -> str:
    """Return the words for the time of a message that is beyond LATEST_MS, or negative."""
    return f"timestamp {timestamp_ms} is not from 0 to {LATEST_MS}: give milliseconds since 1970, up to the year 9999"


def check_timestamp(timestamp_ms: int) -> None:
    """Check the time of a message. Raises BadRequest."""
    if not 0 <= timestamp_ms <= LATEST_MS:
        raise BadRequest(bad_timestamp(timestamp_ms))


def check_own_properties(names: Iterable[str]) -> None:
    """Check the names of a user's own properties. Raises BadRequest for one that is reserved."""
    for name in names:
        if name in RESERVED:
            raise BadRequest(reserved_property(name))


def check_frame_properties(names: Iterable[str]) -> None:
    """Check the names in a PUBLISH frame or a staged message: fields and a user's own. Raises BadRequest."""
    for name in names:
        if name in NOT_IN_FRAMES:
            raise BadRequest(reserved_property(name))
