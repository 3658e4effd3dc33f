"""How much room the disk has, looked at no more often than it may have changed much."""

from __future__ import annotations

import trio

from qb.storage.engine import Engine

AGAIN = 1.0  # seconds for which plenty of room is believed
PLENTY = 4 * 2**30  # bytes; below it, every transaction looks again


class FreeSpace:
    """The free bytes of the data directory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._bytes, self._at = 0, 0.0

    async def look(self) -> int:
        """Return how many bytes are free. Raises DiskFull, Internal."""
        if self._bytes < PLENTY or trio.current_time() > self._at + AGAIN:
            self._bytes, self._at = await self._engine.free_bytes(), trio.current_time()
        return self._bytes
