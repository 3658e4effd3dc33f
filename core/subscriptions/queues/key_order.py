"""Messages in key order: all of one key to one subscriber, in order.

A message that goes out when it is read costs a place among those of its key that are in flight, and nothing else. Those
that cannot go out are passed over: they wait behind their key. Only a message that came back has a record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice

from qb.core.subscriptions.messages.cursor import Cursor
from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.message_records import MessageRecord
from qb.core.subscriptions.queues.key_queue import KeyQueue, place_of
from qb.core.subscriptions.queues.round_robin import RoundRobin

Entry = tuple[int, int, KeyQueue]  # the offset of its head, a tie-breaker, a queue
PassedOn = dict[JoinedSubscriber, dict[int, list[int]]]  # offsets by subscriber and partition


class KeyOrderedQueue:
    """The queue of key_shared.

    Queues whose head can go out are movable, sorted by the offset of the head. Those whose owner has no room wait for
    it apart, so that they are not looked at again and again. So do queues with messages that were passed over.
    """

    def __init__(self) -> None:
        self._keys: dict[str | tuple[int, int], KeyQueue] = {}
        self._movable: list[Entry] = []
        self._waiting_for_room: dict[JoinedSubscriber, list[Entry]] = {}
        self._passed: dict[JoinedSubscriber | None, dict[KeyQueue, None]] = {}  # that can pass on, by owner, in turn
        self._number = count()

    # Messages with a record

    def admit(self, record: MessageRecord) -> None:
        """Put a message that has a record now into its queue; before anything else is done with it."""
        queue = self._keys.get(_key_of(record))
        if queue is None:
            queue = self._keys[_key_of(record)] = KeyQueue(record.key)
        queue.recorded.open[place_of(record)] = record

    def key_queue(self, record: MessageRecord) -> KeyQueue:
        """Return the queue of an admitted message."""
        return self._keys[_key_of(record)]

    def push(self, record: MessageRecord) -> None:
        queue = self.key_queue(record)
        queue.wait(record, held=False)
        self._schedule(queue)

    def hold(self, record: MessageRecord) -> None:
        self.key_queue(record).wait(record, held=True)

    def settled(self, record: MessageRecord) -> None:
        queue = self.key_queue(record)
        queue.settle(record)
        if queue.empty:
            del self._keys[_key_of(record)]
        else:
            self._schedule(queue)

    def left(self, subscriber: JoinedSubscriber) -> None:
        for queue in self._keys.values():
            if queue.owner is subscriber:
                queue.owner = None
        for entry in self._waiting_for_room.pop(subscriber, ()):
            heappush(self._movable, entry)
        if passed := self._passed.pop(subscriber, None):
            self._passed.setdefault(None, {}).update(passed)

    def owner(self, record: MessageRecord) -> JoinedSubscriber | None:
        return self.key_queue(record).owner

    def is_first(self, record: MessageRecord) -> bool:
        return self.key_queue(record).recorded.waiting.first_before(place_of(record)) is None

    def bind(self, record: MessageRecord, subscriber: JoinedSubscriber) -> None:
        self._lease(self.key_queue(record), record, subscriber)

    def followers(self, record: MessageRecord) -> list[tuple[JoinedSubscriber, int]]:
        queue = self.key_queue(record)
        owner = queue.owner
        return [] if owner is None else [(owner, offset) for _, offset in queue.leased.behind(place_of(record))]

    def assign(self, round_robin: RoundRobin) -> Iterator[tuple[JoinedSubscriber, MessageRecord]]:
        for member in round_robin if self._waiting_for_room else ():
            self._make_movable(member)
        while queue := self._next_queue():
            subscriber = queue.owner or round_robin.next()
            if subscriber is None:
                self._schedule(queue)
                return
            if subscriber.room <= 0:
                self._schedule(queue, wait=True)
                continue
            head = queue.recorded.pop()
            self._lease(queue, head, subscriber)
            yield subscriber, head

    def may_have_work(self) -> bool:
        return bool(self._movable or self._passed)

    # Messages without a record

    def distribute(
        self, cursor: Cursor, keys: Sequence[str | None], round_robin: RoundRobin
    ) -> dict[JoinedSubscriber, list[int]]:
        """Choose the subscribers of the next fresh messages of a partition; there is room for as many.

        Those that cannot go out now are passed over; `cursor` knows all of them by their keys then.
        """
        partition, queues, open_keys = cursor.partition, self._keys, cursor.keys
        turns = _Turns(round_robin)
        rooms = turns.rooms
        given: dict[JoinedSubscriber, list[int]] = {member: [] for member in rooms}
        for offset, key in enumerate(keys, cursor.next):
            if key is None:
                owner = turns.next()
            else:
                queue = queues.get(key)
                if queue is None:
                    queue = queues[key] = KeyQueue(key, turns.next())
                owner = queue.owner or turns.next()
                if rooms[owner] <= 0 or queue.has_waiting(partition):
                    cursor.passed[offset] = key
                    queue.pass_over(partition, offset)
                    self._note_passed(queue)
                    continue
                queue.owner = owner
                queue.leased.add((partition, offset))
            rooms[owner] -= 1
            open_keys[offset] = key
            given[owner].append(offset)
        turns.end()
        return {member: offsets for member, offsets in given.items() if offsets}

    def pass_on(self, round_robin: RoundRobin, limit: int | None) -> PassedOn:
        """Take out messages that were passed over, by subscriber and partition, as far as there is room."""
        given: PassedOn = {}
        for queue in self._passed.pop(None, ()):
            queue.owner = queue.owner or round_robin.next()
            self._note_passed(queue)
        for member in round_robin if self._passed else ():
            room = member.room if limit is None else min(member.room, limit)
            while room > 0 and (queues := self._passed.get(member)):
                share = -(-room // len(queues))
                for queue in list(islice(queues, room)):
                    taken = queue.take_passed(min(share, room))
                    room -= len(taken)
                    for partition, offset in taken:
                        queue.leased.add((partition, offset))
                        given.setdefault(member, {}).setdefault(partition, []).append(offset)
                    del queues[queue]
                    self._note_passed(queue)
                if not queues:
                    self._passed.pop(member, None)
            if limit is not None and given:
                break
        return given

    def settled_fresh(self, partition: int, offset: int, key: str | None) -> None:
        """Forget a message in flight that has no record."""
        if key is not None:
            queue = self._keys[key]
            queue.leased.discard((partition, offset))
            if queue.empty:
                del self._keys[key]

    def drop_passed(self, partition: int, offsets: range, keys: set[str]) -> None:
        """Forget messages of these keys that were passed over."""
        for key in keys:
            queue = self._keys[key]
            queue.drop_passed(partition, offsets)
            if not queue.passed:
                self._forget_passed(queue)
            if queue.empty:
                del self._keys[key]

    def queue_of(self, key: str) -> KeyQueue:
        """Return the queue of a key that has unsettled messages."""
        return self._keys[key]

    def _note_passed(self, queue: KeyQueue) -> None:
        """Note that a queue has messages that were passed over, if one of them could go out given room."""
        if queue.passed and queue.can_pass_on():
            self._passed.setdefault(queue.owner, {})[queue] = None

    def _forget_passed(self, queue: KeyQueue) -> None:
        queues = self._passed.get(queue.owner)
        if queues is not None:
            queues.pop(queue, None)
            if not queues:
                del self._passed[queue.owner]

    # Queues with a head

    def _lease(self, queue: KeyQueue, record: MessageRecord, subscriber: JoinedSubscriber) -> None:
        """Note that a message goes to this subscriber, which owns the key from now on."""
        queue.note_leased(record)
        if queue.key is not None and queue.owner is not subscriber:
            self._forget_passed(queue)
            queue.owner = subscriber
        self._schedule(queue)

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
        self._note_passed(queue)
        if queue.scheduled or not (head := queue.head()):
            return
        queue.scheduled = True
        target = self._waiting_for_room.setdefault(queue.owner, []) if wait and queue.owner else self._movable
        heappush(target, (head.offset, next(self._number), queue))


class _Turns:
    """The rooms of all subscribers while one slice is distributed, and the next one in turn that has room."""

    def __init__(self, round_robin: RoundRobin) -> None:
        self.rooms = {member: member.room for member in round_robin}
        self._round_robin = round_robin
        self._members = list(self.rooms)
        self._at = 0

    def next(self) -> JoinedSubscriber:
        """Return the next subscriber in turn that has room; there is one."""
        members, rooms = self._members, self.rooms
        while True:
            member = members[self._at]
            self._at = (self._at + 1) % len(members)
            if rooms[member] > 0:
                return member

    def end(self) -> None:
        """Let the turn go on from here."""
        self._round_robin.move_on(self._at)


def _key_of(record: MessageRecord) -> str | tuple[int, int]:
    return (record.partition, record.offset) if record.key is None else record.key
