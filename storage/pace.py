"""storage.pace: has the disk been quick lately?

May import: the standard library.
Never: trio, files.
"""

from __future__ import annotations

QUICK = 0.001  # seconds: a sync that takes less is not worth a change of threads
STALL = 0.1  # seconds: one that takes as long is noticed by everybody, and may be the first of many
WEIGHT = 0.1  # of the newest sync in the share of the slow ones


class Pace:
    """How many syncs have lately been slow. A disk that we have not seen at work, or that has just stalled, is slow.

    Their share, not the average: a busy disk does most syncs at once, and now and then one that takes a hundred times.
    """

    def __init__(self) -> None:
        self._slow = 1.0

    def note(self, sync_seconds: float) -> None:
        """A sync took so long."""
        if sync_seconds >= STALL:
            self._slow = 1.0
        else:
            self._slow += ((sync_seconds >= QUICK) - self._slow) * WEIGHT

    @property
    def is_quick(self) -> bool:
        """Would a change of threads probably cost more than the sync itself?"""
        return self._slow < 0.5
