"""A plain HTTP client on trio: what `curl`, or a browser's EventSource, sends and sees."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import h11
import trio

UNSET: Any = object()
READS_EVENTS = {"accept": "text/event-stream"}  # as an EventSource says


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Event(NamedTuple):
    name: str
    id: str
    data: Any


class HttpPeer:
    """One connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._h11 = h11.Connection(h11.CLIENT)
        self._unread = b""

    async def ask(
        self, method: str, path: str, data: Any = UNSET, *, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request and return the whole answer; `data` goes as JSON."""
        await self.send(method, path, data, body=body, headers=headers)
        return await self.finish()

    async def finish(self) -> Answer:
        """Return the whole answer to what was sent."""
        answer = await self._start()
        received = b""
        while not isinstance(event := await self._next(), h11.EndOfMessage):
            received += event.data
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
        return answer._replace(body=received)

    async def send(
        self, method: str, path: str, data: Any = UNSET, *, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        given = {"host": "localhost", **(headers or {})}
        if data is not UNSET:
            body = json.dumps(data).encode()
            given = {"content-type": "application/json", **given}
        given.setdefault("content-length", str(len(body)))
        request = self._h11.send(h11.Request(method=method, target=path, headers=list(given.items())))
        sent = (request or b"") + (self._h11.send(h11.Data(data=body)) or b"")
        await self.stream.send_all(sent + (self._h11.send(h11.EndOfMessage()) or b""))

    async def ok(self, method: str, path: str, data: Any = UNSET, status: int = 200, **more: Any) -> Any:
        """Return the JSON of an answer that must have this status."""
        answer = await self.ask(method, path, data, **more)
        assert answer.status == status, answer
        return answer.json

    async def refused(self, method: str, path: str, data: Any = UNSET, **more: Any) -> tuple[int, str]:
        """Return status and code of a refusal, which must have both texts and nothing but JSON."""
        answer = await self.ask(method, path, data, **more)
        assert answer.status >= 400, answer
        assert answer.headers["content-type"] == "application/json"
        assert isinstance(answer.json["error"], str)
        assert answer.json["error"]
        return answer.status, answer.json["code"]

    async def open_stream(self, path: str, **headers: str) -> Any:
        """Begin to read events; returns what the first one, `joined`, says."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        await self.send("GET", path, headers={**READS_EVENTS, **given})
        answer = await self._start()
        assert answer.status == 200, answer
        assert answer.headers["content-type"].startswith("text/event-stream")
        joined = await self.event()
        assert joined.name == "joined"
        return joined.data

    async def event(self) -> Event:
        """Return the next event; comments are passed over."""
        while True:
            block = await self.block()
            lines = [line for line in block.decode().split("\n") if not line.startswith(":")]
            if lines:
                fields = dict(line.split(": ", 1) for line in lines)
                return Event(fields.get("event", "message"), fields.get("id", ""), json.loads(fields["data"]))

    async def block(self) -> bytes:
        """Return the next event or comment as it came."""
        while b"\n\n" not in self._unread:
            event = await self._next()
            assert isinstance(event, h11.Data), f"the stream ended with {event!r}"
            self._unread += event.data
        block, _, self._unread = self._unread.partition(b"\n\n")
        return block

    async def finish_stream(self) -> None:
        """Read to the end of a stream; the connection can be used again."""
        event = await self._next()
        assert isinstance(event, h11.EndOfMessage), event
        self._h11.start_next_cycle()

    async def is_closed(self) -> bool:
        """Wait for whatever comes next; True if that is the end."""
        while True:
            try:
                event = await self._next()
            except (trio.BrokenResourceError, h11.RemoteProtocolError):
                return True
            if not isinstance(event, h11.EndOfMessage):
                return isinstance(event, h11.ConnectionClosed)
            if self._h11.our_state is h11.DONE:
                self._h11.start_next_cycle()

    def vanish(self) -> None:
        """Go without a word: the other side gets a reset."""
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.socket.close()

    async def _start(self) -> Answer:
        event = await self._next()
        while isinstance(event, h11.InformationalResponse):
            event = await self._next()
        assert isinstance(event, h11.Response), event
        headers = {name.decode(): value.decode() for name, value in event.headers}
        return Answer(event.status_code, headers, b"")

    async def _next(self) -> Any:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(await self.stream.receive_some())
        return event
