"""Batches in memory, so that readers near the end of a log never touch the disk."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

from qb.storage.engine import StoredChunk


class StoredBatch:
    """One batch as it lies in the log: its frames, then its seal."""

    __slots__ = ("append_ms", "first_offset", "next_offset", "parts", "positions", "size")

    def __init__(
        self,
        first_offset: int,
        append_ms: int,
        parts: Sequence[bytes | bytearray | memoryview],
        positions: Sequence[int],
    ) -> None:
        self.first_offset, self.append_ms = first_offset, append_ms
        self.parts = parts  # its bytes, one part after another
        self.positions = positions  # where each frame starts in data
        self.size = sum(map(len, parts))
        self.next_offset = first_offset + len(positions)

    @property
    def data(self) -> bytes:
        """All of it in one piece, which is made when the first reader asks for it."""
        first = self.parts[0]
        data = first if len(self.parts) == 1 and isinstance(first, bytes) else b"".join(self.parts)
        self.parts = (data,)
        return data

    @property
    def cost(self) -> int:
        """About how much memory it takes: the bytes, the objects, and the positions as a list of integers."""
        return self.size + 300 + 40 * (0 if isinstance(self.positions, range) else len(self.positions))


DROPPED = StoredBatch(0, 0, (b"",), ())  # stands where a batch was, so that its memory is free at once
LONG = 256 * 1024  # bytes of a batch that is not worth joining with others


def cut(batches: Sequence[StoredBatch], at: int, offset: int, max_bytes: int) -> StoredChunk:
    """Return the records from `offset` on, which lies in batches[at], near `max_bytes` but at least one record."""
    first = batches[at]
    start, stop, taken = _fitting(first, offset - first.first_offset, max_bytes)
    room = max_bytes - (stop - start)
    if stop < first.size or at + 1 == len(batches) or batches[at + 1].size > room:
        return StoredChunk(offset, first.data, taken, stop)  # from one batch: nothing is copied
    return extend(StoredChunk(offset, first.data, taken, stop), batches[at + 1 :], room)


def whole(batches: Sequence[StoredBatch], at: int, max_bytes: int) -> StoredChunk:
    """Return whole batches from batches[at] on, near `max_bytes` but at least one; a long one goes alone, uncopied."""
    first = batches[at]
    size = first.size
    return cut(batches, at, first.first_offset, size if size >= LONG else max(size, max_bytes))


def joined(batches: Sequence[StoredBatch]) -> StoredChunk:
    """Return all of these batches."""
    return cut(batches, 0, batches[0].first_offset, sum([batch.size for batch in batches]))


def extend(first: StoredChunk, batches: Sequence[StoredBatch], room: int) -> StoredChunk:
    """Return the chunk with those of the whole batches behind it that have room."""
    parts = [first.frames]
    size = first.size
    positions = [position - first.positions[0] for position in first.positions]
    for batch in batches:
        room -= batch.size
        if room < 0:
            break
        parts.append(batch.data)
        positions += [position + size for position in batch.positions]
        size += batch.size
    return StoredChunk(first.first_offset, b"".join(parts), positions, size)


def _fitting(batch: StoredBatch, number: int, room: int) -> tuple[int, int, Sequence[int]]:
    """Return start, end and positions of the records from the number-th on that fit, but at least one."""
    positions = batch.positions
    start = positions[number]
    if batch.size - start <= room:
        return start, batch.size, positions[number:]
    end = max(bisect_right(positions, start + room, lo=number) - 1, number + 1)
    stop = positions[end] if end < len(positions) else batch.size
    return start, stop, positions[number:end]


class RecentBatches:
    """The newest batches of one log, without a gap."""

    def __init__(self) -> None:
        self._batches: list[StoredBatch] = []
        self._gone = 0  # entries at the front that were dropped; removed in bulk, since a list gives them up slowly

    def add(self, batch: StoredBatch) -> None:
        """Take the batch that follows the newest one here."""
        self._batches.append(batch)

    def drop_oldest(self) -> int:
        """Forget the oldest batch; returns the memory freed, 0 if there was none."""
        if self._gone == len(self._batches):
            return 0
        batch = self._batches[self._gone]
        self._batches[self._gone] = DROPPED
        self._gone += 1
        if self._gone > 32 and self._gone * 2 > len(self._batches):
            del self._batches[: self._gone]
            self._gone = 0
        return batch.cost

    def read(self, offset: int, max_bytes: int) -> StoredChunk | None:
        """Return records from `offset` on, if they are here."""
        at = self._find(offset)
        return None if at is None else cut(self._batches, at, offset, max_bytes)

    def read_whole(self, offset: int, max_bytes: int) -> StoredChunk | None:
        """Return whole batches from the one on that holds `offset`, if they are here."""
        at = self._find(offset)
        return None if at is None else whole(self._batches, at, max_bytes)

    def _find(self, offset: int) -> int | None:
        at = bisect_right(self._batches, offset, lo=self._gone, key=_first_offset) - 1
        return None if at < self._gone or offset >= self._batches[at].next_offset else at


def _first_offset(batch: StoredBatch) -> int:
    return batch.first_offset


class RecentMemory:
    """The bytes that all tails share: the batch that was written first is dropped first, whosever it is."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._used = 0
        self._order: deque[RecentBatches] = deque()  # a tail stands here once for each batch that it was given

    def keep(self, tail: RecentBatches, batch: StoredBatch) -> None:
        """Give a batch to a tail and drop what no longer fits."""
        tail.add(batch)
        self._order.append(tail)
        self._used += batch.cost
        while self._used > self._budget and self._order:
            self._used -= self._order.popleft().drop_oldest()

    def drop(self, tail: RecentBatches) -> None:
        """Forget every batch of a tail that gets no more of them."""
        while freed := tail.drop_oldest():
            self._used -= freed


class LastReads:
    """What each log last read from disk, so that a batch larger than a read is fetched and proved once."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._used = 0
        self._reads: OrderedDict[Hashable, list[StoredBatch]] = OrderedDict()

    def keep(self, log: Hashable, batches: list[StoredBatch]) -> None:
        """Remember consecutive batches in place of the log's last ones."""
        self.drop(log)
        self._reads[log] = batches
        self._used += _cost(batches)
        while self._used > self._budget and len(self._reads) > 1:
            self.drop(next(iter(self._reads)))

    def drop(self, log: Hashable) -> None:
        """Forget what the log last read."""
        self._used -= _cost(self._reads.pop(log, ()))

    def read(self, log: Hashable, offset: int, max_bytes: int) -> StoredChunk | None:
        """Return records from `offset` on, if they are here."""
        batches = self._reads.get(log)
        if not batches or not batches[0].first_offset <= offset < batches[-1].next_offset:
            return None
        return cut(batches, bisect_right(batches, offset, key=_first_offset) - 1, offset, max_bytes)


def _cost(batches: Sequence[StoredBatch]) -> int:
    return sum([batch.cost for batch in batches])
