"""All that a subscription knows, and the moves of a message between its states."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from random import Random
from typing import TypeVar

from qb.core.pacing import spend
from qb.core.subscriptions.messages.cursor import Cursor
from qb.core.subscriptions.messages.deadlines import NEVER, Deadlines
from qb.core.subscriptions.messages.departures import Departure
from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.leases import Lease
from qb.core.subscriptions.messages.message_records import MessageRecord, MessageState, UnexplainedDeath
from qb.core.subscriptions.outage_breaker import OutageBreaker
from qb.core.subscriptions.push_decisions import DeadLetterDecision
from qb.core.subscriptions.queues.key_order import KeyOrderedQueue, queue_key
from qb.core.subscriptions.queues.round_robin import RoundRobin
from qb.core.subscriptions.queues.shared_queue import ReadyQueue, SharedQueue
from qb.core.subscriptions.shared_room import OpenMessages, SharedRoom
from qb.core.subscriptions.subscription_options import SubscriptionMode, SubscriptionOptions
from qb.core.wire.columns import Numbers, Offsets
from qb.core.wire.errors import BadRequest, NotJoined
from qb.core.wire.offset_runs import intersect

Item = TypeVar("Item")
MAX_WAITING = 10_000  # messages that came back, or were passed over; then nothing fresh is started


class SubscriptionState:
    """One subscription. The modules of this room may read it; every move of a message goes through its methods."""

    def __init__(
        self,
        name: str,
        options: SubscriptionOptions,
        starts: Mapping[int, int],
        random: Random,
        shared: SharedRoom | None = None,
    ) -> None:
        shared = SharedRoom() if shared is None else shared
        self.open = OpenMessages(name, shared)
        self.settlements = shared.settlements
        self.name = name
        self.options = options
        self.random = random
        self.paused = False
        self.snapshots = 0  # taken since the start
        self.changed: set[int] = set(starts)  # partitions that have changed since the last snapshot
        self.head_changed = True  # has what is not of one partition?
        self.waiting = 0  # messages that are waiting, of all partitions
        self.delivered = sum(starts.values())  # the sum of all cursors' `next`
        self.deaths = 0  # the number of the last unexplained death
        self.acked = 0  # since the start, as is the next one
        self.nacked = 0
        self.redelivered = 0
        self.dead_lettered = 0
        self.in_rows = 0  # messages in flight that have no key queues: their leases have the keys
        self.cursors = {partition: Cursor(partition, start) for partition, start in sorted(starts.items())}
        self.fresh: OrderedDict[int, Cursor] = OrderedDict()  # those with fresh messages at hand, in turn
        self.rounds = 0  # in which fresh messages went out
        self.subscribers: dict[str, JoinedSubscriber] = {}
        self.departed: deque[Departure] = deque()  # whose messages are being taken back; meanwhile nothing goes out
        self.round_robin = RoundRobin(
            1 if options.mode in (SubscriptionMode.EXCLUSIVE, SubscriptionMode.FAILOVER) else None
        )
        self.keyed = KeyOrderedQueue() if options.mode is SubscriptionMode.KEY_SHARED else None
        self.queue: ReadyQueue = SharedQueue() if self.keyed is None else self.keyed
        self.isolated: dict[MessageRecord, None] = {}  # few, if any
        self.host: JoinedSubscriber | None = None  # the subscriber reserved for an isolated message, or busy with it
        self.deadlines: Deadlines[Lease] = Deadlines()
        self.backing_off: Deadlines[MessageRecord] = Deadlines()
        self.dead_lettering: list[DeadLetterDecision] = []  # not yet returned by decide()
        self.breaker = OutageBreaker()
        self.message_bytes = 0.0  # about the size of a message; 0: not known yet

    def cursor(self, partition: int) -> Cursor:
        """Return a partition's cursor. Raises BadRequest."""
        try:
            return self.cursors[partition]
        except KeyError:
            raise BadRequest(f"subscription {self.name!r} has no partition {partition}") from None

    def member(self, name: str) -> JoinedSubscriber:
        """Return a joined subscriber. Raises NotJoined."""
        try:
            return self.subscribers[name]
        except KeyError:
            raise NotJoined(f"{name!r} has not joined subscription {self.name!r}") from None

    def close(self) -> None:
        """Let go of what is shared with other subscriptions, and of the leases: they know their subscribers."""
        self.open.close()
        for cursor in self.cursors.values():
            self.settlements.forget(cursor)
        for holder in self.holders():
            holder.forget_all()

    def count_waiting(self, change: int) -> None:
        """So many more messages are waiting, or, if it is negative, fewer."""
        self.waiting += change
        self.open.add(change)

    def holders(self) -> Iterator[JoinedSubscriber]:
        """Return all that have leases: the subscribers, and those that are gone."""
        yield from self.subscribers.values()
        yield from (departure.subscriber for departure in self.departed)

    def share_windows(self) -> None:
        """The number of subscribers has changed: what may be in flight together is shared anew."""
        for subscriber in self.subscribers.values():
            subscriber.share(len(self.subscribers))

    @property
    def dirty(self) -> bool:
        """Has it changed since the last snapshot?"""
        return self.head_changed or bool(self.changed)

    def move(self, cursor: Cursor, upcoming: int, end: int) -> None:
        """Let fresh messages of a partition begin at `upcoming`, and be at hand below `end`."""
        if upcoming != cursor.next:
            self.delivered += upcoming - cursor.next
            self.changed.add(cursor.partition)
        cursor.next, cursor.end = upcoming, end
        if upcoming < end:
            self.fresh.setdefault(cursor.partition, cursor)
        else:
            self.fresh.pop(cursor.partition, None)

    def add_partition(self, partition: int, start: int) -> None:
        """Begin one more partition at this offset."""
        self.cursors[partition] = Cursor(partition, start)
        self.delivered += start
        self.changed.add(partition)

    def lease(
        self,
        subscriber: JoinedSubscriber,
        partition: int,
        offsets: range,
        attempt: int,
        *,
        recorded: bool,
        now: float,
        held: bytearray | None = None,
        keys: tuple[str | None, ...] = (),
        numbers: Numbers | None = None,
    ) -> Lease:
        """Put a run in flight; of its offsets, those with a 1 in `held`, or all.

        In key_shared the lease knows the keys of messages without a record: by their numbers in the table of keys,
        where they are counted, or as `keys` where they are not.
        """
        lease = Lease(subscriber, partition, offsets, attempt, recorded, now, held)
        if keys:
            lease.keys, lease.keys_from = keys, offsets.start
            self.in_rows += lease.count
        elif numbers is not None:
            lease.numbers, lease.keys_from = numbers, offsets.start
        subscriber.add(lease)
        self.open.add(lease.count)
        self.deadlines.set(lease, now + self.options.ack_deadline)
        self.changed.add(partition)
        return lease

    def release(self, lease: Lease, part: range) -> list[range]:
        """End the lease of some messages and return those that were held; the caller says where they are now."""
        before = lease.count
        released = lease.subscriber.release(lease, part)
        self._count_released(lease, before - lease.count)
        if released and lease.subscriber.started:
            lease.subscriber.started.difference_update((lease.partition, offset) for run in released for offset in run)
        self.changed.add(lease.partition)
        return released

    def release_scattered(
        self, subscriber: JoinedSubscriber, lease: Lease, offsets: Offsets
    ) -> tuple[Offsets, Offsets]:
        """End the lease of these offsets; returns those that were held, and the others.

        The caller says where those are now that were held.
        """
        released, others = subscriber.release_scattered(lease, offsets)
        self._count_released(lease, len(released))
        if subscriber.started:
            subscriber.started.difference_update((lease.partition, offset) for offset in released.tolist())
        self.changed.add(lease.partition)
        return released, others

    def _count_released(self, lease: Lease, count: int) -> None:
        self.open.add(-count)
        if lease.keys:
            self.in_rows -= count

    def count_keys(self) -> None:
        """Let the table of keys count every message in flight: from now on it matters which key it has."""
        if self.keyed is None or not self.in_rows:
            return
        for subscriber in self.subscribers.values():
            for lease in subscriber.leases():
                if lease.keys:
                    lease.numbers, lease.keys = self.keyed.table.number_all(lease.keys), ()
                    self.keyed.table.take(lease.numbers_at(lease.held_offsets()), subscriber)
        spend(self.in_rows // 4)
        self.in_rows = 0

    def take_back(self, lease: Lease, part: range) -> list[MessageRecord]:
        """End the lease of some messages and return them with their records, in offset order."""
        self.count_keys()
        released = self.release(lease, part)
        cursor = self.cursors[lease.partition]
        records = []
        for offset in chain.from_iterable(released):
            record = cursor.leased.pop(offset, None) or self._new_record(lease, offset)
            record.holder = lease.subscriber.name
            records.append(record)
        return records

    def _new_record(self, lease: Lease, offset: int) -> MessageRecord:
        record = MessageRecord(lease.partition, offset, lease.attempt)
        if self.keyed is not None:
            number = lease.number_at(offset)
            record.key = self.keyed.table.name(number)
            self.keyed.admit(record)
            self.keyed.table.give_back(number)
        return record

    def pass_on(self, cursor: Cursor, offsets: list[int]) -> None:
        """Note that messages that were passed over go out now; lease() follows."""
        for offset in offsets:
            del cursor.passed[offset]
        self.count_waiting(-len(offsets))

    def make_ready(self, record: MessageRecord) -> None:
        """Let a message go out as soon as there is a window, or an idle subscriber if it is to be alone."""
        self._wait(record, MessageState.ISOLATED if record.alone else MessageState.READY)
        if record.alone:
            self.queue.hold(record)
            self.isolated[record] = None
        else:
            self.queue.push(record)

    def make_backing_off(self, record: MessageRecord, until: float) -> None:
        """Keep a message back for a while."""
        self._wait(record, MessageState.BACKING_OFF)
        self.queue.hold(record)
        self.backing_off.set(record, until)

    def make_dead_lettering(self, record: MessageRecord) -> None:
        """Keep a message back until its dead letter is durable."""
        self._wait(record, MessageState.DEAD_LETTERING)
        self.queue.hold(record)
        self.dead_lettering.append(DeadLetterDecision(record.partition, record.offset, record.attempts, record.reason))

    def make_leased(self, record: MessageRecord, subscriber: JoinedSubscriber) -> None:
        """Note that a waiting message goes to a subscriber; lease() follows."""
        cursor = self.cursors[record.partition]
        self._stop_waiting(cursor, record)
        self.isolated.pop(record, None)
        cursor.leased[record.offset] = record
        record.state = MessageState.LEASED
        record.holder = subscriber.name
        record.attempts += 1
        if record.attempts > 1:
            self.redelivered += 1
            self.head_changed = True

    def settle(self, record: MessageRecord) -> None:
        """Forget a message that has a record; the caller has ended its lease."""
        cursor = self.cursors[record.partition]
        self._stop_waiting(cursor, record)
        cursor.leased.pop(record.offset, None)
        self.isolated.pop(record, None)
        record.state = MessageState.SETTLED
        record.due = NEVER
        self.queue.settled(record)
        self.changed.add(record.partition)

    def settle_fresh(self, lease: Lease, released: Iterable[range | Offsets]) -> None:
        """Forget messages that have no record; the caller has ended this lease of them."""
        if self.keyed is not None and lease.numbers is not None:
            for part in released:
                self.keyed.settled_fresh(lease.numbers_at(part))

    def find_acked(self, subscriber: JoinedSubscriber, partition: int, run: range) -> list[tuple[Lease, range]]:
        """Return what the subscriber holds of a run, and what it held before it left and joined again."""
        found = subscriber.find(partition, run)
        for departure in self.departed:
            if departure.subscriber.name == subscriber.name:
                found += departure.subscriber.find(partition, run)
        return found

    def key_in_flight(self, lease: Lease, offset: int) -> str | None:
        """Return the key of a message that is held under this lease, in key_shared."""
        self.count_keys()
        if lease.recorded or self.keyed is None:
            return self.cursors[lease.partition].leased[offset].key
        return self.keyed.table.name(lease.number_at(offset))

    def is_held_up(self, cursor: Cursor) -> bool:
        """Return whether the fresh messages of a partition wait for the window of the subscriber of the first one."""
        owner = cursor.held_up_by
        if owner is None or owner.room > 0 or self.subscribers.get(owner.name) is not owner:
            return False
        return not self.round_robin.has_short_subscriber()

    def forget(self, cursor: Cursor, end: int) -> None:
        """Settle whatever is open below this offset, in flight or waiting."""
        for holder in self.holders():
            for lease in list(holder.leases(cursor.partition)):
                released = self.release(lease, intersect(lease.offsets, range(end)))
                if not lease.recorded:
                    self.settle_fresh(lease, released)
        waiting = _pop_below(cursor.waiting, end)
        self.count_waiting(-len(waiting))
        records = waiting + _pop_below(cursor.leased, end)
        for record in records:
            record.state = MessageState.SETTLED
            record.due = NEVER
        self.isolated = {record: None for record in self.isolated if record.state is MessageState.ISOLATED}
        if self.keyed is not None:
            passed = _pop_below(cursor.passed, end)
            self.count_waiting(-len(passed))
            self.keyed.drop(cursor.partition, end, {*map(queue_key, records), *passed})
        self.dead_lettering = [d for d in self.dead_lettering if d.partition != cursor.partition or d.offset >= end]
        self.changed.add(cursor.partition)

    def _wait(self, record: MessageRecord, to: MessageState) -> None:
        waiting = self.cursors[record.partition].waiting
        if record.offset not in waiting:
            self.count_waiting(1)
        waiting[record.offset] = record
        record.state = to
        self.changed.add(record.partition)

    def _stop_waiting(self, cursor: Cursor, record: MessageRecord) -> None:
        if cursor.waiting.pop(record.offset, None) is not None:
            self.count_waiting(-1)

    def new_death(self) -> UnexplainedDeath:
        """Return the death of a subscriber that several messages may have caused; none is a suspect of it yet."""
        self.deaths += 1
        return UnexplainedDeath(self.deaths)

    def charge_deaths(self, record: MessageRecord) -> None:
        """Count the unexplained deaths of which it is a suspect as its failures; the others are suspects no more."""
        for death in record.suspicions:
            death.explained = True
            record.failures += 1
            self.changed |= death.partitions
        record.deaths = ()


def _pop_below(by_offset: dict[int, Item], end: int) -> list[Item]:
    """Take out what belongs to offsets below the end."""
    return [by_offset.pop(offset) for offset in [offset for offset in by_offset if offset < end]]
