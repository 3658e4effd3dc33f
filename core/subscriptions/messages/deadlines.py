"""A heap of deadlines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar

NEVER = math.inf


class Timed(Protocol):
    """Something that carries its own time; NEVER means that it waits for none."""

    due: float


Item = TypeVar("Item", bound=Timed)


class Deadlines(Generic[Item]):
    """A lazy heap: an entry counts only while its item still has the entry's time.

    Setting, moving and cancelling a deadline never search the heap: setting `item.due` to NEVER cancels it.
    Dead entries are swept out when they could be half of the heap.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._number = count()
        self._sweep_at = 64

    def set(self, item: Item, due: float) -> None:
        """Make the item due then, instead of whenever it was."""
        item.due = due
        if due == NEVER:
            return
        heappush(self._heap, (due, next(self._number), item))
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if entry[2].due == entry[0]]
            heapify(self._heap)
            self._sweep_at = max(64, 2 * len(self._heap))

    def first(self) -> float:
        """Return when the next item is due, or NEVER."""
        heap = self._heap
        while heap and heap[0][2].due != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else NEVER

    def first_due(self, now: float) -> Item | None:
        """Return the item that is due longest, and keep it; None if none is due."""
        return self._heap[0][2] if self.first() <= now else None

    def pop_due(self, now: float) -> Iterator[Item]:
        """Take out every item that is due, the longest due first."""
        while self.first() <= now:
            item = heappop(self._heap)[2]
            item.due = NEVER
            yield item
