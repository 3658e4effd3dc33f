"""A plain socket that speaks lines of JSON: what `nc`, or a program in any language, sends and sees."""

from __future__ import annotations

import json
import socket
from typing import Any

import trio


def converse(port: int, sent: bytes, timeout: float = 20.0, host: str = "127.0.0.1") -> bytes:
    """Send everything, send no more, and return all that comes back: `printf ... | nc`."""
    with socket.create_connection((host, port), timeout=timeout) as peer:
        peer.sendall(sent)
        peer.shutdown(socket.SHUT_WR)
        received = b""
        while data := peer.recv(262_144):
            received += data
        return received


class LinePeer:
    """One connection, on trio."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._unread = b""

    async def send(self, **request: Any) -> None:
        await self.send_bytes(json.dumps(request).encode() + b"\n")

    async def send_bytes(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def receive_bytes(self) -> bytes | None:
        """Return the next line, or None when the broker has closed the connection."""
        while b"\n" not in self._unread:
            try:
                data = await self.stream.receive_some()
            except trio.BrokenResourceError:
                return None
            if not data:
                assert not self._unread, "the broker stopped in the middle of a line"
                return None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    async def receive(self) -> Any:
        """Return the next line as an object."""
        line = await self.receive_bytes()
        assert line is not None, "the broker closed the connection"
        return json.loads(line)

    async def ask(self, type: str, **fields: Any) -> Any:
        """Send a request and return the next line."""
        await self.send(type=type, **fields)
        return await self.receive()

    async def data(self, type: str, **fields: Any) -> Any:
        """Return the data of an answer; a refusal fails the test."""
        answer = await self.ask(type, **fields)
        assert answer["ok"] is True, answer
        return answer["data"]

    async def error(self, type: str, **fields: Any) -> str:
        """Return the text of a refusal; a success fails the test."""
        answer = await self.ask(type, **fields)
        assert answer["ok"] is False, answer
        return answer["error"]

    async def message(self) -> Any:
        """Return the next line, which must be a pushed message."""
        line = await self.receive()
        assert list(line) == ["ok", "message"], line
        return line["message"]


async def a_topic(peer: LinePeer, count: int = 0, topic: str = "a", partitions: int = 1) -> None:
    """Make a topic and publish 0, 1, ... to it."""
    await peer.data("createTopic", topic=topic, partitions=partitions)
    for number in range(count):
        await peer.data("produce", topic=topic, value=str(number))


async def subscribed(connect: Any, **options: Any) -> LinePeer:
    """Return a peer that has joined subscription `s` on topic `a`, made if need be."""
    peer = await connect.lines()
    await peer.data("createSubscription", subscription="s", topic="a")
    assert await peer.data("subscribe", subscription="s", **options) == {"subscription": "s", "topic": "a"}
    return peer
