"""A takeover's decisions: read to the end, write a fence behind it, read the fence back.

No I/O and no clock. Nothing is decided by the absence of a record: if a read was outdated, the expectation of the fence
fails, and more is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qb.replication.journal.append_window import PAUSES, Tenure
from qb.replication.journal.journal_records import FenceRecord, JournalRecord, JournalRecordKind, encode, encode_fence
from qb.replication.journal.journal_store import Answer, Fenced, RecordsLost, StoredRecord
from qb.replication.journal.record_chain import ChainPoint, ChainReader

READ_AT_ONCE = 1000  # records
PATIENCE = 40  # reads in a row that do not find the record at our own point, before the journal counts as lost


class ReadOn(NamedTuple):
    """Read from a position on, and give the records to read()."""

    first: int
    pause: float = 0.0


class WriteFence(NamedTuple):
    """Write the records behind a position, then call answered()."""

    after: int
    records: Sequence[bytes]


class TakenOver(NamedTuple):
    """The fence is stored and whole."""

    tenure: Tenure
    point: ChainPoint


TakeoverStep = ReadOn | WriteFence | TakenOver


def fence_size(point: ChainPoint) -> int:
    """How many records a fence at this point needs: one more than the owners before it may have on their way."""
    return point.window + 1


def fence_records(point: ChainPoint, owner: str, writer: int, window: int) -> list[bytes]:
    """Return the records of a fence behind a point."""
    count = fence_size(point)
    records = []
    previous = point.valid
    for index in range(count):
        payload = encode_fence(FenceRecord(index, count, window, owner))
        records.append(encode(JournalRecord(JournalRecordKind.FENCE, point.epoch + 1, writer, previous, payload)))
        previous = point.position + 1 + index
    return records


class Takeover:
    """One takeover, from its first read to the fence that was read back."""

    def __init__(
        self, point: ChainPoint, owner: str, writer: int, window: int, *, instead_of: Tenure | None = None
    ) -> None:
        """Take over from any owner; with `instead_of`, only from ourselves in that tenure."""
        self._reader = ChainReader(point)
        self._owner, self._writer, self._window = owner, writer, window
        self._instead_of = instead_of
        self._tries = 0  # reads and writes that brought nothing new
        self._was_ours = False  # has a record of our own fence been read?

    def start(self) -> ReadOn:
        """Return the first step."""
        return ReadOn(self._reader.next)

    def answered(self, answer: Answer) -> ReadOn:
        """Take the answer to the fence. Whatever it was, what is stored there decides."""
        return ReadOn(self._reader.next) if answer is Answer.STORED else self._read_again()

    def read(self, records: Sequence[StoredRecord] | None) -> TakeoverStep:
        """Take what was read (None: the read failed). Raises Fenced, RecordsLost, JournalGap."""
        if records is None:
            return self._read_again()
        valid = self._reader.take(records)
        self._was_ours |= any(each.record.writer == self._writer for each in valid)
        if records:
            self._tries = 0
            return ReadOn(self._reader.next)
        if self._reader.next == self._reader.point.position:
            return self._missing()
        return self._at_end(self._reader.point)

    def _read_again(self) -> ReadOn:
        self._tries += 1
        return ReadOn(self._reader.next, PAUSES[min(self._tries, len(PAUSES) - 1)])

    def _missing(self) -> ReadOn:
        if self._tries >= PATIENCE:
            raise RecordsLost(
                f"the journal ends before position {self._reader.point.position}, which this broker has read: "
                "restore it from the copy of a broker before anything is written"
            )
        return self._read_again()

    def _at_end(self, point: ChainPoint) -> TakeoverStep:
        if point.writer == self._writer and point.whole:
            return TakenOver(Tenure(point.epoch, point.writer, point.position, point.valid), point)
        if self._overtaken(point):
            raise Fenced(point.epoch)
        return WriteFence(point.position, fence_records(point, self._owner, self._writer, self._window))

    def _overtaken(self, point: ChainPoint) -> bool:
        """Has another owner come behind our fence, or behind the tenure that we fence anew?"""
        if point.writer == self._writer:
            return False
        return self._was_ours or (self._instead_of is not None and point.writer != self._instead_of.writer)
