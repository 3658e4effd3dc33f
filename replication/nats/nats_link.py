"""The bytes of one connection: a plain socket, to which something can be sent at once, or a stream with TLS."""

from __future__ import annotations

import socket
from typing import Protocol

import trio

CHUNK = 1 << 18  # bytes that are received at a time
Data = bytes | bytearray | memoryview


class NatsLink(Protocol):
    """Where the bytes of a conversation go. One task receives, and another one sends."""

    async def receive(self) -> Data:
        """Return what has come, to be used before the next call; empty: the server has closed. Raises OSError."""

    async def send(self, data: Data) -> None:
        """Send all of it. Raises OSError."""

    def send_now(self, data: Data) -> int:
        """Send what can be sent without waiting, while send() does not run; returns how much. Raises OSError."""

    async def aclose(self) -> None:
        """Close at once."""


class PlainLink:
    """A socket. What is sent in the step that decides it costs no turn of the event loop."""

    def __init__(self, stream: trio.SocketStream) -> None:
        """Take the socket out of a stream, which must not be used any more."""
        self._socket = socket.socket(fileno=stream.socket.detach())
        self._socket.setblocking(False)
        self._buffer = memoryview(bytearray(CHUNK))

    async def receive(self) -> Data:
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._buffer[: self._socket.recv_into(self._buffer)]
            except (BlockingIOError, InterruptedError):
                continue

    async def send(self, data: Data) -> None:
        rest = memoryview(data)
        while rest := rest[self.send_now(rest) :]:
            await trio.lowlevel.wait_writable(self._socket)

    def send_now(self, data: Data) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0

    async def aclose(self) -> None:
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()


class TlsLink:
    """A stream with TLS. Nothing can be sent to it without a task."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream]) -> None:
        self._stream = stream

    async def receive(self) -> Data:
        return bytes(await self._stream.receive_some(CHUNK))

    async def send(self, data: Data) -> None:
        await self._stream.send_all(data)

    def send_now(self, data: Data) -> int:
        return 0

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._stream)
