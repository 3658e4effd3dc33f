"""The event loop that runs the caller, and what a client uses of it."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Callable
from contextvars import Context
from functools import cache
from typing import Any, Protocol

from qb.clients.aio.event_loops import on_asyncio
from qb.core.wire.addresses import BrokerAddress
from qb.core.wire.frames import Frames


class Waiter(Protocol):
    """One task that waits for one wake-up. Made by the task that will wait."""

    def wake(self) -> None:
        """Wake the task, at once or when it begins to wait. Called where the task's event loop runs."""

    async def wait(self, seconds: float) -> bool:
        """Return True when woken, False after so many seconds. Can be cancelled."""


class Stream(Protocol):
    """A TCP connection.

    Where bytes come in a callback of the event loop, it may give them to `early` first, which returns those that are
    left for receive(): what takes no task is spared a turn of the event loop.
    """

    early: Callable[[bytes], bytes] | None

    async def receive(self, seconds: float) -> bytes | None:
        """Return what has come, b"" at the end, None if nothing comes for so many seconds. Raises OSError."""

    async def send(self, data: Frames, seconds: float) -> bool:
        """Send all of it, also if the caller is cancelled meanwhile.

        Returns False if the connection is gone, or takes no more for so many seconds.
        """

    def hang_up(self) -> None:
        """Make every task that uses the stream notice that it is over."""

    def close(self) -> None:
        """Close it, at once."""

    def let_go(self) -> None:
        """In a child of fork(): close the descriptor without a word to the event loop, which is the parent's."""


class LoopHandle(Protocol):
    """One event loop, as seen from anywhere."""

    def runs_here(self) -> bool:
        """Is the caller in one of its tasks?"""

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the event loop, from any thread; never if the loop is over."""


class EventLoop(Protocol):
    """What a client uses of an event loop, beside anyio."""

    def now(self) -> float:
        """Return seconds on a clock that never goes back."""

    def waiter(self) -> Waiter:
        """Return what the calling task can wait with."""

    def handle(self) -> LoopHandle:
        """Return the loop that runs the caller."""

    def context(self) -> Context:
        """Return a copy of the caller's context variables, in which tasks can be started from callbacks too."""

    def is_cancelling(self) -> bool:
        """Is the calling task, in which a cancellation was raised, being cancelled? Else it only met one."""

    async def notice_cancellation(self) -> None:
        """Raise if the caller is cancelled, where it might go on for long without waiting for anything."""

    async def give_way(self) -> None:
        """Let every other task that can run do so once. A cancellation may raise or wait."""

    async def connect(self, address: BrokerAddress, context: ssl.SSLContext | None) -> Stream:
        """Return a connection, encrypted if there is a context. Raises OSError."""


def running_loop() -> EventLoop:
    """Return the event loop that runs the caller."""
    in_trio_task = getattr(sys.modules.get("trio.lowlevel"), "in_trio_task", None)
    return _trio() if in_trio_task is not None and in_trio_task() else _ASYNCIO


_ASYNCIO: EventLoop = on_asyncio.AsyncioLoop()


@cache
def _trio() -> EventLoop:
    from qb.clients.aio.event_loops.on_trio import TrioLoop  # not loaded by a program that runs asyncio

    return TrioLoop()
