"""Readers decide by order alone which records are void, and notice a journal that has lost something."""

from __future__ import annotations

import pytest

from qb.replication.journal.journal_records import JournalRecord, JournalRecordKind, encode
from qb.replication.journal.journal_store import JournalGap, JournalNewer, RecordsLost, StoredRecord
from qb.replication.journal.record_chain import ChainPoint, ChainReader, advance
from qb.replication.journal.takeover import fence_records
from tests.support.journal_world import of_a_version


class Stored:
    """A journal that is written by hand."""

    def __init__(self) -> None:
        self.point = ChainPoint()
        self.records: list[StoredRecord] = []

    def add(self, data: bytes) -> bool:
        """Add a record; returns whether readers take it for valid."""
        self.records.append(StoredRecord(len(self.records) + 1, data))
        self.point, record = advance(self.point, self.records[-1])
        return record is not None

    def fence(self, writer: int, window: int = 2, most: int = 256) -> list[bool]:
        """Add a fence, or the first records of one."""
        return [self.add(data) for data in fence_records(self.point, f"owner-{writer}", writer, window)[:most]]

    def append(self, epoch: int, writer: int, previous: int) -> bool:
        return self.add(encode(JournalRecord(JournalRecordKind.WHOLE, epoch, writer, previous, b"payload")))


@pytest.fixture
def stored() -> Stored:
    journal = Stored()
    assert journal.fence(writer=11) == [True]
    assert journal.append(1, 11, previous=1)
    return journal


def test_a_fence_has_one_record_more_than_the_window_that_the_owner_before_declared(stored: Stored) -> None:
    assert stored.fence(writer=22, window=5) == [True] * 3
    assert stored.fence(writer=33, window=5) == [True] * 6


def test_a_record_of_an_older_epoch_behind_a_fence_is_void(stored: Stored) -> None:
    stored.fence(writer=22)
    assert not stored.append(1, 11, previous=2)
    assert not stored.append(1, 11, previous=5)
    assert stored.append(2, 22, previous=5)  # the new owner's own predecessor is the end of its fence


def test_a_record_behind_a_foreign_one_is_void_if_its_predecessor_is_not_there(stored: Stored) -> None:
    assert not stored.add(b"foreign")
    assert not stored.append(1, 11, previous=3)
    assert stored.append(1, 11, previous=2)


def test_a_record_of_another_writer_of_the_same_epoch_is_void(stored: Stored) -> None:
    assert not stored.append(1, 12, previous=2)


def test_a_fence_that_knows_another_end_is_void(stored: Stored) -> None:
    earlier = ChainPoint(position=1, valid=1, epoch=1, writer=11, window=2)
    assert [stored.add(data) for data in fence_records(earlier, "late", 22, 2)] == [False] * 3
    assert stored.point.epoch == 1


def test_a_fence_counts_from_its_first_record(stored: Stored) -> None:
    assert stored.fence(writer=22, most=1) == [True]
    assert not stored.append(1, 11, previous=2)
    assert stored.point.epoch == 2
    assert not stored.point.whole


def test_the_fence_behind_a_torn_one_covers_the_windows_of_all_owners_that_may_still_write() -> None:
    journal = Stored()
    journal.fence(writer=11, window=7)
    journal.fence(writer=22, window=2, most=3)
    assert not journal.point.whole
    assert journal.fence(writer=33, window=2) == [True] * 8
    assert journal.fence(writer=44, window=2) == [True] * 3


def test_readers_that_begin_at_different_points_agree(stored: Stored) -> None:
    stored.add(b"foreign")
    stored.fence(writer=22)
    stored.append(1, 11, previous=2)
    stored.append(2, 22, previous=stored.point.valid)
    whole = ChainReader(ChainPoint())
    valid = whole.take(stored.records)
    for cut in range(1, len(stored.records)):
        first = ChainReader(ChainPoint())
        found = first.take(stored.records[:cut])
        second = ChainReader(first.point)
        assert second.next == cut  # it reads the last record again, and compares it
        assert found + second.take(stored.records[cut - 1 :]) == valid
        assert second.point == whole.point


def test_a_record_that_has_changed_since_it_was_read_shows_that_the_journal_was_lost(stored: Stored) -> None:
    stored.append(1, 11, previous=2)
    reader = ChainReader(stored.point)
    with pytest.raises(RecordsLost, match=r"position 3 .* restore it"):
        reader.take([StoredRecord(3, b"another")])


def test_a_gap_is_no_end(stored: Stored) -> None:
    reader = ChainReader(ChainPoint())
    with pytest.raises(JournalGap, match="goes on at position 2, and 1 was expected"):
        reader.take(stored.records[1:])


@pytest.mark.parametrize(("epoch", "writer"), [(1, 11), (2, 22)])
def test_who_does_not_understand_a_valid_record_does_not_take_it_for_void(
    stored: Stored, epoch: int, writer: int
) -> None:
    newer = of_a_version(2, 2, JournalRecord(JournalRecordKind.WHOLE, epoch, writer, 2, b"payload"))
    with pytest.raises(JournalNewer, match=r"at position 3 .* upgrade this broker"):
        stored.add(newer)


@pytest.mark.parametrize(("epoch", "writer", "previous"), [(1, 12, 2), (2, 22, 1), (0, 11, 2)])
def test_a_record_of_a_later_version_that_is_void_harms_no_reader(
    stored: Stored, epoch: int, writer: int, previous: int
) -> None:
    newer = of_a_version(2, 2, JournalRecord(JournalRecordKind.WHOLE, epoch, writer, previous, b"payload"))
    assert not stored.add(newer)
    assert stored.append(1, 11, previous=2)
