"""Decides which messages go to which subscribers now."""

from __future__ import annotations

from itertools import groupby, islice

from qb.core.offset_columns import marked, near_each_other, runs_of_column
from qb.core.pacing import AT_ONCE
from qb.core.subscriptions.failures import take_back_due
from qb.core.subscriptions.messages.adaptive_window import MOST_BY_KEY
from qb.core.subscriptions.messages.cursor import Cursor
from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.message_records import MessageRecord, MessageState
from qb.core.subscriptions.push_decisions import Decision, PushDecision
from qb.core.subscriptions.queues.key_order import KeyOrderedQueue
from qb.core.subscriptions.subscription_state import MAX_WAITING, SubscriptionState
from qb.core.wire.columns import Numbers, Offsets, np
from qb.core.wire.offset_runs import runs_of

REDELIVERED_AT_ONCE = 4 * AT_ONCE  # messages that had come back and go out in one decision: a save precedes each

LOOKED_AT_ONCE = 5 * AT_ONCE  # fresh messages of key_shared that one decision looks at, each by its key


def decide(state: SubscriptionState, now: float) -> list[Decision]:
    """Carry out what is due, and return everything that should be done now."""
    decisions: list[Decision] = []
    if take_back_due(state, now) and _end_backoffs(state, now):
        decisions += state.dead_lettering[:AT_ONCE]
        del state.dead_lettering[:AT_ONCE]
        decisions += _deliveries(state, now)
    # Else what goes out next is known when all has come back; next_wakeup() says at once.
    if state.keyed is not None:
        _leave_unread(state)
    return decisions


def may_decide(state: SubscriptionState, now: float) -> bool:
    """Return False if decide() would surely change nothing: nothing is due, and no window has a free slot."""
    return bool(
        any(member.free > 0 for member in state.round_robin)
        or state.departed
        or state.dead_lettering
        or state.isolated
        or state.host
        or state.deadlines.first() <= now
        or state.backing_off.first() <= now
    )


def _end_backoffs(state: SubscriptionState, now: float) -> bool:
    """Make ready what has backed off long enough, a portion of it; returns whether that was all."""
    for record in islice(state.backing_off.pop_due(now), AT_ONCE):
        if record.state is MessageState.DEAD_LETTERING:
            state.make_dead_lettering(record)
        else:
            state.make_ready(record)
    return state.backing_off.first() > now


def next_wakeup(state: SubscriptionState, now: float) -> float:
    """Return when decide() has to be called again if nothing else happens, or NEVER."""
    if state.departed:
        return now
    wakeup = min(state.deadlines.first(), state.backing_off.first())
    breaker = state.breaker
    if breaker.open and breaker.next_probe > now and not state.paused and _has_work(state):
        wakeup = min(wakeup, breaker.next_probe)
    return wakeup


def _has_work(state: SubscriptionState) -> bool:
    return bool(len(state.round_robin) and (state.fresh or state.queue.may_have_work() or state.isolated))


def _deliveries(state: SubscriptionState, now: float) -> list[PushDecision]:
    limit = state.breaker.allowance(now)
    if state.paused or limit == 0:
        return []
    deliveries = _offer_isolated(state, now)
    if not (limit and deliveries):
        deliveries += _offer_ready(state, now, limit)
    if not (limit and deliveries) and sum(each.size for each in deliveries) < REDELIVERED_AT_ONCE:
        deliveries += _offer_fresh(state, now, limit)
    if limit and deliveries:
        state.breaker.probed(now)
    return deliveries


def _offer_isolated(state: SubscriptionState, now: float) -> list[PushDecision]:
    """Give the first isolated message to a subscriber that has nothing else, or begin to empty one for it."""
    if not state.isolated and state.host is None:
        return []
    if state.host is not None:
        if state.host.in_flight:
            return []
        state.host.reserved = False
        state.host = None
    able = (record for record in state.isolated if state.queue.is_first(record))
    record = min(able, key=lambda record: record.offset, default=None)
    host = _choose_host(state, record) if record else None
    if record is None or host is None:
        return []
    host.reserved = True
    state.host = host
    if host.in_flight or host.free <= 0:
        return []
    state.queue.bind(record, host)
    return _hand_over(state, host, [record], now)


