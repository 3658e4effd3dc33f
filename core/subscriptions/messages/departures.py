"""Subscribers that have left or died, while their messages are being taken back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from qb.core.subscriptions.messages.joined_subscriber import JoinedSubscriber
from qb.core.subscriptions.messages.leases import Lease
from qb.core.subscriptions.messages.message_records import MessageRecord, UnexplainedDeath
from qb.core.wire.offset_runs import runs_of


class Departure(NamedTuple):
    """A subscriber that is gone. What it held is in its leases until decide() has taken it back, portion by portion."""

    subscriber: JoinedSubscriber
    died_at: float | None = None  # None: it left in good order
    named: frozenset[tuple[int, int]] = frozenset()  # (partition, offset) that it had announced and not settled
    death: UnexplainedDeath | None = None  # of which several messages are suspects; None: at most one was in hand

    def may_have_had_in_hand(self, record: MessageRecord) -> bool:
        """Return whether this message may have caused the death."""
        if self.named:
            return (record.partition, record.offset) in self.named
        return not self.subscriber.announces or record.attempts == 1

    def to_isolate(self) -> Iterator[tuple[Lease, range]]:
        """Return what is isolated now whatever else is known of it: what was announced, or was in hand alone."""
        if self.died_at is None:
            return
        for partition, announced in groupby(sorted(self.named), itemgetter(0)):
            for run in runs_of(offset for _, offset in announced):
                yield from self.subscriber.find(partition, run)
        if not self.named and self.death is None:
            for lease in list(self.subscriber.leases()):
                if lease.attempt == 1 or not self.subscriber.announces:
                    yield lease, lease.offsets


def number_in_hand(subscriber: JoinedSubscriber) -> int:
    """Return how many messages may have caused the death of a subscriber. It costs as much as there are leases."""
    if subscriber.started:
        return len(subscriber.started)
    if not subscriber.announces:
        return subscriber.in_flight
    leases = (lease for index in subscriber.partitions().values() for lease in index.unsorted())
    return sum(lease.count for lease in leases if lease.attempt == 1)
