"""Acks, nacks, extensions and starts: requests of subscribers about messages that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from qb.core.subscriptions.failures import fail, take_back_followers
from qb.core.subscriptions.messages.cursor import Cursor
from qb.core.subscriptions.messages.leases import Lease
from qb.core.subscriptions.messages.message_records import MessageState
from qb.core.subscriptions.subscription_options import LONGEST, check_between
from qb.core.subscriptions.subscription_state import SubscriptionState
from qb.core.wire.offset_runs import intersect


def ack(state: SubscriptionState, name: str, partition: int, runs: Iterable[range], now: float) -> int:
    """Settle messages that the subscriber holds, or had last; returns how many there were."""
    subscriber = state.member(name)
    cursor = state.cursor(partition)
    delivered = range(cursor.next)
    runs = [part for run in runs if (part := intersect(run, delivered))]  # bounds what a peer may name
    scattered = subscriber.scattered(partition, runs)
    acked = _ack_scattered(state, cursor, scattered, runs, now)
    if scattered and not cursor.waiting and not any(lease.recorded for lease in scattered):
        runs = []  # the others are not held
    for run in runs:
        left = len(run)
        for lease, part in state.find_acked(subscriber, partition, run):
            for settled in _settle_leased(state, cursor, lease, part):
                cursor.note_settlement(settled, now, f"acked by {name}")
                left -= len(settled)
                if lease.recorded or state.keyed is not None:
                    subscriber.looked_at += len(settled) if lease.recorded else len(settled) // 10
        if left and cursor.waiting:
            subscriber.looked_at += min(len(run), len(cursor.waiting))
            left -= _ack_late(state, cursor, name, run, now)
        acked += len(run) - left
    if acked:
        subscriber.note_unsaved(acked, state.snapshots + 1)
        subscriber.adapt(acked, state.message_bytes, now)
        state.acked += acked
        state.breaker.acked(acked, now)
    return acked


def _ack_scattered(state: SubscriptionState, cursor: Cursor, leases: list[Lease], runs: list[range], now: float) -> int:
    """Settle messages of many short runs that have no record, one lease after the other; returns how many."""
    acked = 0
    for lease in leases:
        holder = state.subscribers[lease.subscriber.name]
        holder.looked_at += 1 + len(runs) // 10  # a run is only marked in the lease
        released = [] if lease.recorded else state.release_scattered(holder, lease, runs)
        if released:
            state.settle_fresh(cursor, (released,))
            cursor.note_settlement(frozenset(released), now, f"acked by {holder.name}")
            acked += len(released)
    return acked


def _settle_leased(state: SubscriptionState, cursor: Cursor, lease: Lease, part: range) -> list[range]:
    released = state.release(lease, part)
    if lease.recorded:
        for offset in chain.from_iterable(released):
            state.settle(cursor.leased[offset])
    else:
        state.settle_fresh(cursor, released)
    return released


def _ack_late(state: SubscriptionState, cursor: Cursor, name: str, run: range, now: float) -> int:
    """Settle those of the run whose lease has ended and that no other subscriber has got since."""
    offsets = run if len(run) < len(cursor.waiting) else [offset for offset in cursor.waiting if offset in run]
    late = [cursor.waiting[offset] for offset in offsets if offset in cursor.waiting]
    late = [record for record in late if record.holder == name and record.state is not MessageState.DEAD_LETTERING]
    for record in late:
        state.settle(record)
        cursor.note_settlement(range(record.offset, record.offset + 1), now, f"acked by {name}")
    return len(late)


def nack(
    state: SubscriptionState,
    name: str,
    partition: int,
    offset: int,
    reason: str,
    now: float,
    delay: float | None = None,
) -> bool:
    """Give a message back as failed; False if the subscriber does not hold it."""
    if delay is not None:
        check_between("delay", delay, 0, LONGEST)
    state.cursor(partition)
    found = state.member(name).find(partition, range(offset, offset + 1))
    records = [record for lease, part in found for record in state.take_back(lease, part)]
    for record in records:
        state.member(name).looked_at += take_back_followers(state, record)
        record.clear()
        state.nacked += 1
        state.breaker.nacked(partition, offset, now)
        fail(state, record, reason, now, charged=not state.breaker.open, delay=delay)
    return bool(records)


def extend(
    state: SubscriptionState, name: str, partition: int, runs: Iterable[range], seconds: float, now: float
) -> int:
    """Move deadlines to so many seconds from now, never nearer; returns of how many messages."""
    check_between("seconds", seconds, 0, LONGEST)
    subscriber = state.member(name)
    due = now + seconds
    delivered = range(state.cursor(partition).next)
    found = (hit for run in runs for hit in subscriber.find(partition, intersect(run, delivered)))
    return sum(_extend(state, lease, part, due) for lease, part in found)


def extend_all(state: SubscriptionState, name: str, seconds: float, now: float) -> Iterator[int]:
    """The same for all that the subscriber holds, one lease a step."""
    check_between("seconds", seconds, 0, LONGEST)
    for lease in list(state.member(name).leases()):
        yield _extend(state, lease, lease.offsets, now + seconds)


def _extend(state: SubscriptionState, lease: Lease, part: range, due: float) -> int:
    """Extend the lease of the part; returns of how many messages."""
    count = sum(map(len, lease.held(part)))
    if count and due > lease.due:
        if count < lease.count:
            lease = lease.subscriber.split(lease, part)
        state.deadlines.set(lease, due)
    return count


def started(state: SubscriptionState, name: str, partition: int, offset: int) -> bool:
    """Note that the subscriber's handler starts on this message; False if it does not hold it."""
    state.cursor(partition)
    subscriber = state.member(name)
    if not subscriber.holds(partition, offset):
        return False
    subscriber.started.add((partition, offset))
    return True