def _choose_host(state: SubscriptionState, record: MessageRecord) -> JoinedSubscriber | None:
    owner = state.queue.owner(record)
    hosts = [member for member in state.round_robin if not member.blocked and owner in (None, member)]
    idle = (host for host in hosts if not host.in_flight)
    return next(idle, hosts[0] if hosts else None)


def _offer_ready(state: SubscriptionState, now: float, limit: int | None) -> list[PushDecision]:
    assigned: dict[JoinedSubscriber, list[MessageRecord]] = {}
    for subscriber, record in islice(state.queue.assign(state.round_robin), limit or REDELIVERED_AT_ONCE):
        subscriber.assigned += 1
        assigned.setdefault(subscriber, []).append(record)
    deliveries = [
        deliver for subscriber, records in assigned.items() for deliver in _hand_over(state, subscriber, records, now)
    ]
    if state.keyed is not None and not (limit and deliveries):
        passed_on = state.keyed.pass_on(state.round_robin, limit or REDELIVERED_AT_ONCE)
        for (subscriber, partition), (offsets, numbers) in passed_on.items():
            state.pass_on(state.cursors[partition], offsets)
            order = np.argsort(offsets)
            both = np.array(offsets)[order], np.array(numbers, np.int32)[order]
            deliveries += _lease_scattered(state, subscriber, partition, *both, now)
    return deliveries


def _hand_over(
    state: SubscriptionState, subscriber: JoinedSubscriber, records: list[MessageRecord], now: float
) -> list[PushDecision]:
    """Lease these records to the subscriber, in this order."""
    deliveries = []
    subscriber.assigned = 0
    for record in records:
        state.make_leased(record, subscriber)
    for (partition, attempt, suspects), group in groupby(records, key=_common):
        runs = tuple(runs_of(record.offset for record in group))
        for run in runs:
            state.lease(subscriber, partition, run, attempt, recorded=True, now=now)
        deliveries.append(PushDecision(subscriber.name, partition, runs, attempt, suspects))
    return deliveries


def _common(record: MessageRecord) -> tuple[int, int, bool]:
    """What the messages of one delivery have in common."""
    return record.partition, record.attempts, bool(record.suspicions)


def _offer_fresh(state: SubscriptionState, now: float, limit: int | None) -> list[PushDecision]:
    """Share the open windows evenly among the partitions that have fresh messages at hand.

    Where there are more of them than messages can go out, the partitions take turns.
    """
    if not state.fresh or state.waiting >= MAX_WAITING:
        return []
    room = min(state.round_robin.room(), state.open.room)
    room = room if limit is None else min(limit, room)
    deliveries: list[PushDecision] = []
    state.rounds += room > 0
    before = -1
    while state.fresh and room > 0 and state.waiting < MAX_WAITING and state.delivered != before:
        before = state.delivered
        for cursor, share in _shares(state, room):
            leased = _lease_fresh(state, cursor, min(share, room), now)
            room -= sum(each.size for each in leased)
            deliveries += leased
    return deliveries


def _leave_unread(state: SubscriptionState) -> None:
    """Let the messages that were not looked at be read again when there is room: their bytes are not kept.

    This holds after every decision, so that wanted() begins with the first message that was not looked at.
    """
    for cursor in list(state.fresh.values()):
        cursor.keys_at_hand = ()
        state.move(cursor, cursor.next, cursor.next)


