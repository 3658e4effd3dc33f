"""The tasks that a client runs beside those of its caller. qb.clients.blocking.background is the same with threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio


class AsyncBackground:
    """Starts tasks."""

    def start(self, name: str, function: Callable[..., Awaitable[Any]], *arguments: Any, finish: bool = False) -> None:
        """Run an async function in a task of its own. `finish` is for threads: tasks end before their run does."""
        trio.lowlevel.spawn_system_task(function, *arguments, name=name)

    async def join(self) -> None:
        """Return when all of them have ended."""
