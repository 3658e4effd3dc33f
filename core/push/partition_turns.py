"""Which partitions of a subscription are read next, of those that may have more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

PARTITIONS_A_ROUND = 16  # that are read; the others have their turn in the next rounds
WITHIN = 0.2  # seconds in which every partition has had its turn, if rounds come that often


class PartitionTurns:
    """The partitions that may have more to read, the next in turn first.

    A few of them share the room of a round, and keep their turn for a time: messages that lie together are read, sent
    and acked together, and a batch larger than a round is read from disk once and not once a round. If rounds come
    seldom, since handlers are slow, all partitions share each round.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self._sharing = 1  # the first so many have their turn
        self._since = 0.0  # from then on
        self._last_round: float | None = None

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        """Yield those that may be read in one round, in this order; one that is discarded is not counted."""
        at = 0
        while at < min(PARTITIONS_A_ROUND, len(self._order)):
            partition = next(islice(self._order, at, None))
            yield partition
            at += partition in self._order

    def add(self, partitions: Iterable[int]) -> None:
        """Let these have a turn, the last in order unless they are here already."""
        for partition in partitions:
            self._order.setdefault(partition)

    def discard(self, partition: int) -> None:
        """There is nothing more to read in this one."""
        self._order.pop(partition, None)

    def clear(self) -> None:
        """There is nothing to read."""
        self._order.clear()

    def begin_round(self, now: float) -> int:
        """Return how many of the first ones share the room of the round that begins now; at least one."""
        count = max(1, len(self._order))
        if self._last_round is None:
            self._since = self._last_round = now
        if now - self._since >= WITHIN * self._sharing / count:
            for partition in list(islice(self._order, self._sharing)):
                self._order.move_to_end(partition)
            self._sharing = min(PARTITIONS_A_ROUND, 1 + int((now - self._last_round) * count / WITHIN))
            self._since = now
        self._last_round = now
        return min(self._sharing, count)
