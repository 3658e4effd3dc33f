"""Messages in key order: all of one key to one subscriber, in order.

A message that goes out when it is read costs a place among those of its key that are in flight, and nothing else. Those
that cannot go out are passed over: they wait behind their key. Only a message that came back has a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count, islice

from qb.core.subscriptions.messages.cursor import Cursor
from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.message_records import MessageRecord
from qb.core.subscriptions.queues.key_queue import KeyQueue, place_of
from qb.core.subscriptions.queues.round_robin import RoundRobin, Turns
from qb.core.subscriptions.subscription_options import LARGEST_WINDOW

QueueKey = str | tuple[int, int]  # a key, or the position of a message that has none
Entry = tuple[int, int, KeyQueue]  # the offset of its head, a tie-breaker, a queue
PassedOn = dict[JoinedSubscriber, dict[int, list[int]]]  # offsets by subscriber and partition


class KeyOrderedQueue:
    """The queue of key_shared.

    Queues whose head can go out are movable, sorted by the offset of the head. Those whose owner has no room wait for
    it apart, so that they are not looked at again and again. So do queues with messages that were passed over.
    """

    def __init__(self) -> None:
        self._keys: dict[QueueKey, KeyQueue] = {}
        self._movable: list[Entry] = []
        self._waiting_for_room: dict[JoinedSubscriber, list[Entry]] = {}
        self._passed: dict[JoinedSubscriber | None, dict[KeyQueue, None]] = {}  # that can pass on, by owner, in turn
        self._number = count()

    # Messages with a record

    def admit(self, record: MessageRecord) -> None:
        """Put a message that has a record now into its queue; before anything else is done with it."""
        queue = self._keys.get(queue_key(record))
        if queue is None:
            queue = self._keys[queue_key(record)] = KeyQueue(record.key)
        queue.recorded.open[place_of(record)] = record

    def key_queue(self, record: MessageRecord) -> KeyQueue:
        """Return the queue of an admitted message."""
        return self._keys[queue_key(record)]

    def push(self, record: MessageRecord) -> None:
        queue = self.key_queue(record)
        queue.wait(record, held=False)
        self._schedule(queue)

    def hold(self, record: MessageRecord) -> None:
        queue = self.key_queue(record)
        queue.wait(record, held=True)
        self._note_passed(queue)  # as many as may be were in flight, and one is not any more

    def settled(self, record: MessageRecord) -> None:
        queue = self.key_queue(record)
        queue.settle(record)
        self._let_go(queue_key(record), queue)
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

    def followers(self, record: MessageRecord) -> tuple[JoinedSubscriber | None, list[int]]:
        queue = self.key_queue(record)
        return queue.owner, [offset for _, offset in queue.behind(place_of(record))]

    def assign(self, round_robin: RoundRobin) -> Iterator[tuple[JoinedSubscriber, MessageRecord]]:
        for member in round_robin if self._waiting_for_room else ():
            self._make_movable(member)
        while queue := self._next_queue():
            subscriber = queue.owner or round_robin.next()
            if subscriber is None:
                self._schedule(queue)
                return
            if subscriber.room <= 0 or queue.full:
                self._schedule(queue, wait=True)
                continue
            head = queue.recorded.pop()
            self._lease(queue, head, subscriber)
            yield subscriber, head

    def may_have_work(self) -> bool:
        return bool(self._movable or self._passed)

    # Messages without a record

    def distribute(
        self, cursor: Cursor, round_robin: RoundRobin, limit: int
    ) -> tuple[int, dict[JoinedSubscriber, list[int]]]:
        """Choose the subscribers of fresh messages of a partition that are at hand, until so many go out.

        Those that cannot go out now are passed over; `cursor` knows all of them by their keys then. Where only the
        subscriber of a key has no room, it ends there unless another subscriber is short of messages.
        Returns how many messages were looked at, and the offsets that go to each subscriber.
        """
        partition, queues, open_keys = cursor.partition, self._keys, cursor.keys
        turns = Turns(round_robin, limit)
        rooms, left, offset = turns.rooms, turns.left, cursor.next
        given: dict[JoinedSubscriber, list[int]] = {member: [] for member in rooms}
        for offset, key in enumerate(cursor.keys_at_hand, cursor.next):
            if not left:
                break
            queue = None if key is None else queues.get(key)
            if queue is None:
                owner = turns.next()
                if key is not None:
                    queue = queues[key] = KeyQueue(key, owner)
            else:
                holder = queue.owner
                no_room = holder is not None and rooms[holder] <= 0
                if no_room and not turns.has_short_subscriber:
                    cursor.held_up_by = holder
                    break
                if no_room or (not queue.takes_fresh and (queue.full or queue.has_waiting(partition))):
                    cursor.passed[offset] = key  # type: ignore[assignment]  # there is a queue, so there is a key
                    if queue.pass_over(partition, offset):
                        self._note_passed(queue)
                    continue
                owner = queue.owner = holder or turns.next()
            if queue is not None:
                queue.fresh[partition, offset] = None
            rooms[owner] -= 1
            left -= 1
            open_keys[offset] = key
            given[owner].append(offset)
        else:
            offset = cursor.end
        turns.end()
        return offset - cursor.next, {member: offsets for member, offsets in given.items() if offsets}

    def take_in(self, cursor: Cursor, run: range, keys: Sequence[str | None], owner: JoinedSubscriber) -> None:
        """Put messages in flight into the queues of their keys, behind all that are there."""
        partition, queues = cursor.partition, self._keys
        cursor.keys.update(zip(run, keys, strict=True))
        for offset, key in zip(run, keys, strict=True):
            if key is not None:
                queue = queues.get(key)
                if queue is None:
                    queue = queues[key] = KeyQueue(key)
                queue.owner = owner
                queue.fresh[partition, offset] = None

    def pass_on(self, round_robin: RoundRobin, limit: int | None) -> PassedOn:
        """Take out messages that were passed over, by subscriber and partition, as far as there is room."""
        given: PassedOn = {}
        if not self._passed:
            return given
        turns = Turns(round_robin, limit)
        self._pass_on_to_owners(turns, given)
        while turns.left and (unowned := self._passed.get(None)):
            share = -(-turns.left // len(unowned))
            self._pass_on([next(iter(unowned))], turns.next(), turns, given, share)
        self._pass_on_to_owners(turns, given)  # keys that have an owner now may have more than their share
        turns.end()
        return given

    def _pass_on_to_owners(self, turns: Turns, given: PassedOn) -> None:
        for member in list(turns.rooms):
            while (room := turns.room(member)) and (queues := self._passed.get(member)):
                self._pass_on(list(islice(queues, room)), member, turns, given)

    def _pass_on(
        self,
        queues: list[KeyQueue],
        member: JoinedSubscriber,
        turns: Turns,
        given: PassedOn,
        most: int = LARGEST_WINDOW,
    ) -> None:
        """Give a subscriber what was passed over in these queues, the same number of each while it has room."""
        share = min(most, -(-turns.room(member) // len(queues)))
        for queue in queues:
            self._forget_passed(queue)
            if taken := queue.take_passed(min(share, turns.room(member))):
                queue.owner = member
                turns.take(member, len(taken))
            for partition, offset in taken:
                queue.fresh[partition, offset] = None
                given.setdefault(member, {}).setdefault(partition, []).append(offset)
            self._note_passed(queue)

    def settled_fresh(self, cursor: Cursor, offsets: Iterable[int]) -> None:
        """Forget messages in flight that have no record."""
        partition, queues, take_key = cursor.partition, self._keys, cursor.keys.pop
        freed: dict[KeyQueue, None] = {}  # with messages that were passed over: one may go out now
        for offset in offsets:
            key = take_key(offset)
            if key is not None:
                queue = queues[key]
                del queue.fresh[partition, offset]
                if queue.is_empty:
                    del queues[key]
                elif not queue.fresh:
                    self._let_go(key, queue)
                elif queue.passed:
                    freed[queue] = None
        for queue in freed:
            self._note_passed(queue)

    def drop(self, partition: int, end: int, keys: Iterable[QueueKey]) -> None:
        """Forget all messages of these keys in a partition below an offset."""
        for key in keys:
            queue = self._keys[key]
            if queue.passed:
                self._forget_passed(queue)
            queue.drop(partition, end)
            if queue.bound or queue.passed:
                self._let_go(key, queue)
                self._schedule(queue)
            else:
                del self._keys[key]

    def clear(self) -> None:
        """Forget all messages."""
        for known in (self._keys, self._movable, self._waiting_for_room, self._passed):
            known.clear()

    def _let_go(self, key: QueueKey, queue: KeyQueue) -> None:
        """Unbind a key of which nothing was delivered that is not settled, and forget it if nothing waits either."""
        if queue.bound:
            return
        self._forget_passed(queue)
        queue.owner = None
        if queue.passed:
            self._note_passed(queue)
        else:
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


def queue_key(record: MessageRecord) -> QueueKey:
    """Return by what the queue of a message is found."""
    return (record.partition, record.offset) if record.key is None else record.key
