"""From where on the journal is still needed: decided from what was noted while it was applied."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import msgspec

from qb.replication.journal.record_chain import ChainPoint

MOST_POINTS = 400


class JournalPositions(msgspec.Struct):
    """Where in the journal the segments of each log and the open stages begin, and points where a reader may begin.

    A log goes by `<unique id of its topic>/<partition>`.
    """

    begins: dict[str, list[tuple[int, int]]] = {}  # of each log: an offset, and where in the journal its batch is
    stages: dict[str, int] = {}
    points: list[ChainPoint] = []

    def note_batch(self, log: str, first_offset: int, position: int, *, starts_segment: bool) -> None:
        """A batch of a log was applied."""
        if starts_segment or log not in self.begins:
            self.begins.setdefault(log, []).append((first_offset, position))

    def note_drop(self, log: str, first_offset: int) -> None:
        """A log begins with this offset now."""
        begins = self.begins.get(log, [])
        del begins[: self._first(begins, first_offset)]

    def forget_topic(self, uid: str) -> None:
        """A topic is gone."""
        for log in [each for each in self.begins if each.partition("/")[0] == uid]:
            del self.begins[log]

    def note_point(self, point: ChainPoint) -> None:
        """All up to here is in a checkpoint. Of many older points every other one is kept."""
        self.points.append(point)
        if len(self.points) > MOST_POINTS:
            del self.points[1 : MOST_POINTS // 2 : 2]

    def note_trim(self, position: int) -> None:
        """The journal begins there now."""
        self.points = [point for point in self.points if point.position >= position]

    def needed(self, firsts: Mapping[str, int], end: int) -> int:
        """Return the position from which on the journal is needed; `firsts` are the offsets of logs with messages.

        0: of one of them it is not known.
        """
        positions = [end, *self.stages.values()]
        for log, first_offset in firsts.items():
            begins = self.begins.get(log, [])
            known = bool(begins) and begins[0][0] <= first_offset
            positions.append(begins[self._first(begins, first_offset)][1] if known else 0)
        return min(positions)

    def trim_point(self, needed: int) -> ChainPoint | None:
        """Return the last point before what is needed."""
        before = [point for point in self.points if point.position < needed]
        return before[-1] if before else None

    @staticmethod
    def _first(begins: list[tuple[int, int]], first_offset: int) -> int:
        """Return the index of the last one that begins at or before an offset."""
        return max(0, bisect_right(begins, first_offset, key=lambda begin: begin[0]) - 1)
