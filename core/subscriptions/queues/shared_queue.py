"""Ready messages in offset order, each to the next subscriber in turn."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

import msgspec

from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.message_records import MessageRecord, MessageState
from qb.core.subscriptions.queues.round_robin import RoundRobin

_ties = count()  # so that heaps never compare records


class ReadyQueue(Protocol):
    """Where ready messages wait, and the order in which they go out."""

    def push(self, record: MessageRecord) -> None:
        """Take a message that is ready."""

    def hold(self, record: MessageRecord) -> None:
        """Note that a message is not ready: it backs off, is dead-lettered, or is isolated."""

    def settled(self, record: MessageRecord) -> None:
        """Forget a message."""

    def left(self, subscriber: JoinedSubscriber) -> None:
        """Note that a subscriber has left."""

    def owner(self, record: MessageRecord) -> JoinedSubscriber | None:
        """Return the only subscriber that may have this message, if there is one."""

    def is_first(self, record: MessageRecord) -> bool:
        """Return whether nothing else has to go out before this message."""

    def bind(self, record: MessageRecord, subscriber: JoinedSubscriber) -> None:
        """Note that a message goes to this subscriber, past the queue."""

    def followers(self, record: MessageRecord) -> tuple[JoinedSubscriber | None, list[int]]:
        """Return the messages in flight that must not be handled before this one: who holds them, their offsets."""

    def assign(self, round_robin: RoundRobin) -> Iterator[tuple[JoinedSubscriber, MessageRecord]]:
        """Take messages out, each with its subscriber, as long as there is room.

        Each one counts in `subscriber.assigned` before the next is asked for; stopping early loses nothing.
        """

    def may_have_work(self) -> bool:
        """False if there is surely nothing to assign."""


class ReadyHeap(msgspec.Struct, eq=False, gc=False):
    """Ready records by offset. One that is no longer ready is skipped, so that nothing needs to be searched for."""

    _heap: list[tuple[int, int, int, MessageRecord]] | tuple[()] = ()  # an empty one is no list: there may be many

    def push(self, record: MessageRecord) -> None:
        """Add a record."""
        if not self._heap:
            self._heap = []
        heappush(self._heap, (record.offset, record.partition, next(_ties), record))

    def first(self) -> MessageRecord | None:
        """Return the record of the lowest offset, and keep it."""
        heap = self._heap
        if isinstance(heap, tuple):
            return None
        while heap and heap[0][3].state is not MessageState.READY:
            heappop(heap)
        if heap:
            return heap[0][3]
        self._heap = ()
        return None

    def pop(self) -> MessageRecord:
        """Take out what first() has returned."""
        assert isinstance(self._heap, list)
        return heappop(self._heap)[3]


class SharedQueue:
    """The queue of every mode but key_shared."""

    def __init__(self) -> None:
        self._ready = ReadyHeap()

    def push(self, record: MessageRecord) -> None:
        self._ready.push(record)

    def hold(self, record: MessageRecord) -> None:
        pass

    def settled(self, record: MessageRecord) -> None:
        pass

    def left(self, subscriber: JoinedSubscriber) -> None:
        pass

    def owner(self, record: MessageRecord) -> JoinedSubscriber | None:
        return None

    def is_first(self, record: MessageRecord) -> bool:
        return True

    def bind(self, record: MessageRecord, subscriber: JoinedSubscriber) -> None:
        pass

    def followers(self, record: MessageRecord) -> tuple[JoinedSubscriber | None, list[int]]:
        return None, []

    def assign(self, round_robin: RoundRobin) -> Iterator[tuple[JoinedSubscriber, MessageRecord]]:
        while self._ready.first() and (subscriber := round_robin.next()):
            yield subscriber, self._ready.pop()

    def may_have_work(self) -> bool:
        return self._ready.first() is not None
