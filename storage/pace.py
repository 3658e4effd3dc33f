"""storage.pace: has the disk been quick lately?

May import: the standard library.
Never: trio, files.
"""

from __future__ import annotations

QUICK = 0.001  # seconds: a sync that takes less is not worth a change of threads
WEIGHT = 0.1  # of the newest sync in the average
UNKNOWN = 0.01  # seconds that we expect of a disk that we have not seen at work


class Pace:
    """How long a sync has taken lately, on average. After a stall it takes many quick syncs to be trusted again."""

    def __init__(self) -> None:
        self._seconds = UNKNOWN

    def note(self, sync_seconds: float) -> None:
        """A sync took so long."""
        self._seconds += (sync_seconds - self._seconds) * WEIGHT

    @property
    def is_quick(self) -> bool:
        """Would a change of threads probably cost more than the sync itself?"""
        return self._seconds < QUICK
