"""Deliveries that ended without an ack, and the messages that are charged for it."""

from __future__ import annotations

from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.leases import Lease
from qb.core.subscriptions.messages.message_records import MessageRecord
from qb.core.subscriptions.subscription_state import SubscriptionState
from qb.core.wire.offset_runs import intersect

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


def expire(state: SubscriptionState, leases: list[Lease], now: float) -> None:
    """End leases whose deadlines have passed; later messages of a key that has failed in them are not to blame."""
    parts = [(lease, lease.offsets) for lease in leases]
    if state.keyed is not None:  # one by one in their order, whichever lease they are in
        parts = [(lease, range(at, at + 1)) for lease in leases for run in lease.held() for at in run]
        parts.sort(key=lambda part: (part[0].partition, part[1].start))
    for lease, offsets in parts:
        reason = f"not acked within {state.options.ack_deadline:g} s by {lease.subscriber.name}"
        for record in state.take_back(lease, intersect(lease.offsets, offsets)):
            take_back_followers(state, record)
            fail(state, record, reason, now, charged=not state.breaker.open)


def take_back_followers(state: SubscriptionState, record: MessageRecord) -> None:
    """Take later messages of the same key out of flight: they go out again after this one."""
    for holder, offset in state.queue.followers(record):
        for lease, part in holder.find(record.partition, range(offset, offset + 1)):
            for taken in state.take_back(lease, part):
                state.make_ready(taken)


def leave(state: SubscriptionState, name: str) -> None:
    """Remove a subscriber; what it holds goes to the others at once, without a charge."""
    for record in _remove(state, state.member(name)):
        state.make_ready(record)


def died(state: SubscriptionState, name: str, now: float) -> None:
    """Remove a subscriber whose connection was lost, and find the messages that may have caused it."""
    subscriber = state.member(name)
    named = set(subscriber.started)
    records = _remove(state, subscriber)
    started = _maybe_started(records, named, subscriber.announces)
    if len(started) > 1:
        _suspect(state, started, announced=bool(named))
    for record in records:
        if started == [record]:
            record.alone = True
            state.charge_deaths(record)
            fail(state, record, f"{name} died while it had this message in hand", now)
        else:
            state.make_ready(record)


def _maybe_started(records: list[MessageRecord], named: set[tuple[int, int]], announces: bool) -> list[MessageRecord]:
    if named:
        return [record for record in records if (record.partition, record.offset) in named]
    if announces:
        return [record for record in records if record.attempts == 1]
    return records


def _suspect(state: SubscriptionState, suspects: list[MessageRecord], announced: bool) -> None:
    """Charge no message yet. One that was named with others, or is suspect for the second time, goes out alone next."""
    for record in suspects:
        record.alone = record.alone or announced or bool(record.deaths)
    state.suspect(suspects)


def _remove(state: SubscriptionState, subscriber: JoinedSubscriber) -> list[MessageRecord]:
    """Take a subscriber out, and return what it held."""
    del state.subscribers[subscriber.name]
    state.round_robin.leave(subscriber)
    if state.host is subscriber:
        state.host = None
    records = [record for lease in list(subscriber.leases()) for record in state.take_back(lease, lease.offsets)]
    state.queue.left(subscriber)
    return records
