"""Tasks that run handlers."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import anyio.lowlevel

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.waiting import checkpoint


class AsyncHandlerWork(Protocol):
    """A subscriber that has messages to handle."""

    async def work(self) -> bool:
        """Handle some of them; False if there are none."""

    async def send_urgent(self) -> None:
        """Send what the broker must know before handlers of other subscribers start."""


class AsyncMessageSink(Protocol):
    """Is notified when a subscriber has messages."""

    def call(self, work: AsyncHandlerWork, workers: int) -> None:
        """There is work for up to so many tasks. Does not block."""

    def stop(self) -> None:
        """There will be none any more."""


class AsyncHandlerPool:
    """At most so many tasks at a time, shared fairly by the subscribers that have work; none while there is none.

    What a handler raises is the subscriber's business; what the work itself raises is a fault of ours, which reaches
    the caller through the task group.
    """

    def __init__(self, size: int, name: str, background: AsyncBackground) -> None:
        self._size, self._name, self._background = size, name, background
        self._running = 0
        self._queue: deque[AsyncHandlerWork] = deque()

    def call(self, work: AsyncHandlerWork, workers: int) -> None:
        """There is work for up to so many tasks. Does not block."""
        for _ in range(min(workers, self._size)):
            self._queue.append(work)
            if self._running < self._size:
                self._running += 1
                self._background.start(self._name, self._run)

    def stop(self) -> None:
        """There is no more work of one subscriber: nothing to do, a task that finds none ends."""

    def dismiss(self) -> None:
        """The pool is needed no more: nothing to do either."""

    async def _run(self) -> None:
        try:
            while self._queue:
                await self._serve(self._queue.popleft())
        finally:
            self._running -= 1

    async def _serve(self, work: AsyncHandlerWork) -> None:
        await anyio.lowlevel.checkpoint_if_cancelled()  # no handler starts in a client that is cancelled
        while await work.work():
            await checkpoint()  # handlers that never wait must not keep the other tasks from their work
            if self._queue:
                await work.send_urgent()
                self._queue.append(work)
                return
