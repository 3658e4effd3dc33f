"""What a request carries, read within bounds and checked: its query, and its body as a whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec
import trio

from qb.core.wire.argument_errors import in_words, why_no_json
from qb.core.wire.whole_numbers import from_text
from qb.doors.http.requests.body_room import BodyRoom
from qb.doors.http.requests.http_errors import HttpError, bad_request
from qb.doors.http.requests.http_peer import HttpPeer

LINES = "application/x-ndjson"
RAW = "application/octet-stream"
HANDLED_AT_ONCE = 1 << 26  # bytes of all bodies that are being handled
PATIENCE = 30.0  # seconds without a byte of a body until the request is refused
SHOWN = 200  # characters of a peer's own text in an error
# One decoding of JSON cannot be interrupted. It takes about 0.4 µs for each name and each text in it, so they are
# limited, and counted before: each begins with a quote that no backslash precedes.
MOST_STRINGS = 100_000
UNCOUNTED = 2 * MOST_STRINGS  # bytes of JSON that cannot hold more of them

Receive = Callable[[], Awaitable[tuple[bytes, bool]]]  # returns a part, and whether there may be more; raises PeerGone
T = TypeVar("T")
Query = TypeVar("Query", bound=msgspec.Struct)


class PeerGone(Exception):
    """The peer has closed the connection: an answer cannot be sent."""


class BodyReader:
    """Reads bodies so that all of them together stay within bounds."""

    def __init__(self) -> None:
        self.room = BodyRoom(HANDLED_AT_ONCE)

    @asynccontextmanager
    async def read(self, parts: BodyParts, headers: Mapping[str, str], limit: BodyLimit) -> AsyncIterator[bytes]:
        """Lend the whole body. Raises HttpError if it is too large or does not come, PeerGone."""
        declared = headers.get("content-length", "0")
        if len(declared) > 18 or int(declared) > limit.size:
            raise limit.exceeded()
        body = await _collect(parts, limit)
        async with self.room.of(len(body)):
            parts.peer.finished()
            yield body


class BodyLimit(NamedTuple):
    """How long a body may be, and what the refusal of a longer one advises."""

    size: int
    advice: str = ""

    def exceeded(self) -> HttpError:
        """Return the refusal of a longer body."""
        return HttpError(
            413, "BODY_TOO_LARGE", f"the body is over this route's limit of {self.size} bytes{self.advice}"
        )


class BodyParts:
    """A body as it arrives."""

    def __init__(self, receive: Receive, peer: HttpPeer) -> None:
        self.peer = peer
        self.more = True  # may there be another part?
        self._receive = receive

    async def next(self) -> bytes:
        """Return the next part, which may be empty. Raises HttpError if it does not come, PeerGone."""
        with trio.move_on_after(PATIENCE):
            part, self.more = await self._receive()
            return part
        raise HttpError(408, "TOO_SLOW", f"no byte of the body came for {PATIENCE:g} s")


async def _collect(parts: BodyParts, limit: BodyLimit) -> bytes:
    body = bytearray()
    while parts.more:
        body += await parts.next()
        if len(body) > limit.size:
            raise limit.exceeded()
    return bytes(body)


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


def decode_all(
    texts: Sequence[bytes], decoder: msgspec.json.Decoder[T], where: Callable[[int], str], first: int
) -> list[T]:
    """Return JSON texts as what they have to be. Raises HttpError as decode() does.

    `where` names a text by its index, and `first` is the index of the first one.
    """
    if max(map(len, texts), default=0) <= UNCOUNTED:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # found again, and named, below
            return list(map(decoder.decode, texts))
    return [decode(text, decoder, where(index)) for index, text in enumerate(texts, first)]


def parse_query(query: bytes, kind: type[Query]) -> Query:
    """Return the query as what it has to be. Raises HttpError; of a repeated name the last counts."""
    text = query.decode("ascii", "replace")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="replace", max_num_fields=100)
        return from_text(kind, dict(pairs))
    except (msgspec.ValidationError, ValueError) as error:
        raise bad_request(f"query: {in_words(str(error))[: SHOWN * 2]}") from None
