"""What a subscription knows of one partition.

A message below `next` that is neither leased nor waiting is settled: acks need no memory of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.message_records import MessageRecord
from qb.core.subscriptions.messages.settlements import Settlements


class Cursor:
    """One partition: where fresh messages begin, and each message below that has a record.

    There may be a million of these, most of them idle. An idle one holds nothing that the garbage collector walks: a
    full collection stops the event loop for as long as it takes.
    """

    __slots__ = (
        "dropped",
        "end",
        "held_up_by",
        "keys_at_hand",
        "leased",
        "next",
        "partition",
        "passed",
        "settlements",
        "start",
        "waiting",
    )

    def __init__(self, partition: int, start: int) -> None:
        self.partition = partition
        self.reset(start)

    def reset(self, start: int) -> None:
        """Begin at an offset, without a past."""
        self.start = start  # what lies before was never meant for this subscription
        self.next = start  # the first fresh message
        self.end = start  # fresh messages below this are at hand
        self.dropped = 0  # retention has removed what lies below
        self.waiting: dict[int, MessageRecord] = {}
        self.leased: dict[int, MessageRecord] = {}  # those in flight that have a record; the others are in leases alone
        # In key_shared, the keys of messages that have no record and are not in flight:
        self.passed: dict[int, str] = {}  # those that were looked at and could not go out, by offset
        self.keys_at_hand: Sequence[str | None] = ()  # the fresh ones from `next` to `end`
        self.held_up_by: JoinedSubscriber | None = None  # it had no room for the key of the message at `next`
        self.settlements: Settlements = None  # kept by SettlementNotes

    def records(self) -> Iterator[MessageRecord]:
        """Return every unsettled message that has a record."""
        yield from self.waiting.values()
        yield from self.leased.values()

    def offer_keys(self, keys: Sequence[str | None]) -> None:
        """Take in the keys of fresh messages that follow those at hand."""
        self.keys_at_hand = [*self.keys_at_hand, *keys]

    def take_keys(self, count: int) -> list[str | None]:
        """Return the keys of the next fresh messages, which are at hand no longer."""
        taken, self.keys_at_hand = self.keys_at_hand[:count], self.keys_at_hand[count:] or ()
        return list(taken)
