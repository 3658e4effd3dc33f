"""What a request carries, read within bounds and checked: its query, and its body as a whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec
import trio

from qb.core.wire.argument_errors import in_words, why_no_json
from qb.doors.http.http_errors import HttpError, bad_request

JSON = "application/json"
LINES = "application/x-ndjson"
RAW = "application/octet-stream"
SMALL = 1 << 20  # bytes; a larger body waits until fewer than LARGE_AT_ONCE others are being dealt with
LARGE_AT_ONCE = 4
PATIENCE = 30.0  # seconds without a byte of a body until the request is refused
LONGEST = 300.0  # seconds that a body may take altogether
SHOWN = 200  # characters of a peer's own text in an error
# One decoding of JSON cannot be interrupted. It takes about 0.4 µs for each name and each text in it, so they are
# limited, and counted before: each begins with a quote that no backslash precedes.
MOST_STRINGS = 100_000
UNCOUNTED = 2 * MOST_STRINGS  # bytes of JSON that cannot hold more of them

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
T = TypeVar("T")


class PeerGone(Exception):
    """The peer has closed the connection: there is nobody to answer."""


class BodyReader:
    """Reads bodies so that all of them together stay within bounds."""

    def __init__(self) -> None:
        self._large = trio.CapacityLimiter(LARGE_AT_ONCE)

    @asynccontextmanager
    async def read(self, receive: Receive, headers: Mapping[str, str], limit: BodyLimit) -> AsyncIterator[bytes]:
        """Lend the body; while it is lent, it takes part of the room for large ones. Raises HttpError, PeerGone."""
        check_encoding(headers)
        declared = headers.get("content-length", "0")
        if len(declared) > 18 or int(declared) > limit.size:
            raise limit.exceeded()
        async with self.room() as room:
            yield await _collect(BodyParts(receive), limit, room)

    @asynccontextmanager
    async def room(self) -> AsyncIterator[Room]:
        """Lend a place among the large bodies, which is taken only when it is entered."""
        room = Room(self._large)
        try:
            yield room
        finally:
            room.leave()


class BodyLimit(NamedTuple):
    """How long a body may be, and what a longer one is told to do."""

    size: int
    advice: str = ""

    def exceeded(self) -> HttpError:
        """Return the refusal of a longer body."""
        return HttpError(
            413, "BODY_TOO_LARGE", f"the body is over this route's limit of {self.size} bytes{self.advice}"
        )


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


class BodyParts:
    """A body as it arrives, within the time that it may take."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ends_at = trio.current_time() + LONGEST
        self.more = True  # may there be another part?

    async def next(self) -> bytes:
        """Return the next part, which may be empty. Raises HttpError if it does not come, PeerGone."""
        now = trio.current_time()
        with trio.move_on_at(min(now + PATIENCE, self._ends_at)):
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise PeerGone
            self.more = event.get("more_body", False)
            part: bytes = event.get("body", b"")
            return part
        raise _too_slow(PATIENCE if now + PATIENCE < self._ends_at else LONGEST)


async def _collect(parts: BodyParts, limit: BodyLimit, room: Room) -> bytes:
    """Return the whole body. Raises HttpError if it is too large or too slow, PeerGone."""
    body = bytearray()
    while parts.more:
        body += await parts.next()
        if len(body) > limit.size:
            raise limit.exceeded()
        if len(body) > SMALL:
            await room.enter()
    return bytes(body)


def _too_slow(seconds: float) -> HttpError:
    return HttpError(408, "TOO_SLOW", f"the body did not come within {seconds:g} s", {"connection": "close"})


def check_encoding(headers: Mapping[str, str]) -> None:
    """Refuse a compressed body: a small one could become a huge one. Raises HttpError."""
    if headers.get("content-encoding", "identity") != "identity":
        raise HttpError(415, "UNSUPPORTED_MEDIA_TYPE", "send the body as it is: no content-encoding is understood")


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


def decode(body: bytes, decoder: msgspec.json.Decoder[T], where: str = "") -> T:
    """Return JSON as what it has to be. Raises HttpError that says where it is not."""
    if len(body) > UNCOUNTED and body.count(b'"') - body.count(b'\\"') > MOST_STRINGS:
        what = f"this JSON holds more than {MOST_STRINGS} names and texts; send fewer messages at once"
        raise HttpError(413, "BODY_TOO_LARGE", f"{where}{what}")
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
