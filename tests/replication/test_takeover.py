"""A takeover reads, fences and reads its fence back; nothing is decided by a record that is missing."""

from __future__ import annotations

import pytest

from qb.replication.journal.append_window import Tenure
from qb.replication.journal.journal_records import JournalRecord, JournalRecordKind, encode
from qb.replication.journal.journal_store import Answer, Fenced, RecordsLost, StoredRecord
from qb.replication.journal.memory_store import MemoryStream
from qb.replication.journal.record_chain import ChainPoint, ChainReader
from qb.replication.journal.takeover import (
    PATIENCE,
    ReadOn,
    TakenOver,
    Takeover,
    TakeoverStep,
    WriteFence,
    fence_records,
)


@pytest.fixture
def stream() -> MemoryStream:
    """A journal with an owner whose window is 3, and two records of it."""
    stream = MemoryStream()
    for data in fence_records(ChainPoint(), "before", 11, 3):
        stream.add(data)
    for previous in (1, 2):
        stream.add(encode(JournalRecord(JournalRecordKind.WHOLE, 1, 11, previous, b"payload")))
    return stream


def reading(takeover: Takeover, step: TakeoverStep, stream: MemoryStream, last: int | None = None) -> TakeoverStep:
    """Read on until another step is asked for, from servers that know nothing behind `last`."""
    for _ in range(10):
        if not isinstance(step, ReadOn):
            return step
        step = takeover.read(stream.read(step.first, 1000, stream.last if last is None else last))
    raise AssertionError("it reads for ever")


def written(takeover: Takeover, step: TakeoverStep, stream: MemoryStream) -> TakeoverStep:
    assert isinstance(step, WriteFence)
    return takeover.answered(Answer.STORED if stream.write(step.after, step.records) else Answer.REFUSED)


def point_of(stream: MemoryStream) -> ChainPoint:
    reader = ChainReader(ChainPoint())
    reader.take(stream.read(1, 1000, stream.last))
    return reader.point


def test_the_fence_is_read_back_before_the_takeover_is_done(stream: MemoryStream) -> None:
    takeover = Takeover(ChainPoint(), "new", 22, 8)
    step = reading(takeover, takeover.start(), stream)
    assert isinstance(step, WriteFence)
    assert (step.after, len(step.records)) == (3, 4)
    done = reading(takeover, written(takeover, step, stream), stream)
    assert isinstance(done, TakenOver)
    assert done.tenure == Tenure(epoch=2, writer=22, position=7, valid=7)
    assert done.point == point_of(stream)


def test_a_stale_read_makes_the_fence_fail_and_more_is_read(stream: MemoryStream) -> None:
    takeover = Takeover(ChainPoint(), "new", 22, 8)
    step = reading(takeover, takeover.start(), stream, last=2)
    step = written(takeover, step, stream)
    assert isinstance(step, ReadOn)
    assert step.pause > 0
    step = reading(takeover, step, stream)
    assert isinstance(step, WriteFence)
    assert step.after == 3


def test_a_fence_that_a_stale_read_does_not_show_is_written_again_with_the_same_expectation(
    stream: MemoryStream,
) -> None:
    takeover = Takeover(ChainPoint(), "new", 22, 8)
    first = reading(takeover, takeover.start(), stream)
    again = reading(takeover, written(takeover, first, stream), stream, last=3)
    assert again == first
    done = reading(takeover, written(takeover, again, stream), stream)
    assert isinstance(done, TakenOver)
    assert done.tenure.epoch == 2
    assert stream.last == 7


def test_an_unknown_answer_to_a_fence_is_resolved_by_what_is_found(stream: MemoryStream) -> None:
    takeover = Takeover(ChainPoint(), "new", 22, 8)
    step = reading(takeover, takeover.start(), stream)
    assert isinstance(step, WriteFence)
    stream.write(step.after, step.records)
    assert isinstance(reading(takeover, takeover.answered(Answer.UNKNOWN), stream), TakenOver)


def test_a_torn_fence_is_followed_by_another_that_covers_the_same_window(stream: MemoryStream) -> None:
    takeover = Takeover(ChainPoint(), "new", 22, 2)
    step = reading(takeover, takeover.start(), stream)
    assert isinstance(step, WriteFence)
    stream.write(step.after, step.records[:2])
    again = reading(takeover, takeover.answered(Answer.UNKNOWN), stream)
    assert isinstance(again, WriteFence)
    assert (again.after, len(again.records)) == (5, 4)
    done = reading(takeover, written(takeover, again, stream), stream)
    assert isinstance(done, TakenOver)
    assert done.tenure.epoch == 3


def test_an_owner_that_was_overtaken_before_it_began_does_not_begin(stream: MemoryStream) -> None:
    takeover = Takeover(ChainPoint(), "new", 22, 8)
    step = written(takeover, reading(takeover, takeover.start(), stream), stream)
    for data in fence_records(point_of(stream), "newer", 33, 8):
        stream.add(data)
    with pytest.raises(Fenced) as raised:
        reading(takeover, step, stream)
    assert raised.value.epoch == 3


def test_an_owner_that_fences_itself_anew_never_takes_over_from_another(stream: MemoryStream) -> None:
    mine = Tenure(epoch=1, writer=11, position=1, valid=1)
    takeover = Takeover(ChainPoint(), "before", 12, 3, instead_of=mine)
    assert isinstance(reading(takeover, takeover.start(), stream), WriteFence)
    for data in fence_records(point_of(stream), "another", 33, 8):
        stream.add(data)
    with pytest.raises(Fenced):
        reading(takeover, takeover.answered(Answer.REFUSED), stream)


def test_a_journal_that_ends_before_what_was_read_is_lost_after_long_patience(stream: MemoryStream) -> None:
    takeover = Takeover(point_of(stream), "new", 22, 8)
    step: TakeoverStep = takeover.start()
    reads = 0
    with pytest.raises(RecordsLost, match=r"ends before position 3, .* restore it"):
        while True:
            assert isinstance(step, ReadOn), "it must not write"
            assert step.first == 3
            reads += 1
            step = takeover.read([])
    assert reads - 1 == PATIENCE


def test_a_journal_that_holds_another_record_where_one_was_read_is_lost(stream: MemoryStream) -> None:
    takeover = Takeover(point_of(stream), "new", 22, 8)
    with pytest.raises(RecordsLost):
        takeover.read([StoredRecord(3, b"another")])


def test_a_failed_read_is_tried_again_after_a_pause(stream: MemoryStream) -> None:
    takeover = Takeover(ChainPoint(), "new", 22, 8)
    steps = [takeover.read(None) for _ in range(3)]
    assert all(isinstance(step, ReadOn) and step.pause > 0 for step in steps)
