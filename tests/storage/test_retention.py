"""Which segments are dropped, and that nothing else changes when they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.core.wire.errors import DiskFull, OffsetOutOfRange
from qb.storage.engine import Topic
from qb.storage.faults import Faults
from qb.storage.log.retention import ClosedSegment, droppable
from qb.storage.log.sealed_batches import walk
from qb.storage.log.segment import reader
from qb.storage.maintenance import drop_expired, sweep
from tests.support.stores import HOUR, Clock, everything, indexes, logs, opened, store
from tests.support.waiting import until

HOURLY = [ClosedSegment(100, hour * HOUR) for hour in range(1, 6)]


@pytest.mark.parametrize(
    ("hours", "limit", "expected"),
    [(0, 0, 0), (2, 0, 3), (2.5, 0, 3), (0.1, 0, 5), (100, 0, 0), (0, 350, 2), (0, 550, 0), (0, 1, 5), (2, 450, 3)],
)
def test_segments_go_oldest_first_by_age_or_by_size(hours: float, limit: int, expected: int) -> None:
    assert droppable(HOURLY, 50, 6 * HOUR - 1, hours, limit) == expected


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100))), st.integers(0, 100), st.integers(0, 500))
def test_what_stays_fits_or_is_the_active_segment_alone(
    segments: list[tuple[int, int]], active: int, limit: int
) -> None:
    closed = [ClosedSegment(*segment) for segment in segments]
    kept = closed[droppable(closed, active, 200, 0, limit) :]
    assert not limit or not kept or active + sum(segment.size for segment in kept) <= limit


async def fill(directory: Path, clock: Clock, **topic: float) -> None:
    """Ten segments of one message, an hour apart."""
    async with opened(directory, clock, segment_bytes=1) as engine:
        await engine.delete_topic("t")
        await engine.create_topic(Topic(topic="t", **topic))
        for number in range(10):
            await store(engine.log("t", 0), b"%d" % number)
            clock.now += HOUR


async def test_offsets_go_on_when_every_closed_segment_has_been_dropped(tmp_path: Path) -> None:
    clock = Clock()
    await fill(tmp_path, clock)
    async with opened(tmp_path, clock) as engine:
        log = engine.log("t", 0)
        await drop_expired(log, clock.now + 100 * HOUR, 1, 0)
        assert (log.first_offset, log.end_offset) == (9, 10)
        assert len(logs(tmp_path)) == len(indexes(tmp_path)) == 1
        with pytest.raises(OffsetOutOfRange) as caught:
            await log.read(8, 100)
        assert caught.value.first == 9
    async with opened(tmp_path, clock, segment_bytes=1) as engine:
        log = engine.log("t", 0)
        assert (log.first_offset, log.next_offset) == (9, 10)
        await store(log, b"10")
        assert await everything(log) == [b"9", b"10"]
        await drop_expired(log, clock.now + 100 * HOUR, 1, 0)
        assert (log.first_offset, log.next_offset) == (10, 11)


async def test_the_broker_sweeps_by_its_settings(tmp_path: Path) -> None:
    clock = Clock()
    await fill(tmp_path, clock)
    async with opened(tmp_path, clock, retention_hours=5.5) as engine:
        await until(lambda: engine.log("t", 0).first_offset == 5)
        assert await everything(engine.log("t", 0)) == [b"%d" % number for number in range(5, 10)]


async def test_a_topic_overrides_the_broker(tmp_path: Path) -> None:
    clock = Clock()
    await fill(tmp_path, clock, retention_hours=3.5)
    async with opened(tmp_path, clock, retention_hours=1000.0) as engine:
        await until(lambda: engine.log("t", 0).first_offset == 7)


async def test_zero_for_a_topic_means_without_limit(tmp_path: Path) -> None:
    clock = Clock()
    await fill(tmp_path, clock, retention_bytes=0, retention_hours=0)
    async with opened(tmp_path, clock, segment_bytes=1) as engine:
        await engine.create_topic(Topic(topic="as the broker"))
        for _ in range(3):
            await store(engine.log("as the broker", 0), b"x")
        await sweep(engine._logs, clock.now, 1, 1, Faults())
        assert engine.log("t", 0).first_offset == 0
        assert engine.log("as the broker", 0).first_offset == 2


async def test_a_large_partition_is_cut_down_to_its_limit(tmp_path: Path) -> None:
    clock = Clock()
    await fill(tmp_path, clock, retention_bytes=500)
    async with opened(tmp_path, clock) as engine:
        await sweep(engine._logs, clock.now, 0, 0, Faults())
        log = engine.log("t", 0)
        assert log.state().bytes == sum(path.stat().st_size for path in logs(tmp_path)) <= 500
        assert log.first_offset > 0
        assert log.end_offset == 10


async def test_a_reader_in_the_middle_of_a_dropped_segment_gets_its_data_or_a_clear_error(tmp_path: Path) -> None:
    clock = Clock()
    await fill(tmp_path, clock)
    async with opened(tmp_path, clock, tail_bytes=0) as engine:
        log = engine.log("t", 0)
        segment = log.closed_segments[0]
        with segment.open() as fd:
            await drop_expired(log, clock.now, 0, 1)
            assert [batch.next_offset for batch in walk(reader(fd), 0, segment.size, 0)] == [0, 1]
        assert segment.log_path not in map(str, logs(tmp_path))
        with pytest.raises(OffsetOutOfRange):
            await log.look(segment, 0, lambda: segment.read(0, 100, segment.size))


async def test_a_drop_that_a_crash_interrupts_is_finished_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path, Clock())
    with monkeypatch.context() as crashing:
        crashing.setattr("qb.storage.maintenance._delete", lambda segments: None)
        async with opened(tmp_path) as engine:
            await drop_expired(engine.log("t", 0), 0, 0, 1)
    logs(tmp_path)[0].unlink()  # and its index is still there
    assert len(logs(tmp_path)) == 9
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"9"]
        assert len(indexes(tmp_path)) == len(logs(tmp_path)) == 1


async def test_nothing_is_deleted_that_could_not_be_noted_as_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path, Clock())

    async def fails(*_: object) -> None:
        raise DiskFull("no room")

    async with opened(tmp_path) as engine:
        monkeypatch.setattr(engine.metadata, "put", fails)
        await drop_expired(engine.log("t", 0), 0, 0, 1)
    assert len(logs(tmp_path)) == 10
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"%d" % number for number in range(10)]
