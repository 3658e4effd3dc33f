"""The partitions that a consumer holds: what to fetch, what to hand out, what is handled.

A message is *in hand* from the moment it is handed out until the next one is asked for; then it is *handled*. Threads
that share this guard it with a lock; only `handed` and `handled` are moved without one, by the thread
that has the partition in hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from math import inf
from operator import length_hint
from typing import NamedTuple

from qb.clients.consuming.consumer_options import DEFAULT_TERMS, FetchTerms
from qb.clients.protocol.client_errors import OffsetOutOfRange
from qb.clients.protocol.fetch_requests import FetchAnswer, FetchRequest
from qb.clients.protocol.message import Message

FETCHES = 32  # on their way at once; the broker lets 64 of a peer wait before it reads no more
SHORT_POLL = 0.05  # the same when there are more partitions than fetches, so that each has its turn soon
AHEAD = 2  # portions of a partition that are kept before they are handed out
MEMORY = 32 << 20  # bytes of all these portions together, if messages are not longer than a portion should be
MIN_BYTES = 1 << 16  # of one portion, whatever memory there is
MAX_MESSAGES = 100_000  # of one portion: as many as the broker allows
READ_AT_ONCE = 1_000  # messages
RETRY = 1.0  # seconds until a fetch that was refused is tried again


class AssignedPartition(NamedTuple):
    """One log of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class PartitionProgress:
    """A partition that is ours, and how far we are in it. Every offset here is that of a *next* message."""

    __slots__ = (
        "committed",
        "fetching",
        "handed",
        "handled",
        "is_new",
        "messages",
        "partition",
        "portions",
        "position",
        "retry_at",
        "stopped",
    )

    def __init__(self, partition: AssignedPartition) -> None:
        self.partition = partition
        self.position: int | None = None  # to fetch; None: not known yet
        self.handed = self.handled = 0
        self.committed: int | None = None  # as far as the broker knows
        self.is_new = False  # the group has committed nothing for it yet
        self.stopped = False  # hand out no more of it
        self.fetching = False
        self.retry_at = -inf
        self.portions: deque[FetchAnswer] = deque()
        self.messages: Iterator[Message] = iter(())  # read, and not handed out yet

    def begin(self, offset: int, committed: int | None) -> None:
        """Go on from an offset."""
        self.position = self.handed = self.handled = offset
        self.committed = committed

    @property
    def has_more(self) -> bool:
        return bool(length_hint(self.messages) or self.portions)

    def read_more(self) -> None:
        """See to it that there are messages to hand out, if there are any at all."""
        if not length_hint(self.messages) and self.portions:
            source = self.portions[0].source
            self.messages = iter(source.read(READ_AT_ONCE))
            if source.exhausted:
                self.portions.popleft()


