"""Which publish numbers of an idempotent producer are stored already, and where.

A producer's numbers only grow, so a run is new when it starts past the highest number seen: that is the hot path.
Everything else happens after a lost connection, when a client sends again what was not acked.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import NamedTuple

from qb.core.wire.errors import BrokerError, OutOfSequence, ProducerFenced
from qb.storage.engine import TRANSACTIONS, PartitionLog

WINDOW = 262_144  # numbers of a producer that are remembered
SLACK = WINDOW // 8  # more that may be, so that they are forgotten in rows: a list gives up its front slowly
MAX_PRODUCERS = 100_000  # then one that has never published is forgotten, else the one that connected longest ago
MAX_RANGES = 200_000  # of all producers together: some 30 MB
LOOK_EVERY = 16_384  # new ranges between two looks at how many there are
KEPT_RANGES = 256  # of each producer, however many there are


class NumberedRange(NamedTuple):
    """Consecutive numbers that were given to a log: number + i is at first_offset + i."""

    first_number: int
    size: int
    log: PartitionLog
    first_offset: int

    @property
    def end(self) -> int:
        return self.first_number + self.size

    def continues(self, other: NumberedRange) -> bool:
        """Does this begin, in numbers and in offsets, where `other` ends?"""
        size = other.size
        return (
            self.log is other.log
            and self.first_number == other.first_number + size
            and self.first_offset == other.first_offset + size
        )

    def joined(self, following: NumberedRange) -> NumberedRange:
        """Return this with what continues it."""
        return NumberedRange(self.first_number, self.size + following.size, self.log, self.first_offset)

    def cut(self, first: int, end: int) -> NumberedRange:
        """Return the part with numbers from `first` up to `end`."""
        first, end = max(first, self.first_number), min(end, self.end)
        return NumberedRange(first, end - first, self.log, self.first_offset + first - self.first_number)


class NumberVerdict(NamedTuple):
    """What the next publishes are: in `stored` already or, if that is None, new; it holds for `limit` of them."""

    stored: NumberedRange | None
    limit: int | None  # None: for all that follow


NEW = NumberVerdict(None, None)


class KnownProducer:
    """One idempotent publisher, across its connections."""

    def __init__(self, producer_id: int, grown: Callable[[], None] = lambda: None) -> None:
        self.producer_id = producer_id
        self._grown = grown  # called for each new range
        self.owner: object = None  # stands for the connection that may publish; an older one is fenced off
        self._highest = 0
        self._forgotten = 0  # of numbers up to this one, only those in `_stored` are known
        self._stored: list[NumberedRange] = []  # sorted by number, never overlapping
        self._waiting: list[tuple[NumberedRange, Callable[[BrokerError | None], None]]] = []

    def judge(self, number: int, owner: object = None) -> NumberVerdict:
        """Say what the publish with this number, and those right after it, are.

        Raises OutOfSequence, or ProducerFenced if a newer connection speaks for this producer.
        """
        if self.owner is not owner:
            raise ProducerFenced(f"a newer connection publishes as producer {self.producer_id}")
        if number > self._highest:
            return NEW
        if number <= self._highest - WINDOW:
            raise self._too_old(number)
        index = bisect_right(self._stored, number, key=_first_number)
        if index and number < self._stored[index - 1].end:
            stored = self._stored[index - 1].cut(number, self._stored[index - 1].end)
            return NumberVerdict(stored, stored.size)
        if number <= self._forgotten:
            raise self._too_old(number)
        return NumberVerdict(None, self._stored[index].first_number - number if index < len(self._stored) else None)

    def _too_old(self, number: int) -> OutOfSequence:
        return OutOfSequence(f"publish number {number} is too old to be compared; the newest is {self._highest}")

    def remember(self, stored: NumberedRange) -> None:
        """Take note of numbers that were just given to a log."""
        first, size, _, _ = stored
        known, newest = self._stored, first + size - 1
        if first <= self._highest:
            known.insert(bisect_right(known, first, key=_first_number), stored)
            self._grown()
            newest = max(self._highest, newest)
        elif known and stored.continues(known[-1]):
            known[-1] = known[-1].joined(stored)
        else:
            known.append(stored)
            self._grown()
        self._highest = newest
        if known[0].first_number + known[0].size <= newest - WINDOW - SLACK:
            del known[: bisect_right(known, newest - WINDOW, key=_end)]

    @property
    def has_published(self) -> bool:
        """Were any of its numbers ever given to a log?"""
        return self._highest > 0

    @property
    def ranges(self) -> int:
        """How much memory it takes."""
        return len(self._stored)

    def trim(self, kept: int) -> None:
        """Remember only the newest ranges; numbers before them are refused as too old."""
        if len(self._stored) > kept:
            self.forget_up_to(self._stored[-kept - 1].end - 1)
            del self._stored[:-kept]

    def forget_up_to(self, number: int) -> None:
        """Of numbers up to this one, those that are not remembered may be stored or not: they are never new again."""
        self._forgotten = max(self._forgotten, number)
        self._highest = max(self._highest, number)

    def settled(self, stored: NumberedRange, error: BrokerError | None) -> None:
        """Take note that a log has kept these numbers or, with an error, has not: then they are forgotten.

        Callbacks of when_settled() that have waited for them are called.
        """
        if error is not None:
            self._forget(stored)
        if self._waiting:
            done = [waiting for waiting in self._waiting if error is not None or _is_durable(waiting[0])]
            self._waiting = [waiting for waiting in self._waiting if waiting not in done]
            for _, settled in done:
                settled(error)

    def when_settled(self, stored: NumberedRange, settled: Callable[[BrokerError | None], None]) -> None:
        """Call `settled` with None when these numbers are durable (now, if they are), or with why they are not kept."""
        if _is_durable(stored):
            settled(None)
        else:
            self._waiting.append((stored, settled))

    def _forget(self, gone: NumberedRange) -> None:
        first = bisect_right(self._stored, gone.first_number, key=_end)
        last = bisect_left(self._stored, gone.end, key=_first_number)
        kept: list[NumberedRange] = []
        for stored in self._stored[first:last]:
            if stored.log is not gone.log:
                kept.append(stored)
                continue
            before = stored.cut(stored.first_number, gone.first_number)
            after = stored.cut(gone.end, stored.end)
            kept += [part for part in (before, after) if part.size > 0]
        self._stored[first:last] = kept


_first_number, _end = attrgetter("first_number"), attrgetter("end")


def _is_durable(stored: NumberedRange) -> bool:
    return stored.first_offset + stored.size <= stored.log.durable_offset


class Producers:
    """Every producer that is remembered."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, KnownProducer] = OrderedDict()
        self._unproved: OrderedDict[int, KnownProducer] = OrderedDict()  # those that had not published when looked at
        self._grown = 0

    def _note_growth(self) -> None:
        self._grown += 1
        if self._grown >= LOOK_EVERY:
            self._grown = 0
            self.trim()

    def trim(self) -> None:
        """Keep memory bounded: if all together have too many ranges, those with many keep the newest of their share."""
        if sum(producer.ranges for producer in self._known.values()) > MAX_RANGES:
            busy = [producer for producer in self._known.values() if producer.ranges > KEPT_RANGES]
            for producer in busy:
                producer.trim(max(KEPT_RANGES, MAX_RANGES // 2 // len(busy)))

    def restore(self, logs: Iterable[PartitionLog]) -> None:
        """Take in what all logs remember, at start."""
        found: dict[int, list[NumberedRange]] = {}
        for log in logs:
            for one in log.ranges():
                if one.producer_id == TRANSACTIONS:
                    continue
                if one.count:
                    stored = NumberedRange(one.first_number, one.count, log, one.first_offset)
                    found.setdefault(one.producer_id, []).append(stored)
                else:
                    self._get(one.producer_id).forget_up_to(one.first_number)
        for producer_id, ranges in found.items():
            producer = self._get(producer_id)
            for stored in sorted(ranges, key=_first_number):
                producer.remember(stored)

    def open(self, wanted: str, owner: object) -> KnownProducer:
        """Return the producer that a HELLO asks for, "new" or an id; from now on only `owner` publishes as it.

        A producer is known for longer than its connections live, so `owner` must refer to nothing of a connection.
        """
        producer = self._get(int(wanted) if wanted != "new" else secrets.randbits(63) or 1)
        producer.owner = owner
        return producer

    def _get(self, producer_id: int) -> KnownProducer:
        producer = self._known.get(producer_id)
        if producer is None:
            if len(self._known) >= MAX_PRODUCERS:
                self._forget_one()
            producer = self._known[producer_id] = KnownProducer(producer_id, self._note_growth)
            self._unproved[producer_id] = producer
        self._known.move_to_end(producer_id)
        return producer

    def _forget_one(self) -> None:
        """Forget a producer: a peer that only asks for ids cannot make the broker forget those that publish."""
        while self._unproved:
            producer_id, producer = self._unproved.popitem(last=False)
            if not producer.has_published:
                del self._known[producer_id]
                return
        self._known.popitem(last=False)
