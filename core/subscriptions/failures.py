"""Deliveries that ended without an ack, and who is to blame."""

from __future__ import annotations

from qb.core.subscriptions.leases import JoinedSubscriber, Lease
from qb.core.subscriptions.message_records import MessageRecord, UnexplainedDeath
from qb.core.subscriptions.subscription_state import SubscriptionState

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
    """Let a message rest, or die of its failures."""
    record.reason = reason[:MAX_REASON]
    record.failures += charged
    limit = state.options.max_deliveries
    if charged and limit and record.failures >= limit:
        state.make_die(record)
        return
    if delay is None:
        delay = state.options.backoff.delay(record.failures, state.random)
    state.make_rest(record, now + delay)


def expire(state: SubscriptionState, leases: list[Lease], now: float) -> None:
    """End leases whose deadlines have passed; later messages of a key that has failed in them are not to blame."""
    parts = [(lease.partition, lease.offsets, lease.subscriber) for lease in leases]
    if state.keyed is not None:  # one by one in their order, whichever lease they are in
        parts = [(partition, range(at, at + 1), holder) for partition, offsets, holder in parts for at in offsets]
        parts.sort(key=lambda part: (part[0], part[1].start))
    for partition, offsets, holder in parts:
        reason = f"not acked within {state.options.ack_deadline:g} s by {holder.name}"
        for held, still_held in holder.find(partition, offsets):
            for record in state.take_back(held, still_held):
                take_back_followers(state, record)
                fail(state, record, reason, now, charged=not state.breaker.open)


def take_back_followers(state: SubscriptionState, record: MessageRecord) -> None:
    """Take later messages of the same key out of flight: they go out again after this one."""
    for follower in state.queue.followers(record):
        holder = state.subscribers[follower.holder]
        for lease, part in holder.find(follower.partition, range(follower.offset, follower.offset + 1)):
            for taken in state.take_back(lease, part):
                state.make_ready(taken)


def leave(state: SubscriptionState, name: str) -> None:
    """Let a subscriber go; what it holds goes to the others at once and is not held against anything."""
    for record in _remove(state, state.member(name)):
        state.make_ready(record)


def died(state: SubscriptionState, name: str, now: float) -> None:
    """Let a subscriber go that ended without a word, and find out which message may have been the cause."""
    subscriber = state.member(name)
    named = subscriber.in_hand
    records = _remove(state, subscriber)
    in_hand = _maybe_in_hand(records, named, subscriber.announces)
    if len(in_hand) > 1:
        _suspect(in_hand, together=bool(named))
    for record in records:
        if in_hand == [record]:
            record.alone = True
            record.take_the_blame()
            fail(state, record, f"{name} died while it had this message in hand", now)
        else:
            state.make_ready(record)


def _maybe_in_hand(records: list[MessageRecord], named: set[tuple[int, int]], announces: bool) -> list[MessageRecord]:
    if named:
        return [record for record in records if (record.partition, record.offset) in named]
    if announces:
        return [record for record in records if record.attempts == 1]
    return records


def _suspect(suspects: list[MessageRecord], together: bool) -> None:
    """Charge nobody yet. Who was named together with others, or is suspect for the second time, goes alone next."""
    death = UnexplainedDeath()
    for record in suspects:
        record.alone = record.alone or together or bool(record.deaths)
        record.deaths = (*record.suspicions, death)


def _remove(state: SubscriptionState, subscriber: JoinedSubscriber) -> list[MessageRecord]:
    """Take a subscriber out, and return what it held."""
    del state.subscribers[subscriber.name]
    state.turn.leave(subscriber)
    if state.host is subscriber:
        state.host = None
    records = [record for lease in list(subscriber.leases()) for record in state.take_back(lease, lease.offsets)]
    state.queue.left(subscriber)
    return records
