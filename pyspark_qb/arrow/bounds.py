"""A span of whole numbers, of offsets or of times."""

from __future__ import annotations

from typing import NamedTuple

LEAST, MOST = -(2**63), 2**63 - 1


class Bounds(NamedTuple):
    """Numbers from `first` up to, not including, `end`."""

    first: int = LEAST
    end: int = MOST

    def within(self, first: int = LEAST, end: int = MOST) -> Bounds:
        """Return what is in both."""
        return Bounds(max(self.first, first), min(self.end, end))
