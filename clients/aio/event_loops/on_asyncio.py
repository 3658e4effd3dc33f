"""Waiting, reading and writing under asyncio and loops of its kind."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from math import inf
from typing import Any, cast

from qb.core.wire.addresses import BrokerAddress
from qb.core.wire.frames import Frames

LINGER = 1.0  # seconds that a closed connection has to send what it holds
RECEIVE_SIZE = 64 * 1024  # more at once would be handled, and acked, too late for the broker to go on pushing
MOST_UNREAD = 256 * 1024  # bytes that were received and not taken; then TCP slows the broker down


class AsyncioWaiter:
    """A wake-up for one task."""

    __slots__ = ("_future", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[bool] = self._loop.create_future()

    def wake(self) -> None:
        if not self._future.done():
            self._future.set_result(True)

    async def wait(self, seconds: float) -> bool:
        if seconds == inf or self._future.done():
            return await self._future
        timer = self._loop.call_later(max(seconds, 0), self._expire)
        try:
            return await self._future
        finally:
            timer.cancel()

    def _expire(self) -> None:
        if not self._future.done():
            self._future.set_result(False)


class AsyncioStream(asyncio.BufferedProtocol):
    """A transport, read by one task."""

    _transport: asyncio.Transport

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = memoryview(bytearray(RECEIVE_SIZE))
        self._received: list[bytes] = []
        self._unread = 0
        self._full = False  # more is held here than the transport should bring
        self._blocked = False  # more is held by the transport than it should be given
        self._error: Exception | None = None
        self._ended = False
        self.early: Callable[[bytes], bytes] | None = None
        self._heard_at = 0.0  # when `early` has taken all that came
        self._reader: AsyncioWaiter | None = None
        self._writers: list[AsyncioWaiter] = []

    # What the transport does

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no class that mypy knows

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._buffer[:nbytes])
        if self.early is not None and not self._received and not (data := self.early(data)):
            self._heard_at = time.monotonic()
            return
        self._received.append(data)
        self._unread += len(data)
        if self._unread > MOST_UNREAD and not self._full:
            self._full = True
            self._transport.pause_reading()
        if self._reader is not None:
            self._reader.wake()

    def eof_received(self) -> None:
        self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error)

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        self._wake_writers()

    def _end(self, error: Exception | None) -> None:
        self._ended, self._error = True, self._error or error
        if self._reader is not None:
            self._reader.wake()
        self._wake_writers()

    def _wake_writers(self) -> None:
        writers, self._writers = self._writers, []
        for waiter in writers:
            waiter.wake()

    # What the client does

    async def receive(self, seconds: float) -> bytes | None:
        left = seconds
        while not self._received and not self._ended:
            self._reader = AsyncioWaiter()
            try:
                if not await self._reader.wait(left):
                    left = self._heard_at + seconds - time.monotonic()
                    if left <= 0:
                        return None
            finally:
                self._reader = None
        return self._take()

    def _take(self) -> bytes:
        if not self._received and self._error is not None:
            raise self._error
        parts, self._received, self._unread = self._received, [], 0
        if self._full and not self._ended:
            self._full = False
            self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def send(self, data: Frames, seconds: float) -> bool:
        if self._ended or self._transport.is_closing():
            return False
        self._transport.write(data)
        if self._blocked:
            waiter = AsyncioWaiter()
            self._writers.append(waiter)
            if not await waiter.wait(seconds):
                return False
        return not self._ended

    def hang_up(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        if self._transport.get_extra_info("ssl_object") is not None and not self._transport.get_write_buffer_size():
            self._transport.abort()  # close() would wait for the broker's goodbye, and outlive the event loop
            return
        self._transport.close()
        if self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(LINGER, self._transport.abort)

    def let_go(self) -> None:
        os.close(self._socket.detach())


class AsyncioHandle:
    """A loop of asyncio's kind."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def runs_here(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        if not self._loop.is_closed():
            try:
                self._loop.call_soon_threadsafe(function, *arguments)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise


class AsyncioLoop:
    """A loop of asyncio's kind, to the task that it runs."""

    waiter, handle = AsyncioWaiter, AsyncioHandle
    now = staticmethod(time.monotonic)

    def context(self) -> Context:
        context = copy_context()
        if (sniffio := sys.modules.get("sniffio")) is not None:  # asked by anyio, and in a callback it would not know
            context.run(sniffio.current_async_library_cvar.set, "asyncio")
        return context

    def is_cancelling(self) -> bool:
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0

    async def notice_cancellation(self) -> None:
        """Cancellations of asyncio come with the next wait: what is unanswered is bounded, so that one does come."""

    async def give_way(self) -> None:
        await asyncio.sleep(0)

    async def connect(self, address: BrokerAddress, context: ssl.SSLContext | None) -> AsyncioStream:
        connected = await _connect(address.host, address.port)
        name = None if context is None else address.host
        _, stream = await asyncio.get_running_loop().create_connection(
            lambda: AsyncioStream(connected), sock=connected, ssl=context, server_hostname=name
        )
        return stream


async def _connect(host: str, port: int) -> socket.socket:
    """Return a socket of ours: only that can be let go in a child of fork(). Tries every address of the host.

    uvloop looks up hosts and connects sockets with the threads of libuv. A child of a process that has used those ends
    by a segmentation fault when it exits, so none of the methods that use them is called.
    """
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await _look_up(host, port):
        wanted = socket.socket(family, kind, protocol)
        try:
            wanted.setblocking(False)
            wanted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await _reach(wanted, address)
            return wanted
        except OSError as error:
            wanted.close()
            failure = error
        except BaseException:
            wanted.close()
            raise
    raise failure


async def _look_up(host: str, port: int) -> list[Any]:
    """Return the addresses of a host, as socket.getaddrinfo() does."""
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        return look_up(flags=socket.AI_NUMERICHOST)  # an address: no look-up
    except socket.gaierror:
        return await asyncio.to_thread(look_up)


async def _reach(wanted: socket.socket, address: Any) -> None:
    """Connect a socket. Raises OSError."""
    if (code := wanted.connect_ex(address)) == errno.EINPROGRESS:
        loop, waiter = asyncio.get_running_loop(), AsyncioWaiter()
        loop.add_writer(wanted, waiter.wake)
        try:
            await waiter.wait(inf)
        finally:
            loop.remove_writer(wanted)
        code = wanted.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))  # of the class that belongs to the code
