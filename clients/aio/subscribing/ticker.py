"""A task that looks after things every now and then."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.waiting import now


class AsyncTicker:
    """Calls `look`, which returns after how many seconds it must be called again; None: after the next wake()."""

    def __init__(self, look: Callable[[float], Awaitable[float | None]], background: AsyncBackground) -> None:
        self._look, self._background = look, background
        self._scope: anyio.CancelScope | None = None  # while the task runs
        self._woken = self._stopped = False

    def wake(self) -> None:
        """There is something new to look at; costs next to nothing while the ticker is up anyway."""
        self._woken = True
        if self._scope is None and not self._stopped:
            self._scope = anyio.CancelScope()
            self._background.start("qb ticker", self._run, self._scope)

    def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()

    async def _run(self, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                while self._woken:
                    self._woken = False  # before the look: what comes meanwhile is looked at too
                    pause = await self._look(now())
                    while pause is not None:
                        await anyio.sleep(pause)
                        pause = await self._look(now())
        finally:
            self._scope = None
