"""Waiting, reading and writing under trio."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from contextvars import copy_context
from math import inf
from typing import Any

import trio

from qb.core.wire.addresses import BrokerAddress
from qb.core.wire.frames import Frames

RECEIVE_SIZE = 64 * 1024


class TrioWaiter:
    """A wake-up for one task."""

    __slots__ = ("_task", "_woken")

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None  # while it waits
        self._woken = False

    def wake(self) -> None:
        self._woken = True
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)

    async def wait(self, seconds: float) -> bool:
        if self._woken:
            return True
        self._task = trio.lowlevel.current_task()
        if seconds == inf:
            await trio.lowlevel.wait_task_rescheduled(self._abort)
        else:
            with trio.CancelScope(deadline=trio.current_time() + max(seconds, 0)):
                await trio.lowlevel.wait_task_rescheduled(self._abort)
        return self._woken

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


def taken_from(stream: trio.SocketStream) -> socket.socket:
    """Return the socket of a stream, which is not to be used any more. It does not block."""
    sock = socket.socket(fileno=stream.socket.detach())
    sock.setblocking(False)
    return sock


class TrioStream:
    """A socket of ours. One of trio's own would give way at every send: tasks would wait for each other's."""

    early: Callable[[bytes], bytes] | None = None  # not used: trio has no callbacks

    def __init__(self, sock: socket.socket) -> None:
        """Use a socket that does not block."""
        self._socket = sock

    async def receive(self, seconds: float) -> bytes | None:
        with trio.CancelScope(deadline=trio.current_time() + seconds):
            while True:
                try:
                    await trio.lowlevel.wait_readable(self._socket)
                    return self._socket.recv(RECEIVE_SIZE)
                except trio.ClosedResourceError as error:
                    raise ConnectionError(str(error)) from error
                except BlockingIOError:
                    pass
        return None

    async def send(self, data: Frames, seconds: float) -> bool:
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return False
        return sent == len(data) or await self._send_rest(memoryview(data)[sent:], seconds)

    async def _send_rest(self, data: memoryview, seconds: float) -> bool:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + seconds):
            while data:
                try:
                    await trio.lowlevel.wait_writable(self._socket)
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    pass
                except (OSError, trio.ClosedResourceError):
                    return False
        return not data

    def hang_up(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    def let_go(self) -> None:
        os.close(self._socket.detach())


class TrioSecureStream:
    """A trio.SocketStream with TLS on it."""

    early: Callable[[bytes], bytes] | None = None  # not used, as above

    def __init__(self, stream: trio.SocketStream, secure: trio.SSLStream[trio.SocketStream]) -> None:
        self._stream, self._secure = stream, secure

    async def receive(self, seconds: float) -> bytes | None:
        with trio.move_on_after(seconds):
            try:
                return bytes(await self._secure.receive_some(RECEIVE_SIZE))
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionError(str(error)) from error
        return None

    async def send(self, data: Frames, seconds: float) -> bool:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + seconds):
            try:
                await self._secure.send_all(data)
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

    async def connect(self, address: BrokerAddress, context: ssl.SSLContext | None) -> TrioStream | TrioSecureStream:
        stream = await trio.open_tcp_stream(address.host, address.port)
        if context is None:
            return TrioStream(taken_from(stream))
        secure = trio.SSLStream(stream, context, server_hostname=address.host, https_compatible=True)
        try:
            await secure.do_handshake()
        except trio.BrokenResourceError as error:
            stream.socket.close()
            raise (error.__cause__ if isinstance(error.__cause__, OSError) else EOFError()) from None
        return TrioSecureStream(stream, secure)
