"""One subscription: every call that the broker makes.

Events go in (join, offer, ack, ...), decide() returns what to do: one call for many events. `now` is
in seconds, from any clock that does not go back. Nothing here blocks. docs/SUBSCRIPTIONS.md is the contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random

from qb.core.subscriptions import dispatch as delivery
from qb.core.subscriptions import failures, snapshot
from qb.core.subscriptions import save_urgency as saving
from qb.core.subscriptions import settlement as settle
from qb.core.subscriptions import subscription_report as report
from qb.core.subscriptions.messages.adaptive_window import MOST, MOST_BY_KEY
from qb.core.subscriptions.messages.deadlines import NEVER
from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.message_records import MessageRecord, MessageState
from qb.core.subscriptions.push_decisions import Decision
from qb.core.subscriptions.save_urgency import SaveUrgency
from qb.core.subscriptions.shared_room import SharedRoom
from qb.core.subscriptions.snapshot import SnapshotChanges, SubscriptionSnapshot
from qb.core.subscriptions.subscription_options import (
    LARGEST_WINDOW,
    SubscriptionMode,
    SubscriptionOptions,
    check_between,
)
from qb.core.subscriptions.subscription_report import PartitionReport, SubscriptionReport, SubscriptionTotals
from qb.core.subscriptions.subscription_state import SubscriptionState
from qb.core.wire.errors import BadRequest, SubscriptionBusy


class Subscription:
    """A named cursor on a topic, shared by the subscribers that joined it."""

    def __init__(
        self,
        name: str,
        options: SubscriptionOptions,
        starts: Mapping[int, int],
        random: Random,
        shared: SharedRoom | None = None,
    ) -> None:
        """Begin at one offset for each partition. What is `shared` with others has limits for all of them."""
        self._state = SubscriptionState(name, options, starts, random, shared)

    @classmethod
    def restore(
        cls, name: str, saved: SubscriptionSnapshot, random: Random, shared: SharedRoom | None = None
    ) -> Subscription:
        """Return the subscription that a snapshot was taken of, without subscribers; reopen() belongs to it."""
        subscription = cls.__new__(cls)
        subscription._state = snapshot.restore(name, saved, random, shared)
        return subscription

    def reopen(self, saved: SubscriptionSnapshot, now: float) -> Iterator[int]:
        """Open again what was open in the snapshot, one message at each step; use the subscription after the last."""
        return snapshot.reopen(self._state, saved, now)

    def close(self) -> None:
        """Let go of all that is shared with others; it is used no more."""
        self._state.close()

    # Questions of the broker

    def decide(self, now: float) -> list[Decision]:
        """Carry out what is due and return what to do now, in this order. Call it after every change."""
        return delivery.decide(self._state, now)

    def may_decide(self, now: float) -> bool:
        """Return False if decide() would surely change nothing, so that nothing needs to be read for it."""
        return delivery.may_decide(self._state, now)

    def next_wakeup(self, now: float) -> float | None:
        """Return when to call decide() again if nothing happens before; None: there is nothing to wait for."""
        wakeup = delivery.next_wakeup(self._state, now)
        return None if wakeup == NEVER else wakeup

    def room(self) -> int:
        """Return how many fresh messages could go out now."""
        return delivery.room(self._state)

    def wait_for_room(self) -> None:
        """There are fresh messages, and room() is 0: if that is for the sake of others, go on when there is room."""
        if self._state.round_robin.room() and not self._state.open.room:
            self._state.open.wait()

    def wanted(self, partition: int) -> range:
        """Return the fresh messages that could be used: read them as far as they exist, and offer them."""
        return delivery.wanted(self._state, partition)

    def upcoming(self, partition: int) -> int:
        """Return the first fresh message that is not at hand: wanted() begins there. Raises BadRequest."""
        return self._state.cursor(partition).end

    @property
    def dirty(self) -> bool:
        """True if the last snapshot is out of date."""
        return self._state.dirty

    def snapshot(self) -> SubscriptionSnapshot:
        """Return all that must survive a restart; `dirty` is False until the next change."""
        return snapshot.take(self._state)

    def copy(self) -> SubscriptionSnapshot:
        """Return the same for another purpose; `dirty` stays as it is."""
        return snapshot.whole(self._state)

    def changes(self) -> SnapshotChanges:
        """Return what of it has changed since the last snapshot, and count as one; `dirty` is then False."""
        return snapshot.take_changes(self._state)

    def not_saved(self, changes: SnapshotChanges) -> None:
        """These changes could not be stored: they belong to the next ones, and so do the acks in them."""
        snapshot.put_back(self._state, changes)

    @property
    def snapshots(self) -> int:
        """How many snapshots were taken: the number of the last one."""
        return self._state.snapshots

    @property
    def save_urgency(self) -> SaveUrgency:
        """How soon the next snapshot should be made durable, if `dirty`."""
        return saving.save_urgency(self._state)

    def saved(self, number: int) -> bool:
        """The snapshot of this number is durable; returns whether that makes room in a window."""
        return saving.saved(self._state, number)

    @property
    def options(self) -> SubscriptionOptions:
        """The settings, fixed for life."""
        return self._state.options

    @property
    def paused(self) -> bool:
        """True while nothing is delivered."""
        return self._state.paused

    @property
    def subscribers(self) -> Sequence[str]:
        """The names of the subscribers, in the order of joining."""
        return list(self._state.subscribers)

    def floor(self, partition: int) -> int:
        """Return the lowest offset that is not settled. Raises BadRequest."""
        return report.floor(self._state, self._state.cursor(partition))

    @property
    def acked(self) -> int:
        """How many messages were acked since the start."""
        return self._state.acked

    @property
    def nacked(self) -> int:
        """How many messages were nacked since the start."""
        return self._state.nacked

    def describe(self, ends: Mapping[int, int], partitions: list[PartitionReport] | None = None) -> SubscriptionReport:
        """Return the subscription in numbers, given the visible end of each partition, and partitions() if known."""
        return report.describe(self._state, ends, partitions)

    def totals(self, ends: int) -> SubscriptionTotals:
        """Return the numbers of all partitions together, given the sum of their visible ends."""
        return report.totals_of(self._state, ends)

    def partitions(self, ends: Mapping[int, int]) -> Iterator[PartitionReport]:
        """Yield the numbers of each partition; others may run in between."""
        return report.partitions(self._state, ends)

    def explain(self, partition: int, offset: int, end: int, now: float) -> str:
        """Say where a message is and why, given the visible end of its partition. Raises BadRequest."""
        return report.explain(self._state, partition, offset, end, now)

    # Publishes and retention

    def offer(self, partition: int, first: int, count: int) -> None:
        """Fresh messages are at hand. Ignored unless they continue what wanted() said. Raises BadRequest."""
        cursor = self._state.cursor(partition)
        if self._state.keyed is not None:
            raise BadRequest("a key_shared subscription is offered keys")
        if first <= cursor.end < first + count:
            self._state.move(cursor, cursor.next, first + count)

    def offer_keys(self, partition: int, first: int, keys: Sequence[str | None]) -> None:
        """The same for key_shared: the key, or None, of each message. Raises BadRequest."""
        state = self._state
        cursor = state.cursor(partition)
        if state.keyed is None:
            raise BadRequest("only a key_shared subscription is offered keys")
        if not first <= cursor.end < first + len(keys):
            return
        cursor.offer_keys(keys[cursor.end - first :])
        state.move(cursor, cursor.next, first + len(keys))

    def advance(self, partition: int, first: int) -> None:
        """Retention has dropped everything below `first`: skip it. Raises BadRequest."""
        cursor = self._state.cursor(partition)
        self._state.forget(cursor, first)
        cursor.dropped = max(cursor.dropped, first)
        upcoming = max(cursor.next, first)
        cursor.take_keys(upcoming - cursor.next)
        cursor.held_up_by = None
        self._state.move(cursor, upcoming, max(cursor.end, upcoming))

    # Subscribers

    def join(self, name: str, window: int | None = None, announces: bool = False) -> None:
        """Take part. Raises SubscriptionBusy if the mode has no place, BadRequest."""
        state = self._state
        if name in state.subscribers:
            raise BadRequest(f"{name!r} has joined subscription {state.name!r} already")
        if state.options.mode is SubscriptionMode.EXCLUSIVE and state.subscribers:
            holder = next(iter(state.subscribers))
            raise SubscriptionBusy(f"subscription {state.name!r} is exclusive and {holder!r} has joined it")
        if window is not None:
            check_between("window", window, 1, LARGEST_WINDOW)
        widest = MOST if state.keyed is None else MOST_BY_KEY
        subscriber = JoinedSubscriber(name, state.options.window(window), announces, widest)
        state.subscribers[name] = subscriber
        state.round_robin.join(subscriber)
        state.share_windows()

    def leave(self, name: str) -> None:
        """Leave in good order; what is still in flight goes to the others. Raises NotJoined."""
        failures.leave(self._state, name)

    def died(self, name: str, now: float) -> None:
        """The subscriber's connection was lost. Raises NotJoined."""
        failures.died(self._state, name, now)

    def limit(self, name: str, most: int | None) -> None:
        """Let a subscriber have at most so many messages in flight; None: as its window says. Raises NotJoined."""
        self._state.member(name).limit(most)

    def window(self, name: str) -> int:
        """Return how many messages may be in flight to a subscriber now. Raises NotJoined."""
        return self._state.member(name).window

    def note_message_bytes(self, size: float) -> None:
        """Messages take about so many bytes: a window that adapts itself is bounded by them."""
        self._state.message_bytes = size

    def block(self, name: str, blocked: bool) -> None:
        """Give a subscriber nothing more while its connection takes nothing more. Raises NotJoined."""
        self._state.member(name).blocked = blocked

    def ack(self, name: str, partition: int, runs: Iterable[range], now: float) -> int:
        """Settle messages; returns how many. What is not held is ignored. Raises NotJoined, BadRequest."""
        return settle.ack(self._state, name, partition, runs, now)

    def nack(
        self, name: str, partition: int, offset: int, now: float, reason: str = "", delay: float | None = None
    ) -> bool:
        """Give a message back as failed; False if it is not held. Raises NotJoined, BadRequest."""
        return settle.nack(self._state, name, partition, offset, reason, now, delay)

    def extend(self, name: str, partition: int, runs: Iterable[range], seconds: float, now: float) -> int:
        """Hold messages for so many seconds from now; returns how many. Raises NotJoined, BadRequest."""
        return settle.extend(self._state, name, partition, runs, seconds, now)

    def extend_all(self, name: str, seconds: float, now: float) -> Iterator[int]:
        """The same for all that the subscriber holds, one lease a step. Raises NotJoined, BadRequest at the first."""
        return settle.extend_all(self._state, name, seconds, now)

    def portions(self, name: str, partition: int, run: range) -> list[range]:
        """Cut a run into parts that each meet a bounded number of the subscriber's leases. Raises NotJoined."""
        return self._state.member(name).portions(partition, run)

    def ack_scattered(self, name: str, partition: int, runs: Iterable[range], now: float) -> list[range]:
        """Settle those of many short runs that can be settled together; returns the others, for ack().

        Raises NotJoined, BadRequest.
        """
        return settle.ack_scattered(self._state, name, partition, runs, now)

    def looked_at(self, name: str) -> int:
        """Return how many leases and waiting messages were compared with its runs; 0 if it has left."""
        return self._state.subscribers[name].looked_at if name in self._state.subscribers else 0

    def started(self, name: str, partition: int, offset: int) -> bool:
        """The handler starts on this message now; False if it is not held. Raises NotJoined, BadRequest."""
        return settle.started(self._state, name, partition, offset)

    # Operators

    def pause(self) -> None:
        """Deliver nothing until resume()."""
        self._state.paused = True
        self._state.head_changed = True

    def resume(self) -> None:
        """Deliver again."""
        self._state.paused = False
        self._state.head_changed = True

    def seek(self, partition: int, offset: int) -> None:
        """Begin a partition anew at an offset, and forget all that was known of it. Raises BadRequest."""
        cursor = self._state.cursor(partition)
        self._state.forget(cursor, cursor.next)
        self._state.move(cursor, offset, offset)
        self._state.settlements.forget(cursor)
        cursor.reset(offset)
        self._state.changed.add(partition)

    def retry(self, partition: int, offset: int, key: str | None = None) -> bool:
        """Deliver a settled message once more, as if for the first time; False if it is not settled.

        Raises BadRequest.
        """
        state, cursor = self._state, self._state.cursor(partition)
        leased = any(holder.holds(partition, offset) for holder in state.holders())
        if leased or offset in cursor.waiting or offset in cursor.passed or not cursor.dropped <= offset < cursor.next:
            return False
        record = MessageRecord(partition, offset, key=key)
        state.count_keys()
        if state.keyed is not None:
            state.keyed.admit(record)
        state.make_ready(record)
        return True

    def add_partition(self, partition: int, start: int) -> None:
        """The topic has one more partition: begin it there."""
        self._state.add_partition(partition, start)

    # Outcomes of dead letters

    def dead_lettered(self, partition: int, offset: int, now: float) -> None:
        """The dead letter is durable: settle the message."""
        cursor = self._state.cursor(partition)
        record = cursor.waiting.get(offset)
        if record is None or record.state is not MessageState.DEAD_LETTERING:
            return  # a seek or retention has been here in between
        self._state.settle(record)
        self._state.dead_lettered += 1
        self._state.head_changed = True
        target = self._state.options.dead_letters_of(self._state.name)
        how = f"dead-lettered to {target} ({record.reason})"
        self._state.settlements.note(cursor, range(offset, offset + 1), now, how)

    def dead_letter_failed(self, partition: int, offset: int, now: float) -> None:
        """The dead letter could not be stored: decide() brings it again after a backoff."""
        record = self._state.cursor(partition).waiting.get(offset)
        if record is not None and record.state is MessageState.DEAD_LETTERING:
            delay = self._state.options.backoff.delay(record.failures, self._state.random)
            self._state.backing_off.set(record, now + max(delay, 1.0))
