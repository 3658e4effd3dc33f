"""Messages by partition and offset, in order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import msgspec

MessagePosition = tuple[int, int]  # partition, offset

_SLACK = 64  # positions taken off the front before the list is moved up


class SortedPositions(msgspec.Struct, eq=False, gc=False):
    """A sorted set of positions. A lookup bisects.

    Adding at the end and removing at the front cost the same however many there are: messages are mostly settled in
    their order. Elsewhere an addition or a removal moves what lies behind it in one go. There may be many sets of one
    position, so neither is a list then: the garbage collector walks every list.
    """

    _positions: list[MessagePosition] | tuple[MessagePosition, ...] = ()  # a list if there has been more than one
    _first: int = 0  # those before this index were removed

    def __len__(self) -> int:
        return len(self._positions) - self._first

    def add(self, position: MessagePosition) -> None:
        """Add a position; one that is there is no error."""
        positions = self._positions
        if not positions:
            self._positions = (position,)
            return
        if isinstance(positions, tuple):
            if positions == (position,):
                return
            positions = self._positions = list(positions)
        if len(positions) == self._first or positions[-1] < position:
            positions.append(position)
        elif positions[bisect_left(positions, position, self._first)] != position:
            insort(positions, position, self._first)

    def discard(self, position: MessagePosition) -> None:
        """Remove a position; one that is not there is no error."""
        positions, first = self._positions, self._first
        if isinstance(positions, tuple):
            if positions == (position,):
                self._positions = ()
            return
        at = bisect_left(positions, position, first)
        if at < len(positions) and positions[at] == position:
            if at == first:
                self._remove_front(positions)
            else:
                del positions[at]

        if not positions:
            self._positions = ()

    def _remove_front(self, positions: list[MessagePosition]) -> None:
        self._first += 1
        if (self._first > _SLACK and 2 * self._first > len(positions)) or self._first == len(positions):
            del positions[: self._first]
            self._first = 0

    def drop(self, partition: int, end: int) -> None:
        """Remove the positions of a partition below an offset."""
        positions = self._positions
        if isinstance(positions, tuple):
            if positions and positions[0][0] == partition and positions[0][1] < end:
                self._positions = ()
            return
        if len(self) and positions[-1] < (partition, end) and positions[self._first][0] == partition:
            del positions[:]  # all of them
            self._first = 0
            return
        low = bisect_left(positions, (partition, 0), self._first)
        del positions[low : bisect_left(positions, (partition, end), low)]

    def has_any(self, partition: int) -> bool:
        """Return whether there are positions of this partition."""
        at = bisect_left(self._positions, (partition, 0), self._first)
        return at < len(self._positions) and self._positions[at][0] == partition

    def first_before(self, position: MessagePosition) -> MessagePosition | None:
        """Return the first position of its partition, if that lies before it."""
        at = bisect_left(self._positions, (position[0], 0), self._first)
        return self._positions[at] if at < len(self._positions) and self._positions[at] < position else None

    def up_to(self, position: MessagePosition) -> list[MessagePosition]:
        """Return the positions of its partition up to it, and it, as they are now."""
        low = bisect_left(self._positions, (position[0], 0), self._first)
        return list(self._positions[low : bisect_right(self._positions, position, low)])

    def behind(self, position: MessagePosition) -> list[MessagePosition]:
        """Return the positions of its partition that lie behind it, as they are now."""
        end = bisect_left(self._positions, (position[0] + 1, 0), self._first)
        return list(self._positions[bisect_right(self._positions, position, self._first) : end])
