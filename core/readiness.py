"""core.readiness: which peers have something to say: one look at all of them, in one step of the event loop.

May import: trio, the standard library.
Never: anything else of ours.

A task that waits for one socket costs trio a change of its registration and a change of tasks for each request. Here
sockets stay registered, and whoever can be read is called in turn. Where there is no epoll, each waits for itself.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Protocol

import trio

RECEIVE_BYTES = 524_288
AVAILABLE = hasattr(select, "epoll")
AT_ONCE = 256  # sockets that are read in one step; then others have their turn
# Seconds in which somebody who publishes one at a time may be expected to come again. After one who did, we do not fall
# asleep at once: to be woken takes about as long as all of our own work on a lone publish.
AWAKE = 0.0005
LOOKS = 32  # for them while we are awake, between two turns of others: together they take about as long as a turn


class Step(Protocol):
    """What has become of one step."""

    at_once: bool  # was something short made durable at its end?


def _apart(only_one: bool) -> AbstractContextManager[None]:
    return nullcontext()


class Readiness:
    """Sockets, and what to call when one can be read. All methods belong to the event loop."""

    def __init__(self, together: Callable[[bool], AbstractContextManager[Step | None]] = _apart) -> None:
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
            answered = 0.0  # when a lone publish was answered last
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                ready: Sequence[tuple[int, int]] = self._epoll.poll(0, AT_ONCE)
                near = perf_counter() - answered < AWAKE
                while self._call(ready):
                    answered = perf_counter()
                    if not near or not (ready := await self._next_before(answered + AWAKE)):
                        break

    def _call(self, ready: Sequence[tuple[int, int]]) -> bool:
        """Call those who are ready, in one step; returns whether that was a lone publish, and is done."""
        with self._together(len(ready) == 1) as step:
            for number, _ in ready:
                if readable := self._callbacks.get(number):  # one before it may have ended it
                    readable()
        return step is not None and step.at_once

    async def _next_before(self, deadline: float) -> Sequence[tuple[int, int]]:
        """Stay awake until somebody is ready; others have their turn meanwhile."""
        poll = self._epoll.poll
        while perf_counter() < deadline:
            await trio.lowlevel.checkpoint()
            for _ in range(LOOKS):
                if ready := poll(0, AT_ONCE):
                    return ready
        return ()
