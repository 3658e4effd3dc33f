"""A subscription in numbers, and one message in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from qb.core.subscriptions.messages.cursor import Cursor
from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.leases import Lease, LeaseIndex
from qb.core.subscriptions.messages.message_records import MessageRecord, MessageState
from qb.core.subscriptions.queues.key_order import KeyOrderedQueue
from qb.core.subscriptions.queues.key_queue import KeyQueue
from qb.core.subscriptions.subscription_state import MAX_WAITING, SubscriptionState

LISTED = 5  # subscribers named in one sentence


class PartitionReport(msgspec.Struct, frozen=True):
    """One partition. If `floor` is below `end`, it is the oldest message that is not settled."""

    partition: int
    floor: int
    next: int
    end: int
    lag: int  # messages not settled
    in_flight: int
    waiting: int


class SubscriberReport(msgspec.Struct, frozen=True):
    """One subscriber."""

    subscriber: str
    in_flight: int
    unsaved_acks: int  # these keep their slots of the window until they are durable
    window: int
    active: bool  # False: it stands by


class SubscriptionTotals(msgspec.Struct, frozen=True):
    """A subscription in numbers that cost the same however many partitions and messages it has."""

    subscription_id: str
    mode: str
    paused: bool
    outage: bool  # is the breaker open?
    lag: int  # messages not settled
    in_flight: int
    waiting: int
    redelivered: int
    dead_lettered: int
    position: int  # of all partitions together: it moves with every delivery and every seek


class SubscriptionReport(msgspec.Struct, frozen=True):
    """A subscription in numbers."""

    subscription_id: str
    mode: str
    paused: bool
    outage: bool  # is the breaker open?
    lag: int
    in_flight: int
    waiting: int
    redelivered: int
    dead_lettered: int
    partitions: list[PartitionReport]
    subscribers: list[SubscriberReport]


def floor(state: SubscriptionState, cursor: Cursor) -> int:
    """Return the lowest offset that is not settled."""
    indexes = (holder.partitions().get(cursor.partition) for holder in state.holders())
    leased = (index.first for index in indexes if index is not None)
    return min([cursor.next, *cursor.waiting, *cursor.passed, *leased])


def describe(
    state: SubscriptionState, ends: Mapping[int, int], known: list[PartitionReport] | None = None
) -> SubscriptionReport:
    """Return the numbers; `ends` are the visible ends of the partitions."""
    active = set(state.round_robin)
    totals = msgspec.structs.asdict(totals_of(state, sum(ends.values())))
    del totals["position"]
    return SubscriptionReport(
        **totals,
        partitions=list(partitions(state, ends)) if known is None else known,
        subscribers=[
            SubscriberReport(member.name, member.in_flight, member.unsaved, member.window, member in active)
            for member in state.subscribers.values()
        ],
    )


def totals_of(state: SubscriptionState, ends: int) -> SubscriptionTotals:
    """Return the numbers of all partitions together; `ends` is the sum of their visible ends."""
    in_flight = sum(subscriber.in_flight for subscriber in state.subscribers.values())
    waiting = state.waiting + sum(departure.subscriber.in_flight for departure in state.departed)
    return SubscriptionTotals(
        subscription_id=state.name,
        mode=state.options.mode,
        paused=state.paused,
        outage=state.breaker.open,
        lag=max(0, ends - state.delivered) + in_flight + waiting,
        in_flight=in_flight,
        waiting=waiting,
        redelivered=state.redelivered,
        dead_lettered=state.dead_lettered,
        position=state.delivered,
    )


def partitions(state: SubscriptionState, ends: Mapping[int, int]) -> Iterator[PartitionReport]:
    """Yield each partition that has an end; others may run in between."""
    leased: dict[int, list[LeaseIndex]] = {}
    returning: dict[int, list[LeaseIndex]] = {}  # of subscribers that are gone
    for holder in state.holders():
        indexes = leased if holder.name in state.subscribers else returning
        for partition, index in holder.partitions().items():
            indexes.setdefault(partition, []).append(index)
    for cursor in list(state.cursors.values()):
        if cursor.partition in ends:
            yield _partition(
                cursor,
                ends[cursor.partition],
                [each for each in leased.get(cursor.partition, ()) if each],
                [each for each in returning.get(cursor.partition, ()) if each],
            )


def _partition(cursor: Cursor, end: int, leased: list[LeaseIndex], returning: list[LeaseIndex]) -> PartitionReport:
    in_flight = sum(index.count for index in leased)
    waiting = len(cursor.waiting) + len(cursor.passed) + sum(index.count for index in returning)
    firsts = (index.first for index in (*leased, *returning))
    lowest = min([cursor.next, *cursor.waiting, *cursor.passed, *firsts])
    lag = max(0, end - cursor.next) + in_flight + waiting
    return PartitionReport(cursor.partition, lowest, cursor.next, end, lag, in_flight, waiting)


def explain(state: SubscriptionState, partition: int, offset: int, end: int, now: float) -> str:
    """Say in words where a message is and why; `end` is the visible end of its partition. Raises BadRequest."""
    cursor = state.cursor(partition)
    if offset >= end:
        return f"not published yet: partition {partition} ends at {end}"
    if lease := _lease_of(state.subscribers.values(), partition, offset):
        return _in_flight(lease, offset, now)
    if lease := _lease_of((departure.subscriber for departure in state.departed), partition, offset):
        return f"waiting for its turn, delivered {lease.attempt} times; being taken back from {lease.subscriber.name}"
    if record := cursor.waiting.get(offset):
        return _waiting(state, record, now)
    if state.keyed is not None and offset in cursor.passed:
        return f"waiting for its turn, never delivered; {_why_passed(state, state.keyed, cursor, offset, now)}"
    if offset < cursor.next:
        return _settled(state, cursor, offset, now)
    before = offset - cursor.next
    held_up = cursor.held_up_by if state.is_held_up(cursor) else None
    why = _why_not_sent(state, state.round_robin if held_up is None else [held_up], now)
    queue = f" ({before} fresh before it)" if before else ""
    return f"fresh, never delivered{queue}; {why}"


def _lease_of(holders: Iterable[JoinedSubscriber], partition: int, offset: int) -> Lease | None:
    found = (holder.lease_of(partition, offset) for holder in holders)
    return next((lease for lease in found if lease is not None), None)


def _in_flight(lease: Lease, offset: int, now: float) -> str:
    subscriber = lease.subscriber
    handling = ", which is handling it" if (lease.partition, offset) in subscriber.started else ""
    alone = ", alone" if subscriber.reserved and subscriber.in_flight == 1 else ""
    return (
        f"in flight to {subscriber.name}{handling}{alone}: attempt {lease.attempt}, "
        f"pushed {now - lease.since:.1f} s ago, to be acked within {lease.due - now:.1f} s"
    )


def _waiting(state: SubscriptionState, record: MessageRecord, now: float) -> str:
    past = f"delivered {record.attempts} times"
    if record.reason:
        past += f", last failure: {record.reason}"
    if record.state is MessageState.DEAD_LETTERING:
        target = state.options.dead_letters_of(state.name)
        return f"being dead-lettered to {target} after {record.failures} failures; {past}"
    if record.state is MessageState.BACKING_OFF:
        return f"in backoff for another {max(0.0, record.due - now):.1f} s; {past}"
    if record.state is MessageState.ISOLATED:
        return f"waiting to be offered alone to a subscriber that has nothing else in flight; {past}"
    return f"waiting for its turn, {past}; {_why_not_ready(state, record, now)}"


def _why_not_ready(state: SubscriptionState, record: MessageRecord, now: float) -> str:
    if state.keyed is None or record.key is None:
        return _why_not_sent(state, state.round_robin, now)
    queue = state.keyed.key_queue(record)
    if before := queue.recorded.before(record):
        return f"behind offset {before.offset} of partition {before.partition}, which has the same key {record.key!r}"
    return _why_not_sent_by_owner(state, queue, now)


def _why_passed(state: SubscriptionState, keyed: KeyOrderedQueue, cursor: Cursor, offset: int, now: float) -> str:
    queue = keyed.queue_of(cursor.passed[offset])
    before = queue.before_passed(cursor.partition, offset)
    if before is not None:
        return f"behind offset {before} of partition {cursor.partition}, which has the same key {queue.key!r}"
    return _why_not_sent_by_owner(state, queue, now)


def _why_not_sent_by_owner(state: SubscriptionState, queue: KeyQueue, now: float) -> str:
    if queue.full:
        return f"{queue.in_flight} messages of key {queue.key!r} are in flight, and no more may be"
    if queue.owner is not None:
        return f"key {queue.key!r} belongs to {queue.owner.name}; {_why_not_sent(state, [queue.owner], now)}"
    return _why_not_sent(state, state.round_robin, now)


def _why_not_sent(state: SubscriptionState, members: Iterable[JoinedSubscriber], now: float) -> str:
    members = list(members)
    if state.paused:
        return "the subscription is paused"
    if not members:
        return "the subscription has no subscribers"
    if state.breaker.open:
        return f"nearly everything fails, so only probes go out: the next in {state.breaker.next_probe - now:.1f} s"
    if any(member.room > 0 for member in members):
        full = state.waiting >= MAX_WAITING
        if full:
            return f"{MAX_WAITING} others wait to be delivered again"
        return "next to be delivered" if state.open.room else f"{state.open.why_none} (QB_MAX_OPEN_MESSAGES)"
    windows = ", ".join(_window(member) for member in members[:LISTED])
    more = f" and {len(members) - LISTED} more" if len(members) > LISTED else ""
    return f"waiting for the window of {windows}{more}"


def _window(member: JoinedSubscriber) -> str:
    if member.blocked:
        return f"{member.name} (does not read)"
    if member.reserved:
        return f"{member.name} (kept for a message that has to be alone)"
    unsaved = f", {member.unsaved} acks are being saved" if member.unsaved else ""
    adapts = ", a window that adapts itself" if member.adapting else ""
    return f"{member.name} ({member.in_flight} of {member.window} in flight{adapts}{unsaved})"


def _settled(state: SubscriptionState, cursor: Cursor, offset: int, now: float) -> str:
    if settlement := state.settlements.find(cursor, offset):
        return f"{settlement.how}, {now - settlement.when:.1f} s ago"
    if offset < cursor.start:
        return f"skipped: the subscription begins at offset {cursor.start}"
    if offset < cursor.dropped:
        return "settled, or dropped by retention before it was"
    if (since := state.settlements.since(cursor)) is not None:
        return f"settled more than {now - since:.1f} s ago; by whom is no longer remembered"
    return "settled before the broker started"
