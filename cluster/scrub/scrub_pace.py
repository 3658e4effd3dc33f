"""How long to pause so that proving takes no more than it may."""

from __future__ import annotations

SHARE = 0.5  # of the time, at most, that work without a rate takes
LONGEST = 60.0  # seconds


class ScrubPace:
    """So many bytes a second; without a rate, half of the time."""

    def __init__(self, rate: int = 0) -> None:
        """`rate`: bytes a second, or 0."""
        self._rate = rate

    def pause(self, size: int, took: float) -> float:
        """Return for how many seconds to pause after work on so many bytes that took so long."""
        least = took * (1 - SHARE) / SHARE
        return min(LONGEST, max(0.0, size / self._rate - took) if self._rate else least)
