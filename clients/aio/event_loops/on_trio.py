"""Waiting, reading and writing under trio."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import trio

from qb.core.wire.addresses import BrokerAddress
from qb.core.wire.frames import Frames

RECEIVE_SIZE = 64 * 1024


class TrioWaiter:
    """A wake-up for one task."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def wake(self) -> None:
        self._event.set()

    async def wait(self, seconds: float) -> bool:
        with trio.move_on_after(max(seconds, 0)):
            await self._event.wait()
        return self._event.is_set()


class TrioStream:
    """A trio.SocketStream, with TLS on it or without."""

    def __init__(self, stream: trio.SocketStream, secure: trio.SSLStream[trio.SocketStream] | None = None) -> None:
        self._stream = stream
        self._bytes: trio.SSLStream[trio.SocketStream] | trio.SocketStream = secure or stream

    async def receive(self, seconds: float) -> bytes | None:
        with trio.move_on_after(seconds):
            try:
                return bytes(await self._bytes.receive_some(RECEIVE_SIZE))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionError(str(error)) from error
        return None

    async def send(self, data: Frames, seconds: float) -> bool:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + seconds):
            try:
                await self._bytes.send_all(data)
                return True
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        return False

    def hang_up(self) -> None:
        try:
            self._stream.socket.shutdown(socket.SHUT_RDWR)
        except (OSError, trio.ClosedResourceError):
            pass

    def close(self) -> None:
        self._stream.socket.close()

    def let_go(self) -> None:
        os.close(self._stream.socket.detach())


class TrioHandle:
    """A trio run."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()

    def runs_here(self) -> bool:
        return trio.lowlevel.in_trio_task() and trio.lowlevel.current_trio_token() is self._token

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        try:
            self._token.run_sync_soon(function, *arguments)
        except trio.RunFinishedError:
            pass


class TrioLoop:
    """A trio run, to the task that it runs."""

    waiter, handle = TrioWaiter, TrioHandle
    now = staticmethod(trio.current_time)

    context = staticmethod(copy_context)

    def is_cancelling(self) -> bool:
        return True  # trio.Cancelled has no other source

    async def notice_cancellation(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()

    async def give_way(self) -> None:
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def connect(self, address: BrokerAddress, context: ssl.SSLContext | None) -> TrioStream:
        stream = await trio.open_tcp_stream(address.host, address.port)
        if context is None:
            return TrioStream(stream)
        secure = trio.SSLStream(stream, context, server_hostname=address.host, https_compatible=True)
        try:
            await secure.do_handshake()
        except trio.BrokenResourceError as error:
            stream.socket.close()
            raise (error.__cause__ if isinstance(error.__cause__, OSError) else EOFError()) from None
        return TrioStream(stream, secure)
