"""Snapshots in the journal: what a reader must know that begins where it was trimmed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from isal.isal_zlib import crc32

from qb.replication.engine.payloads import SnapshotPayload, UnknownPayload, decode_payload, encode_snapshot_payload
from qb.replication.journal.journal import EntryReader
from qb.replication.journal.journal_records import decode
from qb.replication.journal.journal_store import StoredRecord
from qb.replication.journal.record_chain import ChainPoint
from qb.storage.engine import ProducerRange


class TrimHead(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in a snapshot beside the metadata."""

    trim: ChainPoint  # nothing before it is needed; the record there is kept, for readers to compare
    applied: int  # the metadata is the one behind this position
    ranges: dict[str, list[tuple[int, int, int, int]]]  # what each log remembers of its producers


class TrimSnapshot(NamedTuple):
    """A snapshot as it was found."""

    head: TrimHead
    body: bytes  # all metadata, as changes


def ranges_before(ranges: Iterable[tuple[int, int, int, int]], offset: int) -> list[ProducerRange]:
    """Return what of the numbers of producers lies before an offset."""
    found = (ProducerRange(*each) for each in ranges)
    cut = (each._replace(count=max(0, min(each.count, offset - each.first_offset))) for each in found)
    return [each for each in cut if each.count]


class SnapshotWork(NamedTuple):
    """What an owner hands to its committer; on the disk nothing changes."""

    head: TrimHead
    body: bytes

    def carry_out(self) -> None:
        """Nothing."""

    def encode(self) -> bytes:
        """Return it as a payload."""
        return encode_snapshot_payload(msgspec.json.encode(self.head), self.body)


class SnapshotSearch:
    """Looks for the snapshot that belongs to where a journal begins.

    The first record that is kept is the one at the snapshot's trim point. It is valid, so a chain can be followed
    from there before the point itself is known; the snapshot says then whether that was right.
    """

    def __init__(self) -> None:
        self._reader: EntryReader | None = None
        self._start = ChainPoint()

    def take(self, records: Sequence[StoredRecord]) -> TrimSnapshot | None:
        """Take what comes next, from the first record that is kept on. Raises JournalGap."""
        if records and self._reader is None:
            self._begin(records[0])
        for entry in self._reader.take(records) if self._reader else ():
            if entry.payload is not None and (found := self._found(entry.payload)):
                return found
        return None

    def _begin(self, first: StoredRecord) -> None:
        record = decode(first.data)
        epoch, writer = (record.epoch, record.writer) if record else (0, 0)
        tail, at = crc32(first.data), first.position
        self._start = ChainPoint(position=at, tail=tail, valid=at, epoch=epoch, writer=writer)
        self._reader = EntryReader(self._start)

    def _found(self, data: bytes) -> TrimSnapshot | None:
        try:
            payload = decode_payload(data)
        except UnknownPayload:
            return None
        if not isinstance(payload, SnapshotPayload):
            return None
        head = msgspec.json.decode(payload.head, type=TrimHead)
        same = (head.trim.position, head.trim.tail) == (self._start.position, self._start.tail)
        return TrimSnapshot(head, payload.body) if same else None
