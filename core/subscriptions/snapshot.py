"""What of a subscription survives a restart, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from random import Random
from typing import Any, NamedTuple

import msgspec

from qb.core.subscriptions.messages.cursor import Cursor
from qb.core.subscriptions.messages.message_records import MessageRecord, UnexplainedDeath
from qb.core.subscriptions.shared_room import SharedRoom
from qb.core.subscriptions.subscription_options import SubscriptionMode, SubscriptionOptions
from qb.core.subscriptions.subscription_state import SubscriptionState
from qb.core.wire.errors import BadRequest
from qb.core.wire.offset_runs import runs_of_ascending

_offset, _key = attrgetter("offset"), attrgetter("key")
_history = attrgetter("attempts", "failures", "deaths", "alone", "reason")


class OpenRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Messages in flight or waiting that have the same history."""

    first: int
    count: int
    step: int
    attempts: int
    failures: int = 0
    deaths: tuple[int, ...] | int = ()  # suspects of the same unexplained death share a number; a number: just one
    alone: bool = False
    reason: str = ""
    key: str | None = None

    @property
    def offsets(self) -> range:
        """The messages."""
        return range(self.first, self.first + self.count * self.step, self.step)


class KeyedMessages(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Messages of key_shared that have the same history: a key for each offset."""

    attempts: int
    offsets: list[int]
    keys: list[str | None]
    failures: int = 0
    deaths: tuple[int, ...] = ()
    alone: bool = False
    reason: str = ""


class PartitionSnapshot(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Everything below `next` that is not open is settled."""

    partition: int
    start: int
    next: int
    open: list[OpenRun]
    keyed: list[KeyedMessages] = []  # are open too

    def runs(self) -> Iterator[OpenRun]:
        """Yield all that is open."""
        yield from self.open
        for group in self.keyed:
            past = group.attempts, group.failures, group.deaths, group.alone, group.reason
            for offset, key in zip(group.offsets, group.keys, strict=True):
                yield OpenRun(offset, 1, 1, *past, key)


class SubscriptionSnapshot(msgspec.Struct, frozen=True):
    """A subscription at rest; msgspec makes JSON of it and back."""

    options: SubscriptionOptions
    partitions: list[PartitionSnapshot]
    paused: bool = False
    redelivered: int = 0
    dead_lettered: int = 0

    def forked(self, options: SubscriptionOptions | None = None) -> SubscriptionSnapshot:
        """Return where a new subscription begins that stands where this one stands. Raises BadRequest."""
        options = options or self.options
        if options.mode is SubscriptionMode.KEY_SHARED and self.options.mode is not SubscriptionMode.KEY_SHARED:
            raise BadRequest("a key_shared subscription can be forked from a key_shared one only")
        return SubscriptionSnapshot(options, [_without_past(partition) for partition in self.partitions])


def _without_past(partition: PartitionSnapshot) -> PartitionSnapshot:
    runs = [OpenRun(run.first, run.count, run.step, 0, key=run.key) for run in partition.open]
    keyed = [KeyedMessages(0, group.offsets, group.keys) for group in partition.keyed]
    return PartitionSnapshot(partition.partition, partition.start, partition.next, runs, keyed)


class SnapshotHead(msgspec.Struct, frozen=True):
    """What is not of one partition, and changes."""

    paused: bool
    redelivered: int
    dead_lettered: int


class SnapshotChanges(NamedTuple):
    """What has changed from one snapshot to the next."""

    number: int  # of the snapshot
    head: SnapshotHead | None  # None: it has not changed
    partitions: list[PartitionSnapshot]


def take(state: SubscriptionState) -> SubscriptionSnapshot:
    """Return what has to survive, and note that nothing has changed since."""
    _begin_next(state)
    return whole(state)


def whole(state: SubscriptionState) -> SubscriptionSnapshot:
    """Return what has to survive."""
    partitions = [_partition(state, cursor) for cursor in state.cursors.values()]
    return SubscriptionSnapshot(state.options, partitions, state.paused, state.redelivered, state.dead_lettered)


def take_changes(state: SubscriptionState) -> SnapshotChanges:
    """Return what has to survive of what has changed, and note that nothing has changed since."""
    head = SnapshotHead(state.paused, state.redelivered, state.dead_lettered) if state.head_changed else None
    partitions = [_partition(state, state.cursors[number]) for number in sorted(state.changed)]
    _begin_next(state)
    return SnapshotChanges(state.snapshots, head, partitions)


def _begin_next(state: SubscriptionState) -> None:
    state.changed, state.head_changed = set(), False
    state.snapshots += 1


def put_back(state: SubscriptionState, changes: SnapshotChanges) -> None:
    """Let what could not be stored belong to the next changes, with the acks that are in them."""
    state.changed |= {each.partition for each in changes.partitions}
    state.head_changed = state.head_changed or changes.head is not None
    for subscriber in state.subscribers.values():
        subscriber.note_not_saved(changes.number, state.snapshots + 1)


def merged(
    base: SubscriptionSnapshot, head: SnapshotHead | None, partitions: Iterable[PartitionSnapshot]
) -> SubscriptionSnapshot:
    """Return a snapshot with what has changed since."""
    changed = {each.partition: each for each in base.partitions} | {each.partition: each for each in partitions}
    whole = msgspec.structs.replace(base, partitions=[each for _, each in sorted(changed.items())])
    return whole if head is None else msgspec.structs.replace(whole, **msgspec.structs.asdict(head))


def _partition(state: SubscriptionState, cursor: Cursor) -> PartitionSnapshot:
    if state.keyed is None:
        return PartitionSnapshot(cursor.partition, cursor.start, cursor.next, list(_open_runs(state, cursor)))
    return PartitionSnapshot(cursor.partition, cursor.start, cursor.next, [], list(_keyed_messages(state, cursor)))


def _keyed_messages(state: SubscriptionState, cursor: Cursor) -> Iterator[KeyedMessages]:
    for subscriber in state.subscribers.values() if state.in_rows else ():
        for lease in subscriber.leases(cursor.partition):
            for run, keys in lease.keys_held():
                yield KeyedMessages(1, list(run), list(keys))
    if state.keyed is not None:
        for holder in state.holders():
            offsets: list[int] = []
            numbers: list[int] = []
            for lease in holder.leases(cursor.partition):
                if lease.numbers is not None:
                    lease.list_keyed(offsets, numbers)
            if offsets:
                yield KeyedMessages(1, offsets, state.keyed.table.names(numbers))
    if cursor.passed:
        yield KeyedMessages(0, list(cursor.passed), list(cursor.passed.values()))
    for (attempts, *past), records in _by_history(cursor):
        yield KeyedMessages(attempts, list(map(_offset, records)), list(map(_key, records)), *past)


def _open_runs(state: SubscriptionState, cursor: Cursor) -> Iterator[OpenRun]:
    for holder in state.holders():
        for lease in holder.leases(cursor.partition):
            if not lease.recorded:
                for run in lease.held():
                    yield OpenRun(run.start, len(run), run.step, lease.attempt)
    for past, records in _by_history(cursor):
        for run in runs_of_ascending(list(map(_offset, records))):
            yield OpenRun(run.start, len(run), run.step, *past)


def _by_history(cursor: Cursor) -> Iterator[tuple[tuple[Any, ...], list[MessageRecord]]]:
    """Yield neighbours that have the same history: attempts, failures, suspicions, isolation, reason; and the records.

    There may be as many as the windows hold, and a save is one step of the event loop: no function is called for each.
    """
    records = sorted(cursor.records(), key=_offset)
    for (attempts, failures, deaths, alone, reason), group in groupby(records, key=_history):
        suspicions = tuple(death.number for death in deaths if not death.explained)
        yield (attempts, failures, suspicions, alone, reason), list(group)


def restore(
    name: str, snapshot: SubscriptionSnapshot, random: Random, shared: SharedRoom | None = None
) -> SubscriptionState:
    """Return the state as it was, without subscribers and without what was open."""
    starts = {partition.partition: partition.next for partition in snapshot.partitions}
    state = SubscriptionState(name, snapshot.options, starts, random, shared)
    state.paused = snapshot.paused
    state.redelivered = snapshot.redelivered
    state.dead_lettered = snapshot.dead_lettered
    for partition in snapshot.partitions:
        state.cursors[partition.partition].start = partition.start
    return state


def reopen(state: SubscriptionState, snapshot: SubscriptionSnapshot, now: float) -> Iterator[int]:
    """Open what was open: what was in flight is ready again. Yields each offset, so that others can run in between."""
    deaths: dict[int, UnexplainedDeath] = {}
    for partition in snapshot.partitions:
        for run in sorted(partition.runs(), key=lambda run: run.first):
            for offset in run.offsets:
                _reopen(state, _record(partition.partition, offset, run, deaths), now)
                yield offset
    state.deaths = max(deaths, default=0)


def _record(partition: int, offset: int, run: OpenRun, deaths: dict[int, UnexplainedDeath]) -> MessageRecord:
    record = MessageRecord(partition, offset, run.attempts, run.key)
    record.failures = run.failures
    record.reason = run.reason
    record.alone = run.alone
    numbers = run.deaths if isinstance(run.deaths, tuple) else (run.deaths,) if run.deaths else ()
    for number in numbers:
        record.suspect_of(deaths.setdefault(number, UnexplainedDeath(number)))
    return record


def _reopen(state: SubscriptionState, record: MessageRecord, now: float) -> None:
    if state.keyed is not None:
        state.keyed.admit(record)
    limit = state.options.max_deliveries
    if limit and record.failures >= limit:
        state.make_dead_lettering(record)
    elif record.failures:
        state.make_backing_off(record, now + state.options.backoff.delay(record.failures, state.random))
    else:
        state.make_ready(record)
