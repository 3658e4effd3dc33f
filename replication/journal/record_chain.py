"""Which records of the journal are valid: decided from their order alone, so all readers skip the same ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from isal.isal_zlib import crc32

from qb.replication.journal.journal_records import FenceRecord, JournalRecord, JournalRecordKind, decode, decode_fence
from qb.replication.journal.journal_store import JournalGap, JournalNewer, RecordsLost, StoredRecord

_LINK = struct.Struct(">QI")


class ChainPoint(msgspec.Struct, frozen=True):
    """How far a reader has come, and what it must know to go on from there."""

    position: int = 0  # everything up to here has been read
    tail: int = 0  # crc32 of what is stored there
    valid: int = 0  # the last valid record
    epoch: int = 0
    writer: int = 0  # of that epoch
    window: int = 0  # how many appends of earlier owners may still be on their way
    whole: bool = True  # has the newest fence been read to its end?
    chain: int = 0  # checksum of the list of all valid records


class ValidRecord(NamedTuple):
    """A valid record and its position."""

    position: int
    record: JournalRecord


def advance(point: ChainPoint, stored: StoredRecord) -> tuple[ChainPoint, JournalRecord | None]:
    """Read one more record; returns the point behind it, and the record, or None if it is void.

    Raises JournalGap if records are missing before it, JournalNewer if it is valid and of a later version.
    """
    if stored.position != point.position + 1:
        raise JournalGap(point.position + 1, stored.position)
    record, tail = decode(stored.data), crc32(stored.data)
    point = msgspec.structs.replace(point, position=stored.position, tail=tail)
    fence = decode_fence(record.payload) if record and record.kind is JournalRecordKind.FENCE else None
    if record is None or record.previous != point.valid or not _belongs(point, record, fence):
        return point, None
    if record.kind is JournalRecordKind.UNKNOWN:
        raise JournalNewer(stored.position)
    chain = crc32(_LINK.pack(stored.position, tail), point.chain)
    point = msgspec.structs.replace(point, valid=stored.position, chain=chain)
    return (_fenced(point, record, fence) if fence else point), record


def extended(point: ChainPoint, position: int, data: bytes) -> ChainPoint:
    """Return the point behind a record that is known to be valid: one of the owner's own."""
    tail = crc32(data)
    chain = crc32(_LINK.pack(position, tail), point.chain)
    return msgspec.structs.replace(point, position=position, tail=tail, valid=position, chain=chain)


def _belongs(point: ChainPoint, record: JournalRecord, fence: FenceRecord | None) -> bool:
    """Is it of the epoch that is open, or does it open a later one?"""
    if record.kind is JournalRecordKind.FENCE and fence is None:
        return False
    is_open = (record.epoch, record.writer) == (point.epoch, point.writer)
    if record.kind is JournalRecordKind.UNKNOWN:
        return is_open or record.epoch > point.epoch
    return record.epoch > point.epoch if fence is not None and fence.index == 0 else is_open


def _fenced(point: ChainPoint, record: JournalRecord, fence: FenceRecord) -> ChainPoint:
    """A fence that is not whole has not stopped the owners before it: the next one must cover their windows too."""
    whole = fence.index == fence.count - 1
    window = fence.window if whole else max(point.window, fence.window)
    return msgspec.structs.replace(point, epoch=record.epoch, writer=record.writer, window=window, whole=whole)


class ChainReader:
    """Reads on from a point. What it has read before must be what the store has there now."""

    def __init__(self, point: ChainPoint) -> None:
        self.point = point
        self._proved = point.position == 0

    @property
    def next(self) -> int:
        """The position to read from: at first the one at the point itself, to compare it."""
        return self.point.position + self._proved

    def take(self, records: Sequence[StoredRecord]) -> list[ValidRecord]:
        """Take what was read from `next` on, and return the valid records of it.

        Raises RecordsLost, JournalGap, JournalNewer.
        """
        found: list[ValidRecord] = []
        for each in records:
            if not self._proved:
                self._prove(each)
            elif each.position > self.point.position:
                self.point, record = advance(self.point, each)
                if record is not None:
                    found.append(ValidRecord(each.position, record))
        return found

    def _prove(self, stored: StoredRecord) -> None:
        if stored.position != self.point.position:
            raise JournalGap(self.point.position, stored.position)
        if crc32(stored.data) != self.point.tail:
            raise RecordsLost(
                f"position {stored.position} of the journal holds another record than the one that was read there: "
                "it has lost what was acknowledged, so restore it from the copy of a broker before anything is written"
            )
        self._proved = True
