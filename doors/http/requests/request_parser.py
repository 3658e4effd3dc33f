"""Bytes of a peer in; heads of requests and parts of their bodies out. Does no I/O.

Each head goes through httptools (llhttp), whole and alone: what follows its empty line belongs to the body, or to the
next request. A body with Content-Length is cut by its length. A chunked one goes through httptools up to each empty
line, since it can end nowhere else. So one request is taken at a time, however many have come.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import httptools

from qb.doors.http.requests.http_errors import HttpError, bad_request

HEAD_LIMIT = 16_384  # bytes of a request line and its headers, or of what a chunked body has beside its data
PART_BYTES = 262_144  # of a body that are returned at a time
CHUNKED_BYTES = 65_536  # of a chunked body that are taken apart at a time
END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
_METHOD = re.compile(rb"[A-Za-z-]{1,40}")
TWO_LENGTHS = "the length of the body is given in two ways: send Content-Length or Transfer-Encoding"
_FORBIDDEN = (httptools.HttpParserError, httptools.HttpParserUpgrade)


class RequestHead(NamedTuple):
    """A request up to its body."""

    method: str
    path: bytes  # as it was sent
    query: bytes
    headers: Mapping[str, str]  # names in lower case; values of one name joined by commas
    is_http_1_1: bool
    keeps_alive: bool  # may another request follow?


class RequestParser:
    """What one peer has sent and was not taken yet.

    Call next_head() until it returns one, then next_part() until `has_body` is False, and so on.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0  # bytes in which a head does not end
        self._left: int | None = 0  # bytes of the body that are still to come; None: it is chunked
        self._chunked: httptools.HttpRequestParser | None = None
        self._target = b""
        self._headers: dict[str, str] = {}
        self._in_head = False
        self._parts: list[bytes] = []
        self._overhead = 0  # bytes of a chunked body since its last data

    @property
    def unread(self) -> int:
        """How many bytes have come and were not taken."""
        return len(self._buffer)

    @property
    def has_body(self) -> bool:
        """Is there more of the body, come or to come?"""
        return self._left != 0

    def receive(self, data: bytes | memoryview) -> None:
        """Keep bytes."""
        self._buffer += data

    def next_head(self) -> RequestHead | None:
        """Return the next head, None if it is not whole. Raises HttpError; then nothing more may be asked for."""
        while self._buffer.startswith(b"\r\n"):  # between two requests
            del self._buffer[:2]
        if self._buffer and self._buffer[0] < 0x21:
            raise bad_request("this is not HTTP/1.1")
        end = self._buffer.find(END, max(0, self._searched - len(END))) + len(END)
        if end < len(END):
            self._searched = end = len(self._buffer)
            if end <= HEAD_LIMIT:
                return None
        if end > HEAD_LIMIT:
            raise _too_long()
        head = bytes(self._buffer[:end])
        del self._buffer[:end]
        self._searched = 0
        return self._parse(head)

    def _parse(self, head: bytes) -> RequestHead:
        method, _, rest = head.partition(b" ")
        try:
            try:
                parser = self._feed_head(head)
            except httptools.HttpParserUpgrade:  # it is answered in HTTP/1.1, so its body is one of HTTP/1.1 too
                self._check_upgrade()
                parser = self._feed_head(_UPGRADE.sub(b"", head))
            except httptools.HttpParserInvalidMethodError:
                if not _METHOD.fullmatch(method):
                    raise
                parser = self._feed_head(b"POST " + rest)  # it is no route's method, but has to be read on
        except httptools.HttpParserUpgrade:
            raise HttpError(405, "METHOD_NOT_ALLOWED", "CONNECT is for proxies, and this is none") from None
        except httptools.HttpParserError as error:
            raise _refusal(head, error) from None
        self._check_upgrade()
        return self._checked(method.decode(), parser)

    def _feed_head(self, head: bytes) -> httptools.HttpRequestParser:
        self._target, self._headers, self._in_head = b"", {}, True
        parser = httptools.HttpRequestParser(self)
        parser.feed_data(head)
        return parser

    def _check_upgrade(self) -> None:
        wanted = {each.strip().lower() for each in self._headers.get("upgrade", "").split(",")}
        if "websocket" in wanted:
            what = "this door has no WebSockets; messages are pushed as Server-Sent Events"
            raise HttpError(403, "NO_WEBSOCKET", what)

    def _checked(self, method: str, parser: httptools.HttpRequestParser) -> RequestHead:
        """Return the head. Raises HttpError for what two programs may read in two ways."""
        version, headers = parser.get_http_version(), self._headers
        if version not in ("1.0", "1.1"):
            raise _other_version()
        is_http_1_1 = version == "1.1"
        if "," in headers.get("host", "" if not is_http_1_1 else ","):
            raise bad_request("a request of HTTP/1.1 has one Host header")
        chunked = "transfer-encoding" in headers
        if chunked and not is_http_1_1:
            raise bad_request(TWO_LENGTHS)
        self._left = None if chunked else int(headers.get("content-length", "0"))
        self._chunked, self._overhead = parser, 0
        path, _, query = self._target.partition(b"?")
        wanted = [each.strip() for each in headers.get("connection", "").lower().split(",")]
        keeps_alive = is_http_1_1 and "close" not in wanted
        return RequestHead(method, path, query, headers, is_http_1_1, keeps_alive)

    def next_part(self) -> bytes | None:
        """Return the next part of the body, which may be empty if it was the last one; None if more must come first.

        Raises HttpError; after that there is no end of the body to be found, and no part.
        """
        if self._left is None:
            return self._next_chunks()
        size = min(self._left, PART_BYTES, len(self._buffer))
        if not size:
            return None if self._left else b""
        self._left -= size
        return self._take(size)

    def _next_chunks(self) -> bytes | None:
        while self._chunked is not None and (size := self._size_of_chunks()):
            try:
                self._chunked.feed_data(self._take(size))
            except _FORBIDDEN:
                self._chunked = None
                raise bad_request("this body is not chunked as HTTP/1.1 says") from None
            part = b"".join(self._parts)
            self._parts.clear()
            self._overhead = 0 if part else self._overhead + size
            if self._overhead > HEAD_LIMIT:
                self._chunked = None
                raise _too_long()
            if part or not self.has_body:
                return part
        return None

    def _size_of_chunks(self) -> int:
        """Return how many bytes may be taken apart at once: a body may end behind them, but not within them."""
        most = min(len(self._buffer), CHUNKED_BYTES)
        end = self._buffer.find(END, 0, most) + len(END)
        if end >= len(END):
            return end
        return most - next((size for size in (3, 2, 1) if self._buffer.endswith(END[:size], 0, most)), 0)

    def _take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return taken

    # Called by httptools

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is behind the last chunk, and says nothing that we need
            key, text = name.decode("ascii").lower(), value.decode("latin-1").strip(" \t")
            self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        self._in_head = False

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self._left = 0


def _too_long() -> HttpError:
    return HttpError(431, "HEAD_TOO_LARGE", "the request line and the headers are longer than 16 KiB")


def _other_version() -> HttpError:
    return HttpError(505, "HTTP_VERSION", "this door speaks HTTP/1.1 only; there is no HTTP/2 here")


def _refusal(head: bytes, error: httptools.HttpParserError) -> HttpError:
    """Return why a head is refused, in words for its sender."""
    if head.startswith(b"PRI * HTTP/2"):
        return _other_version()
    if "can't be present with" in str(error):
        return bad_request(TWO_LENGTHS)
    return bad_request(f"this is not HTTP/1.1: {error}")
