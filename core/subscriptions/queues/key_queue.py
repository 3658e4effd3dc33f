"""The messages of one key that wait or came back, and how many others of it are in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.message_records import MessageRecord
from qb.core.subscriptions.queues.key_table import MAYBE, NOWHERE, KeyTable
from qb.core.subscriptions.queues.shared_queue import ReadyHeap
from qb.core.subscriptions.queues.sorted_positions import MessagePosition, SortedPositions

MOST_IN_FLIGHT = 4_000  # messages of one key: when one fails, all behind it are taken back in one step


def place_of(record: MessageRecord) -> MessagePosition:
    """Return the position of a recorded message."""
    return record.partition, record.offset


class RecordedMessages(msgspec.Struct, eq=False, gc=False):
    """The messages of one key that have a record. It is part of no cycle, and so are its parts."""

    open: dict[MessagePosition, MessageRecord] = {}  # in flight or waiting
    waiting: SortedPositions = msgspec.field(default_factory=SortedPositions)  # those that are not in flight
    held: SortedPositions = msgspec.field(default_factory=SortedPositions)  # of these, those that are not ready
    leased: SortedPositions = msgspec.field(default_factory=SortedPositions)  # those in flight
    _ready: ReadyHeap = msgspec.field(default_factory=ReadyHeap)

    def wait(self, record: MessageRecord, *, held: bool) -> None:
        """Note that a message waits; ready, or held."""
        self.waiting.add(place_of(record))
        if held:
            self.held.add(place_of(record))
        else:
            self.held.discard(place_of(record))
            self._ready.push(record)

    def stop_waiting(self, record: MessageRecord) -> None:
        """Note that a message waits no longer."""
        self.waiting.discard(place_of(record))
        self.held.discard(place_of(record))

    def head(self) -> MessageRecord | None:
        """Return the message that may go out next, and keep it; None if none may."""
        first = self._ready.first()
        return None if first is None or self.blocker(first) else first

    def blocker(self, record: MessageRecord) -> MessageRecord | None:
        """Return the earlier message of its partition that holds this one back."""
        before = self.held.first_before(place_of(record))
        return None if before is None else self.open[before]

    def drop(self, partition: int, end: int) -> None:
        """Forget the messages of a partition below an offset; a queue that still has them skips them."""
        self.waiting.drop(partition, end)
        self.held.drop(partition, end)
        self.leased.drop(partition, end)
        self.open = {at: each for at, each in self.open.items() if at[0] != partition or at[1] >= end}

    def before(self, record: MessageRecord) -> MessageRecord | None:
        """Return the message behind which this ready one waits; None if it is the head."""
        first = self._ready.first()
        return self.blocker(record) if first is record else first

    def pop(self) -> MessageRecord:
        """Take out what head() has returned."""
        return self._ready.pop()


class KeyQueue(msgspec.Struct, eq=False, gc=False):
    """One key of which something waits, or has a record; what else is in flight is only counted, in the table of keys.

    Messages are delivered in offset order, so in each partition those with a record come before those passed over.
    A recorded message without a key has a queue of its own, which is never bound. There may be as many as messages, so
    the garbage collector walks none: its owner does not know it.
    """

    key: str | None
    number: int  # of the key
    table: KeyTable
    passed: dict[int, deque[int]] = {}  # fresh ones that could not go out, by partition; no deque is empty
    scheduled: bool = False  # is it among the movable ones, or those that wait for room?
    _recorded: RecordedMessages | None = None

    @property
    def owner(self) -> JoinedSubscriber | None:
        """The subscriber that the key is bound to."""
        return self.table.owner_of(self.number)

    @owner.setter
    def owner(self, owner: JoinedSubscriber | None) -> None:
        self.table.set_owner(self.number, owner)

    @property
    def recorded(self) -> RecordedMessages:
        """The messages that have a record."""
        if self._recorded is None:
            self._recorded = RecordedMessages()
        return self._recorded

    def keeps_back(self, partition: int) -> bool:
        """Return whether fresh messages of this partition have to wait, whatever room there is."""
        return partition in self.passed or self.full or self._is_blocked(partition)

    @property
    def waits_in(self) -> int:
        """The only partition whose fresh messages wait behind others; MAYBE if it depends; NOWHERE if it is done."""
        if self._recorded is None and len(self.passed) == 1:
            return next(iter(self.passed))
        return MAYBE if self.passed or self._recorded is not None else NOWHERE

    @property
    def full(self) -> bool:
        """True while as many of its messages are in flight as may be."""
        return self.in_flight >= MOST_IN_FLIGHT

    @property
    def fresh(self) -> int:
        """How many of its messages are in flight that have no record."""
        return self.table.counts[self.number]

    @property
    def in_flight(self) -> int:
        """How many of its messages are in flight."""
        return self.fresh + (0 if self._recorded is None else len(self._recorded.leased))

    @property
    def is_needed(self) -> bool:
        """False if nothing waits and nothing has a record."""
        return bool(self.passed) or (self._recorded is not None and bool(self._recorded.open))

    @property
    def bound(self) -> bool:
        """True while a message that was delivered is not settled."""
        return self.fresh > 0 or (self._recorded is not None and bool(self._recorded.open))

    def head(self) -> MessageRecord | None:
        """Return the recorded message that may go out next, and keep it; None if none may."""
        return None if self._recorded is None else self._recorded.head()

    def wait(self, record: MessageRecord, *, held: bool) -> None:
        """Note that a recorded message is not in flight; ready, or held."""
        self._land(record)
        self.recorded.wait(record, held=held)

    def note_leased(self, record: MessageRecord) -> None:
        """Note that a recorded message is in flight."""
        self.recorded.stop_waiting(record)
        self.recorded.leased.add(place_of(record))

    def _land(self, record: MessageRecord) -> None:
        """Note that a recorded message is not in flight any more, if it was."""
        self.recorded.leased.discard(place_of(record))

    def settle(self, record: MessageRecord) -> None:
        """Forget a recorded message."""
        self._land(record)
        self.recorded.stop_waiting(record)
        del self.recorded.open[place_of(record)]

    def pass_over(self, partition: int, offsets: Iterable[int]) -> None:
        """Let fresh messages wait, behind all others of their partition."""
        waiting = self.passed.get(partition)
        if waiting is None:
            self.passed[partition] = deque(offsets)
        else:
            waiting.extend(offsets)

    def take_passed(self, most: int) -> dict[int, list[int]]:
        """Take out messages that were passed over and may go out now, at most so many; returns them by partition."""
        taken: dict[int, list[int]] = {}
        left = min(most, MOST_IN_FLIGHT - self.in_flight)
        for partition in [each for each in self.passed if not self._is_blocked(each)]:
            offsets = self.passed[partition]
            if (count := min(left, len(offsets))) <= 0:
                break
            taken[partition] = [offsets.popleft() for _ in range(count)]
            left -= count
            if not offsets:
                del self.passed[partition]
        return taken

    def can_pass_on(self) -> bool:
        """Return whether a message that was passed over may go out now."""
        if self._recorded is None:
            return bool(self.passed) and self.table.counts[self.number] < MOST_IN_FLIGHT
        return not self.full and any(not self._is_blocked(partition) for partition in self.passed)

    def drop(self, partition: int, end: int) -> None:
        """Forget the messages of a partition below an offset that wait or have a record."""
        if self._recorded is not None:
            self._recorded.drop(partition, end)
        passed = self.passed.pop(partition, None)
        if passed and (left := deque(offset for offset in passed if offset >= end)):
            self.passed[partition] = left

    def before_passed(self, partition: int, offset: int) -> int | None:
        """Return the offset of the message behind which one that was passed over waits; None if it is the first."""
        recorded = self._recorded.waiting.first_before((partition, offset)) if self._recorded is not None else None
        if recorded is not None:
            return recorded[1]
        first = self.passed[partition][0]
        return first if first < offset else None

    def _is_blocked(self, partition: int) -> bool:
        return self._recorded is not None and self._recorded.waiting.has_any(partition)
