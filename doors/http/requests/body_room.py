"""Room for the bodies that are being handled: so many bytes for all requests together."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class BodyRoom:
    """Lets bodies in, one after another, while all of them together stay within a limit.

    A body that is larger than the limit gets in alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: deque[tuple[int, trio.Event]] = deque()

    @asynccontextmanager
    async def of(self, size: int) -> AsyncIterator[None]:
        """Wait for room of so many bytes, and keep it while the context is open."""
        await self._enter(size)
        try:
            yield
        finally:
            self._taken -= size
            self._let_in()

    async def _enter(self, size: int) -> None:
        if not self._waiting and self._has_room(size):
            self._taken += size
            return
        mine = size, trio.Event()
        self._waiting.append(mine)
        try:
            await mine[1].wait()
        except BaseException:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:
                self._taken -= size
            self._let_in()
            raise

    def _has_room(self, size: int) -> bool:
        return not self._taken or self._taken + size <= self._limit

    def _let_in(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            size, entered = self._waiting.popleft()
            self._taken += size
            entered.set()
