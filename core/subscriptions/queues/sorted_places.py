"""Messages by partition and offset, in order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

Place = tuple[int, int]  # partition, offset


class SortedPlaces:
    """A sorted set of places. A lookup bisects; an addition or removal moves what lies behind it in one go."""

    __slots__ = ("_places",)

    def __init__(self) -> None:
        self._places: list[Place] = []

    def add(self, place: Place) -> None:
        """Add a place; one that is there is no error."""
        if not self._places or self._places[-1] < place:
            self._places.append(place)
        elif self._places[bisect_left(self._places, place)] != place:
            insort(self._places, place)

    def discard(self, place: Place) -> None:
        """Remove a place; one that is not there is no error."""
        at = bisect_left(self._places, place)
        if at < len(self._places) and self._places[at] == place:
            del self._places[at]

    def first_before(self, place: Place) -> Place | None:
        """Return the first place of its partition, if that lies before it."""
        at = bisect_left(self._places, (place[0], 0))
        return self._places[at] if at < len(self._places) and self._places[at] < place else None

    def behind(self, place: Place) -> Iterator[Place]:
        """Return the places of its partition that lie behind it, as they are now."""
        end = bisect_left(self._places, (place[0] + 1, 0))
        return iter(self._places[bisect_right(self._places, place) : end])