class AssignedPartitions:
    """All partitions of one consumer."""

    def __init__(self, terms: FetchTerms = DEFAULT_TERMS) -> None:
        self._terms = terms
        self._held: dict[AssignedPartition, PartitionProgress] = {}  # the next to be fetched first
        self._ready: deque[PartitionProgress] = deque()  # with messages to hand out; the next in turn first
        self._in_hand: list[PartitionProgress] = []
        self.lost = False  # what is in hand is not ours any more

    def __iter__(self) -> Iterator[PartitionProgress]:
        return iter(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def get(self, partition: AssignedPartition) -> PartitionProgress | None:
        """Return a partition if it is ours."""
        return self._held.get(partition)

    # What is ours

    def allow(self, partitions: Collection[AssignedPartition]) -> None:
        """Take up those of them that we have not, and stop the ones that are not among them."""
        for held in self:
            held.stopped = held.stopped or held.partition not in partitions
        for partition in sorted(partitions):
            if partition not in self._held:
                self._held[partition] = PartitionProgress(partition)

    def stop_all(self) -> None:
        """Hand out nothing more; what is in hand is not handled, and no report about it will follow."""
        self._in_hand.clear()
        self.allow(())

    def clear(self) -> None:
        """Drop everything: it is not ours any more."""
        self.lost = self.lost or bool(self._in_hand)
        self.stop_all()
        self._held.clear()

    def drop(self, dropped: Iterable[PartitionProgress]) -> None:
        """Give these up."""
        for held in dropped:
            del self._held[held.partition]

    def to_give_up(self) -> list[PartitionProgress]:
        """Return what was stopped and is not in hand."""
        return [held for held in self if held.stopped and held not in self._in_hand]

    def seek(self, partition: AssignedPartition, offset: int) -> None:
        """Go on from another offset; what is in hand now will not count as handled. Raises KeyError."""
        former = self._held[partition]
        former.stopped = True
        self._held[partition] = sought = PartitionProgress(partition)
        sought.begin(offset, former.committed)

    # What to fetch

    def wanting(self, now: float) -> list[PartitionProgress]:
        """Return the partitions to fetch() now."""
        free = FETCHES - sum(held.fetching for held in self)
        return [held for held in self if _wants_more(held, now)][: max(free, 0)]

    def fetch(self, held: PartitionProgress) -> FetchRequest:
        """Return what to ask for; fetched() or not_fetched() must follow."""
        held.fetching = True
        self._held[held.partition] = self._held.pop(held.partition)  # now it is the last in turn
        assert held.position is not None
        terms = self._terms
        size = min(max(MEMORY // (AHEAD * len(self)), MIN_BYTES), terms.max_bytes)
        wait = terms.max_wait if len(self) <= FETCHES else min(SHORT_POLL, terms.max_wait)
        return FetchRequest(*held.partition, held.position, MAX_MESSAGES, size, wait, terms.min_bytes)

    def fetched(self, held: PartitionProgress, portion: FetchAnswer) -> None:
        """Take in the answer to a fetch."""
        held.fetching = False
        if held.stopped or not portion.count:
            return
        held.position = portion.next_offset
        held.portions.append(portion)
        if held not in self._ready and held not in self._in_hand:
            self._ready.append(held)

    def not_fetched(self, held: PartitionProgress, error: Exception, now: float) -> None:
        """The broker refused: try again later, or at once at the first kept offset if ours is not kept."""
        held.fetching, held.retry_at = False, now + RETRY
        if isinstance(error, OffsetOutOfRange) and error.first is not None:
            held.position, held.retry_at = error.first, now

    def next_retry(self, now: float) -> float:
        """Return when a fetch that was refused is to be tried again."""
        return min((held.retry_at for held in self if held.retry_at > now), default=inf)

    # What to hand out

    def finish(self) -> None:
        """All that is in hand is handled."""
        for held in self._in_hand:
            held.handled = held.handed
            if held.has_more and not held.stopped:
                self._ready.append(held)
        self._in_hand.clear()
        self.lost = False

    def take(self) -> PartitionProgress | None:
        """Return the next in turn that has messages; it is in hand from now on."""
        while self._ready:
            held = self._ready.popleft()
            if not held.stopped:
                held.read_more()
                self._in_hand.append(held)
                return held
        return None

    # What is handled

    def all_is_handled(self) -> None:
        """All that was handed out counts as handled, but stays in hand."""
        for held in self:
            held.handled = held.handed

    def handled(self, those: Iterable[PartitionProgress]) -> dict[AssignedPartition, int]:
        """Return how far each of them is handled, where that is not committed."""
        return {
            held.partition: held.handled
            for held in those
            if held.position is not None and held.handled != held.committed
        }

    def committed(self, partition: AssignedPartition, offset: int) -> None:
        """The broker knows now."""
        if held := self._held.get(partition):
            held.committed = offset


def _wants_more(held: PartitionProgress, now: float) -> bool:
    waits = held.fetching or held.stopped or held.retry_at > now
    return not waits and held.position is not None and len(held.portions) < AHEAD
