"""What peers have been sent and have not read: one budget for all of them.

From half of it on, nothing is delivered to a peer that has unread bytes. A fetch waits until its answer fits. While
there is no room, peers that have read nothing for a while are dropped: those that mean well read on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from typing import Protocol

import trio

from qb.storage.signals import Signal

PATIENCE = 2.0  # seconds in which a peer must read something while there is no room
SMALL = 1 << 20  # bytes of an ordinary fetch: the last quarter is for these, so that large ones do not hold them up


class SlowPeer(Protocol):
    """A peer with unread bytes."""

    def give_up(self, why: str) -> None:
        """Drop the peer, and let go of its bytes at once: `unqueue` is called with all of them."""


class OutputBudget:
    """The bytes that wait for all peers to read them, and those that are being read from disk for them."""

    def __init__(self, limit: float = inf) -> None:
        self._limit = limit
        self._slow: dict[SlowPeer, float] = {}  # since when it has read nothing; the longest time comes first
        self._released = Signal()
        self._reserved = 0
        self.queued = 0

    @property
    def is_tight(self) -> bool:
        """Is so much unread that peers which do not read should be given nothing more?"""
        return self.queued > self._limit / 2

    def queue(self, peer: SlowPeer, size: int) -> None:
        """More bytes wait for a peer. May drop other peers."""
        self.queued += size
        now = trio.current_time()
        self._slow.setdefault(peer, now)
        if self.queued > self._limit:
            self._drop_stalled(now)

    def unqueue(self, peer: SlowPeer, size: int, *, all_of_it: bool) -> None:
        """A peer has read some of its bytes, or all of them."""
        self.queued -= size
        self._slow.pop(peer, None)
        if not all_of_it:
            self._slow[peer] = trio.current_time()
        self._released.set()

    @asynccontextmanager
    async def reserved(self, size: int) -> AsyncIterator[None]:
        """Wait until there is room to read so many bytes from disk for a peer."""
        limit = self._limit if size <= SMALL else self._limit * 3 / 4
        while self._reserved + self.queued and self._reserved + self.queued + size > limit:
            with trio.move_on_after(PATIENCE / 4):
                await self._released.wait()
            self._drop_stalled(trio.current_time())
        self._reserved += size
        try:
            yield
        finally:
            self._reserved -= size
            self._released.set()

    def _drop_stalled(self, now: float) -> None:
        for peer, since in list(self._slow.items()):
            if now - since <= PATIENCE:
                return
            limit = f"the limit is {self._limit:.0f} (QB_MAX_UNREAD_BYTES)"
            peer.give_up(f"has read nothing for {PATIENCE:g} s, while all peers have much to read: {limit}")
