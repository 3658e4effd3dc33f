"""storage.remembered: which publish numbers of idempotent producers a partition holds.

May import: storage.engine, the standard library.
Never: trio, files, time.

Kept so that every new segment can begin with it; the newest segment alone then restores it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice

from storage.engine import TRANSACTIONS, Range

WINDOW = 262_144  # numbers of a producer that are remembered
MAX_PRODUCERS = 10_000  # the least recently active are forgotten
MAX_RANGES = 65_536  # of all producers together, 28 bytes each in a seal; above it each keeps its share of the newest

TRANSACTION_RANGES = 64  # of all transactions together: of an unfinished one only the newest number has to be known


class Remembered:
    """The ranges of every producer, merged where numbers and offsets go on."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._producers: OrderedDict[int, deque[Range]] = OrderedDict()  # the least recently active first
        self._count = 0
        self.add(ranges)

    def __iter__(self) -> Iterator[Range]:
        """Yield every range, the least recently active producer's first."""
        for ranges in self._producers.values():
            yield from ranges

    def add(self, ranges: Iterable[Range]) -> None:
        """Take in ranges that have become durable."""
        for new in ranges:
            self._add(new)

    def _add(self, new: Range) -> None:
        ranges = self._producers.setdefault(new.producer_id, deque())
        self._producers.move_to_end(new.producer_id)
        last = ranges[-1] if ranges else None
        if last and continues(last, new):
            ranges[-1] = Range(last.producer_id, last.first_number, last.first_offset, last.count + new.count)
        else:
            ranges.append(new)
            self._count += 1
        most = TRANSACTION_RANGES if new.producer_id == TRANSACTIONS else MAX_RANGES
        while len(ranges) > most or ranges[0].first_number + ranges[0].count <= new.first_number + new.count - WINDOW:
            ranges.popleft()
            self._count -= 1
        self._stay_bounded()

    def _stay_bounded(self) -> None:
        if len(self._producers) > MAX_PRODUCERS:
            if next(iter(self._producers)) == TRANSACTIONS:
                self._producers.move_to_end(TRANSACTIONS)  # a start must know what it need not copy again
            self._count -= len(self._producers.popitem(last=False)[1])
        if self._count > MAX_RANGES:
            share = max(1, MAX_RANGES // 2 // len(self._producers))
            for producer_id, ranges in self._producers.items():
                self._producers[producer_id] = deque(islice(ranges, max(0, len(ranges) - share), None))
            self._count = sum(map(len, self._producers.values()))


def continues(last: Range, new: Range) -> bool:
    """Say whether `new` begins, in numbers and in offsets, where `last` of the same producer ends."""
    return (
        last.producer_id == new.producer_id
        and last.first_number + last.count == new.first_number
        and last.first_offset + last.count == new.first_offset
    )
