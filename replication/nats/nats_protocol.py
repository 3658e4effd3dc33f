"""The bytes of the NATS client protocol: what a client sends, and what it reads. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from qb.core.wire.version import __version__

MOST_LINE = 1 << 20  # bytes of a control line; INFO lists all servers
MOST_MESSAGE = 64 << 20  # bytes; servers allow 1 MB unless they are set otherwise
LARGE = 1 << 16  # bytes of a payload that is received where it stays, not copied out of what came with it
_HEADER_LINE = b"NATS/1.0"
_END = b"\r\n"
_NOTHING = memoryview(bytearray())
_STATUS = re.compile(rb"NATS/1\.0[ \t]*(\d*)[ \t]*([^\r\n]*)")


class NatsError(Exception):
    """NATS cannot be reached, or it refused something."""


class NatsMisbehaved(NatsError):
    """What came is not the NATS protocol."""


class NatsServerInfo(msgspec.Struct, frozen=True):
    """What a server says of itself. Only what this client uses."""

    server_id: str = ""
    server_name: str = ""
    version: str = ""
    max_payload: int = 1 << 20
    headers: bool = False
    auth_required: bool = False
    tls_required: bool = False
    tls_available: bool = False
    connect_urls: tuple[str, ...] = ()
    ldm: bool = False  # lame duck mode: the server is about to stop


class NatsMessage(NamedTuple):
    """A message that came for a subscription."""

    subject: str
    sid: int
    reply: str
    headers: Mapping[str, str]
    payload: bytes | memoryview
    status: int = 0  # of a message without a payload that NATS itself sent: 503 no responders, 404, 408, …
    reason: str = ""


class ServerPing(NamedTuple):
    """The server wants a PONG."""


class ServerPong(NamedTuple):
    """The server has answered a PING."""


class ServerRefusal(NamedTuple):
    """The server has refused something, and has perhaps closed the connection."""

    text: str


NatsEvent = NatsServerInfo | NatsMessage | ServerPing | ServerPong | ServerRefusal


class NatsCredentials(NamedTuple):
    """How to prove who we are: a user with a password, or a token, or nothing."""

    user: str = ""
    password: str = ""
    token: str = ""


def connect_command(name: str, credentials: NatsCredentials, *, tls: bool) -> bytes:
    """Return CONNECT."""
    options: dict[str, Any] = {
        "verbose": False,
        "pedantic": False,
        "tls_required": tls,
        "name": name,
        "lang": "python-qb",
        "version": __version__,
        "protocol": 1,  # the server may send INFO again when the cluster changes
        "echo": True,
        "headers": True,
        "no_responders": True,
    }
    if credentials.token:
        options["auth_token"] = credentials.token
    if credentials.user:
        options |= {"user": credentials.user, "pass": credentials.password}
    return b"CONNECT " + msgspec.json.encode(options) + b"\r\n"


def subscribe_command(sid: int, subject: str) -> bytes:
    """Return SUB."""
    return b"SUB %s %d\r\n" % (subject.encode(), sid)


def unsubscribe_command(sid: int) -> bytes:
    """Return UNSUB."""
    return b"UNSUB %d\r\n" % sid


def publish_command(
    subject: str, payload: bytes, *, reply: str = "", headers: Mapping[str, object] | None = None
) -> bytes:
    """Return PUB, or HPUB if there are headers."""
    names = f"{subject} {reply}" if reply else subject
    if not headers:
        return b"PUB %s %d\r\n%s\r\n" % (names.encode(), len(payload), payload)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    head = b"%s\r\n%s\r\n" % (_HEADER_LINE, lines)
    return b"HPUB %s %d %d\r\n%s%s\r\n" % (names.encode(), len(head), len(head) + len(payload), head, payload)


class LargeMessage:
    """A message of which a large payload has begun to come. The payload has a place of its own."""

    def __init__(self, head: NatsMessage, size: int, begun: memoryview) -> None:
        """Take what has come of a payload of this size and of the end of its line."""
        self._head = head
        self._data = memoryview(bytearray(size + len(_END)))
        self._data[: len(begun)] = begun
        self.rest = self._data[len(begun) :]  # where the rest belongs

    def filled(self, count: int) -> None:
        """So many bytes have come into the rest."""
        self.rest = self.rest[count:]

    def message(self) -> NatsMessage:
        """Return it, once it is whole."""
        return self._head._replace(payload=self._data[: -len(_END)].toreadonly())


class NatsParser:
    """Bytes in, events out."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0  # where the next event begins
        self._large: LargeMessage | None = None  # it comes before what is in the buffer

    @property
    def rest(self) -> memoryview:
        """Where what comes next may be received, noted by filled(); empty if no large payload has begun."""
        return self._large.rest if self._large else _NOTHING

    def filled(self, count: int) -> None:
        """So many bytes were received into `rest`."""
        if self._large:
            self._large.filled(count)

    def receive(self, data: bytes | bytearray | memoryview) -> None:
        """Keep bytes for events() to parse."""
        if count := min(len(self.rest), len(data)):
            self.rest[:count] = data[:count]
            self.filled(count)
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += memoryview(data)[count:]

    def events(self) -> Iterator[NatsEvent]:
        """Yield every event that is whole. Raises NatsMisbehaved."""
        while (event := self._next()) is not None:
            if not isinstance(event, bool):
                yield event

    def _next(self) -> NatsEvent | bool | None:
        """Return one event, True for one that means nothing, or None if it needs more bytes."""
        if self._large:
            return self._whole_large()
        end = self._buffer.find(b"\r\n", self._at)
        if end < 0:
            if len(self._buffer) - self._at > MOST_LINE:
                raise NatsMisbehaved("the server sent a line without an end; is it a NATS server?")
            return None
        line = bytes(self._buffer[self._at : end])
        verb, _, rest = line.partition(b" ")
        verb = verb.upper()
        if verb in (b"MSG", b"HMSG"):
            return self._message(verb == b"HMSG", rest.split(), end + 2)
        self._at = end + 2
        return _simple_event(verb, rest)

    def _whole_large(self) -> NatsMessage | None:
        if self._large is None or self._large.rest:
            return None
        message, self._large = self._large.message(), None
        return message

    def _message(self, has_headers: bool, fields: list[bytes], start: int) -> NatsMessage | None:
        try:
            if has_headers:
                subject, sid, *reply, head_size, size = fields
            else:
                subject, sid, *reply, size = fields
                head_size = b"0"
            head_end, end = start + int(head_size), start + int(size)
            number = int(sid)
        except ValueError:
            raise NatsMisbehaved(f"the server sent {b' '.join(fields)[:200]!r} as the head of a message") from None
        if not start <= head_end <= end <= start + MOST_MESSAGE or len(reply) > 1:
            raise NatsMisbehaved(f"the server announced a message of {int(size)} bytes")
        is_large = end - head_end >= LARGE
        if len(self._buffer) < (head_end if is_large else end + len(_END)):
            return None
        headers, status, reason = _headers(bytes(self._buffer[start:head_end])) if has_headers else ({}, 0, "")
        head = NatsMessage(subject.decode(), number, reply[0].decode() if reply else "", headers, b"", status, reason)
        self._at = min(end + len(_END), len(self._buffer))
        with memoryview(self._buffer)[head_end : self._at] as came:
            if not is_large:
                return head._replace(payload=bytes(came[: end - head_end]))
            self._large = LargeMessage(head, end - head_end, came)
        return self._whole_large()


def _simple_event(verb: bytes, rest: bytes) -> NatsEvent | bool:
    if verb == b"PING":
        return ServerPing()
    if verb == b"PONG":
        return ServerPong()
    if verb == b"+OK":
        return True
    if verb == b"-ERR":
        return ServerRefusal(rest.strip(b" '").decode(errors="replace"))
    if verb == b"INFO":
        try:
            return msgspec.json.decode(rest, type=NatsServerInfo)
        except msgspec.DecodeError as error:
            raise NatsMisbehaved(f"the server's INFO cannot be read: {error}") from None
    raise NatsMisbehaved(f"the server sent {verb[:40]!r}; is it a NATS server?")


def _headers(block: bytes) -> tuple[dict[str, str], int, str]:
    """Return the headers, and the status of the first line."""
    first, *lines = block.split(b"\r\n")
    matched = _STATUS.fullmatch(first)
    if matched is None:
        raise NatsMisbehaved(f"the server sent headers that begin with {first[:40]!r}")
    pairs = (line.partition(b":") for line in lines if line)
    headers = {name.decode(): value.strip().decode(errors="replace") for name, _, value in pairs}
    return headers, int(matched[1] or 0), matched[2].decode(errors="replace")
