"""A reusable wake-up signal; free when there are no waiters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

# An awaitable that the caller must await before calling again.
Wait = Callable[[], Awaitable[None]]


class Signal:
    """Something that happens again and again. Look at the state first, then wait for the next time."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: trio.Event | None = None

    def set(self) -> None:
        """Wake all that wait now."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Return when set() is called the next time."""
        if self._event is None:
            self._event = trio.Event()
        await self._event.wait()
