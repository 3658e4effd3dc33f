"""Ready messages in key order: a queue for each key, delivered in order to one subscriber at a time."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.message_records import MessageRecord
from qb.core.subscriptions.queues.round_robin import RoundRobin
from qb.core.subscriptions.queues.shared_queue import ReadyHeap
from qb.core.subscriptions.queues.sorted_positions import MessagePosition, SortedPositions


class KeyQueue:
    """The unsettled messages of one key. A message without a key is a queue of its own, never bound."""

    __slots__ = ("_ready", "held", "key", "leased", "open", "owner", "scheduled", "waiting")

    def __init__(self, key: str | None) -> None:
        self.key = key
        self.owner: JoinedSubscriber | None = None
        self.open: dict[MessagePosition, MessageRecord] = {}
        self.leased = SortedPositions()  # of these, those in flight
        self.waiting = SortedPositions()  # and the others
        self.held = SortedPositions()  # of the others, those that are not ready: later ones wait for these
        self._ready = ReadyHeap()
        self.scheduled = False  # is it among the movable ones, or those that wait for room?

    def push(self, record: MessageRecord) -> None:
        """Add a ready message, at the place of its offset."""
        self._note_waiting(_place(record), held=False)
        self._ready.push(record)

    def hold(self, record: MessageRecord) -> None:
        """Note that a message is neither ready nor in flight."""
        self._note_waiting(_place(record), held=True)

    def note_leased(self, record: MessageRecord) -> None:
        """Note that a message is in flight."""
        place = _place(record)
        self.waiting.discard(place)
        self.held.discard(place)
        self.leased.add(place)

    def settle(self, record: MessageRecord) -> None:
        """Forget a message."""
        place = _place(record)
        for positions in (self.leased, self.waiting, self.held):
            positions.discard(place)
        del self.open[place]

    def _note_waiting(self, place: MessagePosition, held: bool) -> None:
        self.leased.discard(place)
        self.waiting.add(place)
        if held:
            self.held.add(place)
        else:
            self.held.discard(place)

    def head(self) -> MessageRecord | None:
        """Return the message that may go out next, and keep it; None if none may."""
        first = self._ready.first()
        return None if first is None or self.blocker(first) else first

    def blocker(self, record: MessageRecord) -> MessageRecord | None:
        """Return the earlier message of its partition that holds this one back."""
        before = self.held.first_before(_place(record))
        return None if before is None else self.open[before]

    def before(self, record: MessageRecord) -> MessageRecord | None:
        """Return the message behind which this ready one waits; None if it is the head."""
        first = self._ready.first()
        return self.blocker(record) if first is record else first

    def pop(self) -> MessageRecord:
        """Take out what head() has returned."""
        return self._ready.pop()


Entry = tuple[int, int, KeyQueue]  # the offset of its head, a tie-breaker, a queue


class KeyOrderedQueue:
    """The queue of key_shared.

    Queues whose head can go out are movable, sorted by the offset of the head. Those whose owner has no room wait for
    it apart, so that they are not looked at again and again.
    """

    def __init__(self) -> None:
        self._keys: dict[str | tuple[int, int], KeyQueue] = {}
        self._movable: list[Entry] = []
        self._waiting_for_room: dict[JoinedSubscriber, list[Entry]] = {}
        self._number = count()

    def admit(self, record: MessageRecord) -> None:
        """Put a message into its queue; before anything else is done with it."""
        queue = self._keys.setdefault(_key_of(record), KeyQueue(record.key))
        queue.open[_place(record)] = record

    def key_queue(self, record: MessageRecord) -> KeyQueue:
        """Return the queue of an admitted message."""
        return self._keys[_key_of(record)]

    def push(self, record: MessageRecord) -> None:
        queue = self.key_queue(record)
        queue.push(record)
        self._schedule(queue)

    def hold(self, record: MessageRecord) -> None:
        self.key_queue(record).hold(record)

    def settled(self, record: MessageRecord) -> None:
        queue = self.key_queue(record)
        queue.settle(record)
        if queue.open:
            self._schedule(queue)
        else:
            del self._keys[_key_of(record)]

    def left(self, subscriber: JoinedSubscriber) -> None:
        for queue in self._keys.values():
            if queue.owner is subscriber:
                queue.owner = None
        for entry in self._waiting_for_room.pop(subscriber, ()):
            heappush(self._movable, entry)

    def owner(self, record: MessageRecord) -> JoinedSubscriber | None:
        return self.key_queue(record).owner

    def is_first(self, record: MessageRecord) -> bool:
        return self.key_queue(record).waiting.first_before(_place(record)) is None

    def bind(self, record: MessageRecord, subscriber: JoinedSubscriber) -> None:
        queue = self.key_queue(record)
        queue.note_leased(record)
        if queue.key is not None:
            queue.owner = subscriber
        self._schedule(queue)

    def followers(self, record: MessageRecord) -> list[MessageRecord]:
        queue = self.key_queue(record)
        return [queue.open[place] for place in queue.leased.behind(_place(record))]

    def assign(self, round_robin: RoundRobin) -> Iterator[tuple[JoinedSubscriber, MessageRecord]]:
        for member in round_robin:
            self._make_movable(member)
        while queue := self._next_queue():
            subscriber = queue.owner or round_robin.next()
            if subscriber is None:
                self._schedule(queue)
                return
            if subscriber.room <= 0:
                self._schedule(queue, wait=True)
                continue
            yield subscriber, self._take(queue, subscriber)

    def may_have_work(self) -> bool:
        return bool(self._movable)

    def _take(self, queue: KeyQueue, subscriber: JoinedSubscriber) -> MessageRecord:
        """Take the head out of a queue for this subscriber, and put the queue back."""
        head = queue.pop()
        queue.note_leased(head)
        if queue.key is not None:
            queue.owner = subscriber
        self._schedule(queue)
        return head

    def _make_movable(self, subscriber: JoinedSubscriber) -> None:
        """Make as many key queues movable as the subscriber has room for; a queue without a head takes no room."""
        waiting, room = self._waiting_for_room.get(subscriber, []), subscriber.room
        while waiting and room > 0:
            entry = heappop(waiting)
            queue = entry[2]
            if queue.head():
                heappush(self._movable, entry)
                room -= 1
            else:
                queue.scheduled = False

    def _next_queue(self) -> KeyQueue | None:
        """Take out the first queue whose head can go out."""
        while self._movable:
            queue = heappop(self._movable)[2]
            queue.scheduled = False
            if queue.head():
                return queue
        return None

    def _schedule(self, queue: KeyQueue, wait: bool = False) -> None:
        """Note a queue whose head can go out as movable, or as one that waits for room of its owner."""
        if queue.scheduled or not (head := queue.head()):
            return
        queue.scheduled = True
        target = self._waiting_for_room.setdefault(queue.owner, []) if wait and queue.owner else self._movable
        heappush(target, (head.offset, next(self._number), queue))


def _place(record: MessageRecord) -> MessagePosition:
    return record.partition, record.offset


def _key_of(record: MessageRecord) -> str | tuple[int, int]:
    return (record.partition, record.offset) if record.key is None else record.key
