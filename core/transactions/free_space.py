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

    @property
    def is_plenty(self) -> bool:
        """Was there plenty of room within the last second?"""
        return self._bytes >= PLENTY and trio.current_time() <= self._at + AGAIN

    @property
    def bytes(self) -> int:
        """What the last look found."""
        return self._bytes

    async def look(self) -> None:
        """Make `bytes` known, unless there is plenty. Raises DiskFull, Internal."""
        if not self.is_plenty:
            self._bytes, self._at = await self._engine.free_bytes(), trio.current_time()
