"""The bytes of one connection: a plain socket, to which something can be sent at once, or a stream with TLS."""

from __future__ import annotations

import socket
from typing import Protocol

import trio

CHUNK = 1 << 18  # bytes that are received at a time
MOST_AWAITED = 1 << 20  # bytes for which a receive waits, if they are known to come
Data = bytes | bytearray | memoryview


class NatsLink(Protocol):
    """Where the bytes of a conversation go. One task receives, and another one sends."""

    async def receive(self, rest: memoryview) -> tuple[int, Data]:
        """Receive more, where `rest` is the place of bytes that will come next.

        Returns how much of it was filled, and what else has come, to be used before the next call; 0 and nothing: the
        server has closed. Raises OSError.
        """

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
        self._awaited = 1

    async def receive(self, rest: memoryview) -> tuple[int, Data]:
        self._wake_from(len(rest))
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                count = self._socket.recvmsg_into((rest, self._buffer))[0]
            except (BlockingIOError, InterruptedError):
                continue
            return min(count, len(rest)), self._buffer[: max(0, count - len(rest))]

    def _wake_from(self, count: int) -> None:
        """Do not wake the event loop for less: it would only wait again."""
        awaited = min(max(count, 1), MOST_AWAITED)
        if awaited != self._awaited:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, awaited)
            self._awaited = awaited

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

    async def receive(self, rest: memoryview) -> tuple[int, Data]:
        return 0, bytes(await self._stream.receive_some(CHUNK))

    async def send(self, data: Data) -> None:
        await self._stream.send_all(data)

    def send_now(self, data: Data) -> int:
        return 0

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._stream)
