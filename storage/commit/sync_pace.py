"""May a sync block the event loop? Has the disk been quick lately, and is only one peer being served?"""

from __future__ import annotations

QUICK = 0.002  # seconds: if syncs take less, on the average, they are not worth a change of threads
SLOW = 0.01  # seconds: as long as this counts a sync that took longer: one outlier says little of the next sync
STALL = 0.1  # seconds: but one that takes as long delays all peers, and may be the first of many
WEIGHT = 0.1  # of the newest sync in the average


class SyncPace:
    """How long syncs have lately taken. A disk that we have not seen at work, or that has just stalled, is slow."""

    def __init__(self) -> None:
        self._seconds = SLOW
        self.is_shared = False  # are other peers being served beside the one that has just spoken?

    def note(self, sync_seconds: float) -> None:
        """A sync took so long."""
        if sync_seconds >= STALL:
            self._seconds = SLOW
        else:
            self._seconds += (min(sync_seconds, SLOW) - self._seconds) * WEIGHT

    @property
    def is_quick(self) -> bool:
        """Would a change of threads probably cost more than it is good for?"""
        return self._seconds < QUICK

    @property
    def may_hold_loop(self) -> bool:
        """May a short sync run in the event loop? Then no other peer is served, and a thread would take longer."""
        return self.is_quick and not self.is_shared
