"""What a request carries, read within bounds and checked: its query, its JSON, its lines of JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
import trio

from qb.core.wire.argument_errors import in_words, why_no_json
from qb.doors.http.http_errors import HttpError, bad_request

JSON = "application/json"
LINES = "application/x-ndjson"
SMALL = 1 << 20  # bytes; a larger body waits until fewer than LARGE_AT_ONCE others are being dealt with
LARGE_AT_ONCE = 4
PATIENCE = 30.0  # seconds without a byte of a body until the request is refused
LONGEST = 300.0  # seconds that a body may take altogether
SHOWN = 200  # characters of a peer's own text in an error

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
T = TypeVar("T")


class PeerGone(Exception):
    """The peer has closed the connection: there is nobody to answer."""


class BodyReader:
    """Reads bodies so that all of them together stay within bounds."""

    def __init__(self) -> None:
        self._large = trio.CapacityLimiter(LARGE_AT_ONCE)

    @asynccontextmanager
    async def read(self, receive: Receive, headers: Mapping[str, str], limit: int) -> AsyncIterator[bytes]:
        """Lend the body; while it is lent, it takes part of the room for large ones. Raises HttpError, PeerGone."""
        if headers.get("content-encoding", "identity") != "identity":
            raise HttpError(415, "UNSUPPORTED_MEDIA_TYPE", "send the body as it is: no content-encoding is understood")
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        room = Room(self._large)
        try:
            yield await _collect(receive, limit, room)
        finally:
            room.leave()


class Room:
    """A place among the large bodies, once one is needed."""

    def __init__(self, limiter: trio.CapacityLimiter) -> None:
        self._limiter = limiter
        self._inside = False

    async def enter(self) -> None:
        """Return when there is a place."""
        if not self._inside:
            await self._limiter.acquire_on_behalf_of(self)
            self._inside = True

    def leave(self) -> None:
        if self._inside:
            self._limiter.release_on_behalf_of(self)


async def _collect(receive: Receive, limit: int, room: Room) -> bytes:
    """Return the whole body. Raises HttpError if it is too large or too slow, PeerGone."""
    with trio.move_on_after(LONGEST):
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            part, more = await _next_part(receive)
            parts.append(part)
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            if size > SMALL:
                await room.enter()
        return b"".join(parts)
    raise _too_slow(LONGEST)


async def _next_part(receive: Receive) -> tuple[bytes, bool]:
    with trio.move_on_after(PATIENCE):
        event = await receive()
        if event["type"] == "http.disconnect":
            raise PeerGone
        return event.get("body", b""), event.get("more_body", False)
    raise _too_slow(PATIENCE)


def _too_slow(seconds: float) -> HttpError:
    return HttpError(408, "TOO_SLOW", f"the body did not come within {seconds:g} s", {"connection": "close"})


def _too_large(limit: int) -> HttpError:
    return HttpError(413, "BODY_TOO_LARGE", f"the body is over this route's limit of {limit} bytes")


def media_type(headers: Mapping[str, str]) -> str:
    """Return the content type without parameters; empty if there is none. Raises HttpError if it is not UTF-8."""
    kind, _, parameters = headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if parameters and charset not in ("utf-8", "utf8", ""):
        raise HttpError(415, "UNSUPPORTED_MEDIA_TYPE", f"JSON is UTF-8, not {parameters.strip()[:SHOWN]}")
    return kind.strip().lower()


def check_media_type(headers: Mapping[str, str], *accepted: str) -> str:
    """Return the content type if it is one of these. Raises HttpError."""
    found = media_type(headers)
    if found not in accepted:
        what = f"not {found[:SHOWN]}" if found else "and there is none"
        raise HttpError(415, "UNSUPPORTED_MEDIA_TYPE", f"content-type must be {' or '.join(accepted)}, {what}")
    return found


def decode(body: bytes | memoryview, decoder: msgspec.json.Decoder[T], where: str = "") -> T:
    """Return JSON as what it has to be. Raises HttpError that says where it is not."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise bad_request(f"{where}{in_words(str(error))[: SHOWN * 2]}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"{where}{why_no_json(error, body)}") from None


def parse_query(query: bytes, kind: type[T]) -> T:
    """Return the query as what it has to be. Raises HttpError; of a repeated name the last counts."""
    text = query.decode("ascii", "replace")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="replace", max_num_fields=100)
        return msgspec.convert(dict(pairs), kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise bad_request(f"query: {in_words(str(error))[: SHOWN * 2]}") from None
