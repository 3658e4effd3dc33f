"""Tasks that run handlers."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import trio


class AsyncHandlerWork(Protocol):
    """Somebody who has messages to handle."""

    async def work(self) -> bool:
        """Handle some of them; False if there are none."""

    async def speak(self) -> None:
        """Say what must be said before anybody else's handlers start."""

    def fail(self, error: Exception) -> None:
        """One of these has raised, which they should not."""


class AsyncHandlerPool:
    """At most so many tasks at a time, shared fairly by those who have work; none while there is none.

    They are system tasks, as that of the link is, so that a client needs no nursery.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._running = 0
        self._queue: deque[AsyncHandlerWork] = deque()

    def call(self, work: AsyncHandlerWork, hands: int) -> None:
        """There is work for up to so many tasks. Does not block."""
        for _ in range(min(hands, self._size)):
            self._queue.append(work)
            if self._running < self._size:
                self._running += 1
                trio.lowlevel.spawn_system_task(self._run)

    async def _run(self) -> None:
        try:
            while self._queue:
                await self._serve(self._queue.popleft())
        finally:
            self._running -= 1

    async def _serve(self, work: AsyncHandlerWork) -> None:
        try:
            while await work.work():
                if self._queue:
                    await work.speak()
                    self._queue.append(work)
                    return
        except Exception as error:  # it would end the whole program
            work.fail(error)
