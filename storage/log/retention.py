"""Which closed segments a partition may drop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

HOUR_MS = 3_600_000


class ClosedSegment(NamedTuple):
    """What retention asks of a closed segment."""

    size: int
    last_ms: int  # when its newest record was appended


def droppable(closed: Sequence[ClosedSegment], active_size: int, now_ms: int, hours: float, limit: int) -> int:
    """Return how many of the oldest closed segments go: too old, or part of too large a partition; 0 is no limit."""
    total = active_size + sum([segment.size for segment in closed])
    for count, segment in enumerate(closed):
        too_old = hours > 0 and now_ms - segment.last_ms > hours * HOUR_MS
        too_large = 0 < limit < total
        if not (too_old or too_large):
            return count
        total -= segment.size
    return len(closed)