def _shares(state: SubscriptionState, room: int) -> list[tuple[Cursor, int]]:
    """Return the partitions whose turn it is, and how many messages each may send."""
    if len(state.fresh) == 1:
        return [(cursor, room) for cursor in state.fresh.values()]
    chosen = list(islice(state.fresh.values(), room))
    if len(chosen) < len(state.fresh):
        for cursor in chosen:
            state.fresh.move_to_end(cursor.partition)
    first = state.rounds % len(chosen)
    return [(cursor, -(-room // len(chosen))) for cursor in chosen[first:] + chosen[:first]]


def _lease_fresh(state: SubscriptionState, cursor: Cursor, count: int, now: float) -> list[PushDecision]:
    if state.keyed is not None:
        (subscriber, *others) = state.round_robin
        if others or state.waiting or subscriber.window > MOST_BY_KEY:
            return _lease_by_key(state, state.keyed, cursor, count, now)
        return _lease_whatever_the_keys(state, subscriber, cursor, count, now)
    count = min(count, cursor.end - cursor.next)
    distributed = state.round_robin.distribute(cursor.next, count)
    state.move(cursor, cursor.next + count, cursor.end)
    for subscriber, run in distributed:
        state.lease(subscriber, cursor.partition, run, 1, recorded=False, now=now)
    return [PushDecision(subscriber.name, cursor.partition, (run,), 1) for subscriber, run in distributed]


def _lease_whatever_the_keys(
    state: SubscriptionState, subscriber: JoinedSubscriber, cursor: Cursor, count: int, now: float
) -> list[PushDecision]:
    """Lease fresh messages of key_shared to the only subscriber, in their order, and keep their keys with the lease."""
    keys = tuple(cursor.take_keys(min(count, subscriber.room)))
    if not keys:
        return []
    run = range(cursor.next, cursor.next + len(keys))
    cursor.held_up_by = None
    state.move(cursor, run.stop, cursor.end)
    state.lease(subscriber, cursor.partition, run, 1, recorded=False, now=now, keys=keys)
    return [PushDecision(subscriber.name, cursor.partition, (run,), 1)]


def _lease_by_key(
    state: SubscriptionState, keyed: KeyOrderedQueue, cursor: Cursor, count: int, now: float
) -> list[PushDecision]:
    state.count_keys()
    first = cursor.next
    choice, numbers = keyed.distribute(cursor, state.round_robin, count)
    cursor.held_up_by = choice.held_up_by
    cursor.take_keys(choice.looked_at)
    state.count_waiting(len(choice.passed))
    state.move(cursor, first + choice.looked_at, cursor.end)
    return [
        deliver
        for subscriber, indexes in choice.given
        for deliver in _lease_scattered(state, subscriber, cursor.partition, indexes + first, numbers[indexes], now)
    ]


def _lease_scattered(
    state: SubscriptionState,
    subscriber: JoinedSubscriber,
    partition: int,
    offsets: Offsets,
    numbers: Numbers,
    now: float,
) -> list[PushDecision]:
    """Lease messages that were never delivered, in offset order: one lease for those that lie near each other."""
    for near in near_each_other(offsets):
        span, held = marked(offsets[near])
        keys = np.zeros(len(span), np.int32)
        keys[offsets[near] - span.start] = numbers[near]
        state.lease(subscriber, partition, span, 1, recorded=False, now=now, held=held, numbers=keys)
    return [PushDecision(subscriber.name, partition, tuple(runs_of_column(offsets)), 1)]


def room(state: SubscriptionState) -> int:
    """Return how many fresh messages could be used now.

    In key_shared it is more than the windows have room for if some are full: what belongs to those is passed over.
    """
    if state.paused or state.departed or state.waiting >= MAX_WAITING:
        return 0
    free = min(state.round_robin.room(), state.open.room)
    if state.breaker.open:
        return 0 if state.queue.may_have_work() else min(free, 1)
    if state.keyed is not None and free:
        return min(LOOKED_AT_ONCE, free * -(-len(state.round_robin) // state.round_robin.with_room()))
    return free


def wanted(state: SubscriptionState, partition: int) -> range:
    """Return which fresh messages could go out beyond those at hand: read and offer them, as far as they exist."""
    cursor = state.cursor(partition)
    usable = 0 if state.is_held_up(cursor) else room(state)
    return range(cursor.end, max(cursor.end, cursor.next + usable))
