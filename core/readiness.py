"""core.readiness: which peers have something to say: one look at all of them, in one step of the event loop.

May import: trio, the standard library.
Never: anything else of ours.

A task that waits for one socket costs trio a change of its registration and a change of tasks for each request. Here
sockets stay registered, and whoever can be read is called in turn. Where there is no epoll, each waits for itself.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import trio

RECEIVE_BYTES = 524_288
AVAILABLE = hasattr(select, "epoll")
AT_ONCE = 256  # sockets that are read in one step; then others have their turn


class Readiness:
    """Sockets, and what to call when one can be read. All methods belong to the event loop."""

    def __init__(self, together: Callable[[bool], AbstractContextManager[object]] = nullcontext) -> None:
        """`together` is entered around the calls of one step; it is told whether that is only one."""
        self._epoll = select.epoll()
        self._together = together
        self._callbacks: dict[int, Callable[[], None]] = {}
        self.buffer = memoryview(bytearray(RECEIVE_BYTES))  # for whoever is called, until it returns

    def add(self, sock: socket.socket, readable: Callable[[], None]) -> None:
        """Call `readable`, which must not raise, whenever the socket can be read or has ended."""
        self._callbacks[sock.fileno()] = readable
        self._epoll.register(sock, select.EPOLLIN | select.EPOLLRDHUP)

    def remove(self, sock: socket.socket) -> None:
        """Call it no more; one that is not there is no error."""
        if self._callbacks.pop(sock.fileno(), None) is not None and not self._epoll.closed:
            self._epoll.unregister(sock)

    async def run(self) -> None:
        """Call whoever can be read, until cancelled; then nothing can be added any more."""
        with self._epoll:
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                ready = self._epoll.poll(0, AT_ONCE)
                with self._together(len(ready) == 1):
                    for number, _ in ready:
                        if readable := self._callbacks.get(number):  # one before it may have ended it
                            readable()
