"""Deliveries that ended without an ack, and the messages that are charged for it."""

from __future__ import annotations

from itertools import islice

from qb.core.pacing import AT_ONCE, spend
from qb.core.subscriptions.messages.departures import Departure, number_in_hand
from qb.core.subscriptions.messages.leases import Lease
from qb.core.subscriptions.messages.message_records import MessageRecord
from qb.core.subscriptions.queues.key_order import KeyOrderedQueue
from qb.core.subscriptions.subscription_state import SubscriptionState
from qb.core.wire.offset_runs import runs_of

MAX_REASON = 500  # characters


def fail(
    state: SubscriptionState,
    record: MessageRecord,
    reason: str,
    now: float,
    *,
    charged: bool = True,
    delay: float | None = None,
) -> None:
    """Let a message back off, or dead-letter it after too many failures."""
    record.reason = reason[:MAX_REASON]
    record.failures += charged
    limit = state.options.max_deliveries
    if charged and limit and record.failures >= limit:
        state.make_dead_lettering(record)
        return
    if delay is None:
        delay = state.options.backoff.delay(record.failures, state.random)
    state.make_backing_off(record, now + delay)


def take_back_due(state: SubscriptionState, now: float) -> bool:
    """Take back what gone subscribers held and what is overdue, a portion of it; returns whether that was all."""
    left = _expire(state, now, _take_back_departed(state, AT_ONCE))
    spend(AT_ONCE - left)
    return not state.departed and state.deadlines.first() > now


def _expire(state: SubscriptionState, now: float, most: int) -> int:
    """End leases whose deadlines have passed, of about so many messages; returns how many more there could be."""
    while most > 0 and (lease := state.deadlines.first_due(now)):
        part = lease.offsets[:most]
        if state.keyed is not None:
            lease, part, looked_at = _first_overdue(state, state.keyed, lease, now)
            most -= looked_at
        records = state.take_back(lease, part)
        reason = f"not acked within {state.options.ack_deadline:g} s by {lease.subscriber.name}"
        for record in records:
            most -= 1 + take_back_followers(state, record)
            fail(state, record, reason, now, charged=not state.breaker.open)
    return most


def _first_overdue(
    state: SubscriptionState, keyed: KeyOrderedQueue, lease: Lease, now: float
) -> tuple[Lease, range, int]:
    """Return the first overdue message of the key of a lease's first message: later ones are not to blame.

    Returns its lease, the message, and how many others were looked at.
    """
    partition, offset = lease.partition, lease.offsets[0]
    key = state.key_in_flight(lease, offset)
    holder = state.subscribers[lease.subscriber.name]
    earlier = [] if key is None else keyed.up_to(holder, key, partition, offset - 1)
    for looked_at, at in enumerate(earlier):
        other = holder.lease_of(partition, at)
        if other is not None and other.due <= now:
            return other, range(at, at + 1), looked_at
    return lease, range(offset, offset + 1), len(earlier)


def take_back_followers(state: SubscriptionState, record: MessageRecord) -> int:
    """Take later messages of the same key out of flight: they go out again after this one. Returns how many."""
    holder, offsets = state.queue.followers(record)
    taken = 0
    for run in runs_of(offsets):
        for lease, part in holder.find(record.partition, run) if holder is not None else ():
            for follower in state.take_back(lease, part):
                state.make_ready(follower)
                taken += 1
    return taken


def leave(state: SubscriptionState, name: str) -> None:
    """Remove a subscriber; what it holds goes to the others at once, without a charge."""
    _depart(state, Departure(state.member(name)))


def died(state: SubscriptionState, name: str, now: float) -> None:
    """Remove a subscriber whose connection was lost, and find the messages that may have caused it."""
    subscriber = state.member(name)
    death = state.new_death() if number_in_hand(subscriber) > 1 else None
    _depart(state, Departure(subscriber, now, frozenset(subscriber.started), death))


def _depart(state: SubscriptionState, departure: Departure) -> None:
    """Take a subscriber out, and begin to take back what it held; decide() goes on with what is left."""
    subscriber = departure.subscriber
    state.count_keys()
    del state.subscribers[subscriber.name]
    state.round_robin.leave(subscriber)
    state.share_windows()
    if state.host is subscriber:
        state.host = None
    subscriber.started.clear()
    state.queue.left(subscriber)
    for lease, part in departure.to_isolate():  # in this step: a save that comes next has it
        for record in state.take_back(lease, part):
            _release_from(state, departure, record)
    state.departed.append(departure)
    _take_back_departed(state, AT_ONCE)


def _take_back_departed(state: SubscriptionState, most: int) -> int:
    """Take back about so many messages of subscribers that are gone; returns how many more there could be."""
    while state.departed and most > 0:
        departure = state.departed[0]
        for lease in list(islice(departure.subscriber.leases(), most)):
            if most > 0:
                records = state.take_back(lease, lease.offsets[:most])
                most -= len(records)
                for record in records:
                    _release_from(state, departure, record)
        if not departure.subscriber.in_flight:
            state.departed.popleft()
    return most


def _release_from(state: SubscriptionState, departure: Departure, record: MessageRecord) -> None:
    """Let a message of a subscriber that is gone go out again; charge it if it alone may have caused the death."""
    if departure.died_at is None or not departure.may_have_had_in_hand(record):
        state.make_ready(record)
    elif departure.death is not None:  # one that was named with others, or is suspect again, goes out alone next
        record.alone = record.alone or bool(departure.named or record.deaths)
        record.suspect_of(departure.death)
        state.make_ready(record)
    else:
        record.alone = True
        state.charge_deaths(record)
        fail(state, record, f"{departure.subscriber.name} died while it had this message in hand", departure.died_at)
