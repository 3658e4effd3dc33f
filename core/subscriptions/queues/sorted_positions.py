"""Messages by partition and offset, in order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

MessagePosition = tuple[int, int]  # partition, offset


class SortedPositions:
    """A sorted set of positions. A lookup bisects; an addition or removal moves what lies behind it in one go."""

    __slots__ = ("_positions",)

    def __init__(self) -> None:
        self._positions: list[MessagePosition] = []

    def __bool__(self) -> bool:
        return bool(self._positions)

    def add(self, position: MessagePosition) -> None:
        """Add a position; one that is there is no error."""
        if not self._positions or self._positions[-1] < position:
            self._positions.append(position)
        elif self._positions[bisect_left(self._positions, position)] != position:
            insort(self._positions, position)

    def discard(self, position: MessagePosition) -> None:
        """Remove a position; one that is not there is no error."""
        at = bisect_left(self._positions, position)
        if at < len(self._positions) and self._positions[at] == position:
            del self._positions[at]

    def has_any(self, partition: int) -> bool:
        """Return whether there are positions of this partition."""
        at = bisect_left(self._positions, (partition, 0))
        return at < len(self._positions) and self._positions[at][0] == partition

    def first_before(self, position: MessagePosition) -> MessagePosition | None:
        """Return the first position of its partition, if that lies before it."""
        at = bisect_left(self._positions, (position[0], 0))
        return self._positions[at] if at < len(self._positions) and self._positions[at] < position else None

    def behind(self, position: MessagePosition) -> Iterator[MessagePosition]:
        """Return the positions of its partition that lie behind it, as they are now."""
        end = bisect_left(self._positions, (position[0] + 1, 0))
        return iter(self._positions[bisect_right(self._positions, position) : end])
