"""Acks, nacks, extensions and starts: requests of subscribers about messages that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from qb.core.offset_columns import ascending
from qb.core.subscriptions.failures import fail, take_back_followers
from qb.core.subscriptions.messages.cursor import Cursor
from qb.core.subscriptions.messages.joined_subscriber import MOST_ACKED, JoinedSubscriber
from qb.core.subscriptions.messages.leases import Lease
from qb.core.subscriptions.messages.message_records import MessageState
from qb.core.subscriptions.subscription_options import LONGEST, check_between
from qb.core.subscriptions.subscription_state import SubscriptionState
from qb.core.wire.columns import np
from qb.core.wire.offset_runs import intersect, runs_of

LEASES_AT_ONCE = 64  # out of which short runs are acked a lease at a time; what lies in others is acked run by run


def ack(state: SubscriptionState, name: str, partition: int, runs: Iterable[range], now: float) -> int:
    """Settle messages that the subscriber holds, or had last; returns how many there were."""
    before = state.acked
    for run in ack_scattered(state, name, partition, runs, now):
        _ack_run(state, state.member(name), state.cursor(partition), run, now)
    return state.acked - before


def ack_scattered(
    state: SubscriptionState, name: str, partition: int, runs: Iterable[range], now: float
) -> list[range]:
    """Settle many short runs that lie in few leases, a lease at a time; returns the runs that are left to ack().

    A subscriber acks what was pushed together, in this order: so the lease that holds the first one has most of them.
    Each message is looked at in the leases whose spans it lies in, which is mostly one.
    """
    subscriber, cursor = state.member(name), state.cursor(partition)
    runs = list(runs)
    if len(runs) < 2 or sum(map(len, runs)) > MOST_ACKED:
        return [part for run in runs if (part := _delivered(cursor, run))]  # bounds what a peer may name
    offsets = ascending(np.fromiter(chain.from_iterable(runs), np.uint64).astype(np.int64))
    delivered = np.searchsorted(offsets, (0, cursor.next))  # one beyond 2^63 is negative here
    offsets = offsets[delivered[0] : delivered[1]]
    for _ in range(LEASES_AT_ONCE if len(offsets) else 0):
        lease = subscriber.lease_of(partition, int(offsets[0]))
        if lease is None or lease.recorded or lease.offsets.step != 1:
            break
        end = int(np.searchsorted(offsets, lease.offsets.stop))
        released, others = state.release_scattered(subscriber, lease, offsets[:end])
        subscriber.looked_at += 1 + end // 10
        state.settle_fresh(lease, (released,))
        state.settlements.note(cursor, released, now, f"acked by {name}")
        _note_acked(state, subscriber, len(released), now)
        offsets = np.concatenate([others, offsets[end:]]) if len(others) else offsets[end:]
        if not len(offsets):
            break
    return list(runs_of(offsets.tolist()))


def _delivered(cursor: Cursor, run: range) -> range:
    """Return the messages of a run that were delivered."""
    return run if run.start >= 0 and run.stop <= cursor.next else intersect(run, range(cursor.next))


def _ack_run(state: SubscriptionState, subscriber: JoinedSubscriber, cursor: Cursor, run: range, now: float) -> None:
    left = len(run)
    for lease, part in state.find_acked(subscriber, cursor.partition, run):
        for settled in _settle_leased(state, cursor, lease, part):
            state.settlements.note(cursor, settled, now, f"acked by {subscriber.name}")
            left -= len(settled)
            if lease.recorded or state.keyed is not None:
                subscriber.looked_at += len(settled) if lease.recorded else len(settled) // 10
    if left and cursor.waiting:
        subscriber.looked_at += min(len(run), len(cursor.waiting))
        left -= _ack_late(state, cursor, subscriber.name, run, now)
    _note_acked(state, subscriber, len(run) - left, now)


def _note_acked(state: SubscriptionState, subscriber: JoinedSubscriber, count: int, now: float) -> None:
    if count:
        subscriber.note_unsaved(count, state.snapshots + 1)
        subscriber.adapt(count, state.message_bytes, now)
        state.acked += count
        state.breaker.acked(count, now)


def _settle_leased(state: SubscriptionState, cursor: Cursor, lease: Lease, part: range) -> list[range]:
    released = state.release(lease, part)
    if lease.recorded:
        for offset in chain.from_iterable(released):
            state.settle(cursor.leased[offset])
    else:
        state.settle_fresh(lease, released)
    return released


def _ack_late(state: SubscriptionState, cursor: Cursor, name: str, run: range, now: float) -> int:
    """Settle those of the run whose lease has ended and that no other subscriber has got since."""
    offsets = run if len(run) < len(cursor.waiting) else [offset for offset in cursor.waiting if offset in run]
    late = [cursor.waiting[offset] for offset in offsets if offset in cursor.waiting]
    late = [record for record in late if record.holder == name and record.state is not MessageState.DEAD_LETTERING]
    for record in late:
        state.settle(record)
        state.settlements.note(cursor, range(record.offset, record.offset + 1), now, f"acked by {name}")
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
