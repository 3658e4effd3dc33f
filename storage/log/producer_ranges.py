"""Which publish numbers of idempotent producers a partition holds.

Kept so that every new segment can begin with it; the newest segment alone then restores it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from qb.storage.engine import TRANSACTIONS, ProducerRange
from qb.storage.log.segment_identity import IDENTITY

WINDOW = 262_144  # numbers of a producer that are remembered
MAX_PRODUCERS = 10_000  # the least recently active are forgotten
MAX_RANGES = 65_536  # of all producers together, 28 bytes each in a seal; above it each keeps its share of the newest

TRANSACTION_RANGES = 256  # of all transactions together: as many as may be decided while receipts are not durable


class ProducerRanges:
    """The ranges of every producer, merged where numbers and offsets go on.

    Where there are too many, the oldest are dropped. That they were is remembered too, as a range with the highest
    number that was dropped and a count of 0: or the next start would take such a number for a new one.
    """

    def __init__(self, ranges: Iterable[ProducerRange] = ()) -> None:
        self._producers: OrderedDict[int, deque[ProducerRange]] = OrderedDict()  # the least recently active first
        self._dropped: dict[int, int] = {}  # the highest number, by producer
        self._count = 0
        self.add(ranges)

    def __iter__(self) -> Iterator[ProducerRange]:
        """Yield every range, the least recently active producer's first."""
        for producer_id, ranges in self._producers.items():
            if producer_id in self._dropped:
                yield ProducerRange(producer_id, self._dropped[producer_id], 0, 0)
            yield from ranges

    def add(self, ranges: Iterable[ProducerRange]) -> None:
        """Take in ranges that have become durable."""
        for new in ranges:
            if new.producer_id != IDENTITY:
                self._add(new)
        self._stay_bounded()

    def _add(self, new: ProducerRange) -> None:
        producer_id = new.producer_id
        ranges = self._producers.get(producer_id)
        if ranges is None:
            ranges = self._producers[producer_id] = deque()
        else:
            self._producers.move_to_end(producer_id)
        if not new.count:
            self._note_dropped(producer_id, new.first_number)
            return
        last = ranges[-1] if ranges else None
        if last and continues(last, new):
            ranges[-1] = ProducerRange(producer_id, last.first_number, last.first_offset, last.count + new.count)
        else:
            ranges.append(new)
            self._count += 1
        oldest = new.first_number + new.count - WINDOW
        while ranges[0].first_number + ranges[0].count <= oldest:
            ranges.popleft()
            self._count -= 1
        if self._dropped.get(producer_id, oldest) < oldest:
            del self._dropped[producer_id]  # that goes without saying now
        most = TRANSACTION_RANGES if producer_id == TRANSACTIONS else MAX_RANGES
        if len(ranges) > most:
            self._keep_newest(producer_id, most)

    def _keep_newest(self, producer_id: int, count: int) -> None:
        ranges = self._producers[producer_id]
        while len(ranges) > count:
            dropped = ranges.popleft()
            self._count -= 1
            self._note_dropped(producer_id, dropped.first_number + dropped.count - 1)

    def _note_dropped(self, producer_id: int, number: int) -> None:
        if producer_id != TRANSACTIONS:  # of these only the newest count
            self._dropped[producer_id] = max(self._dropped.get(producer_id, 0), number)

    def _stay_bounded(self) -> None:
        while len(self._producers) > MAX_PRODUCERS:
            if next(iter(self._producers)) == TRANSACTIONS:
                self._producers.move_to_end(TRANSACTIONS)  # a start must know what it need not copy again
            forgotten, ranges = self._producers.popitem(last=False)
            self._dropped.pop(forgotten, None)
            self._count -= len(ranges)
        if self._count > MAX_RANGES:
            share = max(1, MAX_RANGES // 2 // len(self._producers))
            for producer_id in self._producers:
                if producer_id != TRANSACTIONS:  # a start reads in these where unfinished ones lie
                    self._keep_newest(producer_id, share)


def continues(last: ProducerRange, new: ProducerRange) -> bool:
    """Say whether `new` begins, in numbers and in offsets, where `last` of the same producer ends."""
    return (
        last.producer_id == new.producer_id
        and last.first_number + last.count == new.first_number
        and last.first_offset + last.count == new.first_offset
    )
