"""Messages in key order: all of one key to one subscriber, in order.

A message that goes out when it is read is counted with its key, and costs nothing else. Those that cannot go out are
passed over: they wait behind their key. Only a message that came back has a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import count, islice, pairwise, repeat

from qb.core.subscriptions.messages.cursor import Cursor
from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.message_records import MessageRecord
from qb.core.subscriptions.queues import key_queue
from qb.core.subscriptions.queues.key_choices import Choice, choose
from qb.core.subscriptions.queues.key_queue import KeyQueue, place_of
from qb.core.subscriptions.queues.key_table import MAYBE, NO_KEY, NO_OWNER, NOWHERE, KeyTable
from qb.core.subscriptions.queues.round_robin import RoundRobin, Turns
from qb.core.wire.columns import FEW, Flags, Numbers, begins_of, distinct, np

QueueKey = str | tuple[int, int]  # a key, or the position of a message that has none
Entry = tuple[int, int, KeyQueue]  # the offset of its head, a tie-breaker, a queue
PassedOn = dict[tuple[JoinedSubscriber, int], tuple[list[int], list[int]]]  # by partition too: offsets, key numbers


class KeyOrderedQueue:
    """The queue of key_shared.

    Queues whose head can go out are movable, sorted by the offset of the head. Those whose owner has no room wait for
    it apart, so that they are not looked at again and again. So do queues with messages that were passed over.
    """

    def __init__(self) -> None:
        self.table = KeyTable()
        self._keys: dict[QueueKey, KeyQueue] = {}  # of which something waits, or has a record
        self._movable: list[Entry] = []
        self._waiting_for_room: dict[JoinedSubscriber, list[Entry]] = {}
        self._passed: dict[int, dict[KeyQueue, None]] = {}  # that can pass on, by the owner's number, in turn
        self._number = count()

    # Messages with a record

    def admit(self, record: MessageRecord) -> None:
        """Put a message that has a record now into its queue; before anything else is done with it."""
        queue = self._queue(queue_key(record))
        queue.recorded.open[place_of(record)] = record
        self._mark(queue)

    def _queue(self, name: QueueKey) -> KeyQueue:
        """Return the queue of this name; it is made if there is none."""
        queue = self._keys.get(name)
        if queue is None:
            key = name if isinstance(name, str) else None
            number = self.table.number(key)
            queue = self._keys[name] = KeyQueue(key, number, self.table)
        return queue

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
        self._tidy(queue_key(record), queue)
        self._schedule(queue)

    def left(self, subscriber: JoinedSubscriber) -> None:
        number = self.table.left(subscriber)
        for entry in self._waiting_for_room.pop(subscriber, ()):
            heappush(self._movable, entry)
        if passed := self._passed.pop(number, None):
            self._passed.setdefault(NO_OWNER, {}).update(passed)

    def owner(self, record: MessageRecord) -> JoinedSubscriber | None:
        return self.key_queue(record).owner

    def is_first(self, record: MessageRecord) -> bool:
        return self.key_queue(record).recorded.waiting.first_before(place_of(record)) is None

    def bind(self, record: MessageRecord, subscriber: JoinedSubscriber) -> None:
        self._lease(self.key_queue(record), record, subscriber)

    def followers(self, record: MessageRecord) -> tuple[JoinedSubscriber | None, list[int]]:
        queue = self.key_queue(record)
        owner = queue.owner
        if owner is None:
            return None, []
        offsets = [offset for _, offset in queue.recorded.leased.behind(place_of(record))]
        if queue.fresh:
            offsets += [each for each in owner.offsets_of(record.partition, queue.number) if each > record.offset]
        return owner, sorted(offsets)

    def up_to(self, holder: JoinedSubscriber, key: str, partition: int, offset: int) -> list[int]:
        """Return which messages of a key and partition a subscriber holds, up to an offset, in order."""
        offsets = holder.offsets_of(partition, self.table.number(key))
        if queue := self._keys.get(key):
            offsets += [each for _, each in queue.recorded.leased.up_to((partition, offset))]
        return sorted(each for each in offsets if each <= offset)

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

    def distribute(self, cursor: Cursor, round_robin: RoundRobin, limit: int) -> tuple[Choice, Numbers]:
        """Choose the subscribers of fresh messages of a partition that are at hand, until so many go out.

        Those that cannot go out now are passed over. Where only the subscriber of a key has no room, it ends there
        unless another subscriber is short of messages. Returns the numbers of the keys at hand as well.
        """
        turns, numbers = Turns(round_robin, limit), self.table.number_all(cursor.keys_at_hand)
        if len(numbers) < FEW or not turns.left:
            choice = self._choose_one_by_one(cursor, numbers, turns)
        else:
            choice = choose(self.table, numbers, turns, self._waits(cursor.partition, numbers))
            for member, indexes in choice.given:
                self.table.take(numbers[indexes], member)
            if len(choice.passed):
                self._pass_over(cursor, numbers, choice)
        turns.end()
        return choice, numbers

    def _choose_one_by_one(self, cursor: Cursor, numbers: Numbers, turns: Turns) -> Choice:
        """The same for few messages, which are counted and passed over meanwhile."""
        partition, rooms, table, left = cursor.partition, turns.rooms, self.table, turns.left
        given: dict[JoinedSubscriber, list[int]] = {}
        passed: list[int] = []
        looked_at, held_up_by = 0, None
        for number, key in zip(numbers.tolist(), cursor.keys_at_hand, strict=True):
            if not left:
                break
            queue = None if key is None else self._keys.get(key)
            holder = table.owner_of(number)
            no_room = holder is not None and rooms[holder] <= 0
            if no_room and not turns.has_short_subscriber:
                held_up_by = holder
                break
            full = table.counts[number] >= key_queue.MOST_IN_FLIGHT
            if key is not None and (no_room or full or (queue is not None and queue.keeps_back(partition))):
                offset = cursor.next + looked_at
                self._wait(key, partition, (offset,))
                cursor.passed[offset] = key
                passed.append(looked_at)
            else:
                owner = holder or turns.next()
                table.take_some(number, 1, owner)
                rooms[owner] -= 1
                left -= 1
                given.setdefault(owner, []).append(looked_at)
            looked_at += 1
        parts = [(member, np.array(indexes)) for member, indexes in given.items()]
        return Choice(looked_at, parts, np.array(passed, np.int64), held_up_by)

    def _waits(self, partition: int, numbers: Numbers) -> Flags:
        """Return which messages of a slice wait behind others of their keys, whatever room there is."""
        table = self.table
        waits_in = table.waits_in[numbers]
        waits: Flags = waits_in == partition
        for number in distinct(numbers[waits_in == MAYBE]):
            queue = self._keys[table.name(number) or ""]
            room = 0 if queue.keeps_back(partition) else key_queue.MOST_IN_FLIGHT - queue.in_flight
            waits[np.flatnonzero(numbers == number)[room:]] = True
        in_flight = table.in_flight[numbers]
        if int(in_flight.max()) + len(numbers) > key_queue.MOST_IN_FLIGHT:
            for number in distinct(numbers[~waits]):
                room = key_queue.MOST_IN_FLIGHT - table.counts[number]
                if number != NO_KEY and room < len(numbers):
                    waits[np.flatnonzero(numbers == number)[room:]] = True
        return waits

    def _pass_over(self, cursor: Cursor, numbers: Numbers, choice: Choice) -> None:
        """Let messages of a slice wait behind their keys; the cursor knows them then."""
        passed = numbers[choice.passed]
        order = np.argsort(passed, kind="stable")
        begins = begins_of(passed[order])
        offsets = (choice.passed[order] + cursor.next).tolist()
        keys: list[str] = self.table.names(passed.tolist())  # type: ignore[assignment]  # each has one
        cursor.passed.update(zip((choice.passed + cursor.next).tolist(), keys, strict=True))
        for first, (begin, end) in zip(order[begins].tolist(), pairwise([*begins.tolist(), len(offsets)]), strict=True):
            self._wait(keys[first], cursor.partition, offsets[begin:end])

    def _wait(self, key: str, partition: int, offsets: Iterable[int]) -> None:
        """Let messages wait behind their key."""
        queue = self._queue(key)
        queue.pass_over(partition, offsets)
        self._mark(queue)
        self._note_passed(queue)

    def pass_on(self, round_robin: RoundRobin, limit: int | None) -> PassedOn:
        """Take out messages that were passed over, by subscriber and partition, as far as there is room."""
        given: PassedOn = {}
        if not self._passed:
            return given
        turns = Turns(round_robin, limit)
        self._pass_on_to_owners(turns, given)
        while turns.left and (unowned := self._passed.get(NO_OWNER)):
            self._pass_on(next(iter(unowned)), turns.next(), -(-turns.left // len(unowned)), turns, given)
        self._pass_on_to_owners(turns, given)  # keys that have an owner now may have more than their share
        turns.end()
        return given

    def _pass_on_to_owners(self, turns: Turns, given: PassedOn) -> None:
        for member in turns.members:
            owner = self.table.member_number(member)
            while (room := turns.room(member)) and (queues := self._passed.get(owner)):
                share = -(-room // len(queues))
                for queue in list(islice(queues, room)):
                    self._pass_on(queue, member, share, turns, given)

    def _pass_on(self, queue: KeyQueue, member: JoinedSubscriber, most: int, turns: Turns, given: PassedOn) -> None:
        """Give a subscriber what was passed over in a queue, at most so many, and while it has room."""
        self._forget_passed(queue)
        number, key = queue.number, queue.key
        for partition, offsets in queue.take_passed(min(most, turns.room(member))).items():
            turns.take(member, len(offsets))
            self.table.take_some(number, len(offsets), member)
            all_offsets, numbers = given.setdefault((member, partition), ([], []))
            all_offsets += offsets
            numbers += repeat(number, len(offsets))
        assert key is not None
        self._tidy(key, queue)

    def settled_fresh(self, numbers: Numbers) -> None:
        """Forget messages in flight that have no record, of the keys with these numbers."""
        for number in self.table.settle(numbers):
            key = self.table.name(number)
            assert key is not None
            self._tidy(key, self._keys[key])

    def drop(self, partition: int, end: int, keys: Iterable[QueueKey]) -> None:
        """Forget all messages of these keys in a partition below an offset that wait or have a record."""
        for key in keys:
            queue = self._keys[key]
            if queue.passed:
                self._forget_passed(queue)
            queue.drop(partition, end)
            self._tidy(key, queue)
            self._schedule(queue)

    def _tidy(self, name: QueueKey, queue: KeyQueue) -> None:
        """Unbind a key of which nothing was delivered that is not settled, and forget its queue if it is not needed."""
        number, owners = queue.number, self.table.owners
        if owners[number] != NO_OWNER and not queue.bound:
            self._forget_passed(queue)
            owners[number] = NO_OWNER
        if queue.is_needed:
            self._note_passed(queue)
        else:
            self._forget_passed(queue)
            del self._keys[name]
        self._mark(queue)

    def _mark(self, queue: KeyQueue) -> None:
        """Let the table know where messages of the key wait."""
        if queue.number != NO_KEY:
            self.table.waits_in[queue.number] = queue.waits_in if queue.is_needed else NOWHERE

    def queue_of(self, key: str) -> KeyQueue:
        """Return the queue of a key of which something waits, or has a record."""
        return self._keys[key]

    def _note_passed(self, queue: KeyQueue) -> None:
        """Note that a queue has messages that were passed over, if one of them could go out given room."""
        if queue.passed and queue.can_pass_on():
            self._passed.setdefault(self.table.owners[queue.number], {})[queue] = None

    def _forget_passed(self, queue: KeyQueue) -> None:
        owner = self.table.owners[queue.number]
        queues = self._passed.get(owner)
        if queues is not None:
            queues.pop(queue, None)
            if not queues:
                del self._passed[owner]

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
