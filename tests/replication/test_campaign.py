"""The campaign's own judgement: it finds what is lost, and what lies behind a fence."""

from __future__ import annotations

from types import SimpleNamespace

from qb.replication.journal.journal import START, JournalEntry
from qb.replication.journal.journal_records import JournalRecord, JournalRecordKind, encode
from qb.replication.journal.journal_store import StoredRecord
from qb.replication.journal.record_chain import ChainPoint
from qb.replication.journal.takeover import fence_records
from tests.support.journal_ledger import lost
from tests.support.journal_owner import payload_of
from tests.support.journal_reading import behind_fences


def test_a_record_of_an_older_epoch_behind_a_whole_fence_is_counted() -> None:
    old = encode(JournalRecord(JournalRecordKind.WHOLE, 1, 11, 1, b"late"))
    first = fence_records(ChainPoint(), "a", 11, 2)
    second = fence_records(ChainPoint(position=1, valid=1, epoch=1, window=2), "b", 22, 2)
    stored = [*first, *second[:2], old, *second[2:], old, b"foreign"]
    assert behind_fences([StoredRecord(number, data) for number, data in enumerate(stored, 1)]) == 1


def test_an_ack_is_lost_if_another_payload_lies_there_or_none() -> None:
    owner = SimpleNamespace(name="a", acks={0: 5, 1: 6, 2: 7})
    entries = [
        JournalEntry(5, 1, [payload_of("a", 0)], START),
        JournalEntry(6, 1, [payload_of("a", 0)], START),
    ]
    assert lost(owner, entries) == [1, 2]  # type: ignore[arg-type]
