"""One log as readers and writers see it: offsets, the visible end, rolling, memory and disk."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from qb.core.wire.errors import OffsetOutOfRange
from qb.core.wire.frames import MessageType, frame_length
from qb.storage.engine import StoredChunk, Topic
from qb.storage.log.record_positions import words
from qb.storage.log.sealed_batches import walk
from tests.support.stores import (
    HOUR,
    NOON,
    Clock,
    everything,
    give,
    indexes,
    logs,
    make_run,
    messages,
    open_engine,
    opened,
    running,
    store,
)


async def test_offsets_are_dense_across_runs_batches_and_starts(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        assert (log.first_offset, log.end_offset, log.next_offset) == (0, 0, 0)
        receipts = [give(log, [b"%d-%d" % (run, i) for i in range(run)]) for run in range(1, 5)]
        assert (log.end_offset, log.next_offset) == (0, 10)
        for receipt in receipts:
            await receipt.wait()
        assert (log.end_offset, log.next_offset) == (10, 10)
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        assert (engine.recovery.topics, engine.recovery.messages, log.next_offset) == (1, 10, 10)
        assert await everything(log) == [b"%d-%d" % (run, i) for run in range(1, 5) for i in range(run)]


async def test_a_run_with_the_wrong_first_offset_is_a_fault_of_the_caller(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        with pytest.raises(AssertionError):
            engine.log("t", 0).append(make_run(5, [b"x"]), lambda *_: None)


async def test_nothing_is_visible_before_it_is_durable_and_watchers_hear_when_it_is(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        ends: list[int] = []
        moved = trio.Event()

        def watcher() -> None:
            ends.append(log.end_offset)
            moved.set()

        log.watch(lambda: 1 // 0)  # a fault of one watcher is no fault of the others
        stop = log.watch(watcher)
        receipt = give(log, [b"a", b"b"])
        assert log.end_offset == 0  # no step of the event loop has passed: it cannot be durable yet
        assert log.read_recent(0, 100) == StoredChunk(0, b"", ())
        assert log.read_recent(1, 100) is None
        await moved.wait()
        assert ends == [2]
        assert len(receipt.calls) == 1
        stop()
        stop()
        await store(log, b"c")
        assert ends == [2]


@pytest.mark.parametrize("tail_bytes", [0, 10**6])
@pytest.mark.parametrize("max_bytes", [1, 10**6])
async def test_nothing_behind_a_held_end_is_seen_until_it_is_released(
    tmp_path: Path, tail_bytes: int, max_bytes: int
) -> None:
    clock = Clock()
    async with opened(tmp_path, clock, tail_bytes=tail_bytes, segment_bytes=200) as engine:
        log = engine.log("t", 0)
        seen: list[int] = []
        await store(log, b"before", b"before too")
        log.watch(lambda: seen.append(log.end_offset))
        log.hold()
        clock.now += 1000
        for number in range(5):
            await store(log, b"held %d" % number)
        assert (log.end_offset, log.durable_offset, log.next_offset) == (2, 7, 7)
        assert await everything(log, max_bytes) == [b"before", b"before too"]
        assert await log.offset_for_time(clock.now) == 2
        with pytest.raises(OffsetOutOfRange):
            await log.read(3, max_bytes)
        assert seen == []
        log.release()
        assert (log.end_offset, seen) == (7, []), "watchers are called after the step, when all logs are released"
        await wait_all_tasks_blocked()
        assert seen == [7]
        assert await log.offset_for_time(clock.now) == 2
        assert (await everything(log, max_bytes))[2:] == [b"held %d" % number for number in range(5)]
        await store(log, b"after")
        assert log.end_offset == 8


async def test_an_end_can_be_held_where_it_stood_before_the_start(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        for number in range(3):
            await store(engine.log("t", 0), b"%d" % number)
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        log.hold(1)
        assert (log.end_offset, log.durable_offset, log.next_offset) == (1, 3, 3)
        assert await everything(log) == [b"0"]
        await store(log, b"3")
        assert await everything(log) == [b"0"]
        log.release()
        assert await everything(log) == [b"0", b"1", b"2", b"3"]


async def test_reading_at_the_end_is_empty_and_elsewhere_out_of_range(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        await store(log, b"a")
        assert await log.read(1, 100) == StoredChunk(1, b"", ())
        assert log.read_recent(1, 100) == StoredChunk(1, b"", ())
        for offset in (-1, 2):
            assert log.read_recent(offset, 100) is None
            with pytest.raises(OffsetOutOfRange) as caught:
                await log.read(offset, 100)
            assert (caught.value.first, caught.value.end) == (0, 1)


@pytest.mark.parametrize("tail_bytes", [0, 1000, 10**6])
@pytest.mark.parametrize("max_bytes", [1, 60, 200, 10**6])
async def test_memory_and_disk_give_the_same_records_from_every_offset(
    tmp_path: Path, tail_bytes: int, max_bytes: int
) -> None:
    async with opened(tmp_path, tail_bytes=tail_bytes, segment_bytes=1024) as engine:
        log = engine.log("t", 0)
        bodies = [b"%d" % number * (1 + number % 30) for number in range(60)]
        for start in range(0, 60, 6):
            first = give(log, bodies[start : start + 1])
            second, third = give(log, bodies[start + 1 : start + 4]), give(log, bodies[start + 4 : start + 6])
            for receipt in (first, second, third):
                await receipt.wait()
        assert len(logs(tmp_path)) > 2
        for offset in range(60):
            chunk = await log.read(offset, max_bytes)
            found = messages(chunk)
            assert found[0] == (offset, bodies[offset])
            assert [body for _, body in found] == bodies[offset : offset + len(found)]
            one_record = frame_length(chunk.data, chunk.positions[0])
            assert chunk.size <= max(max_bytes, one_record + 100)


@pytest.mark.parametrize("believed", [True, False])
@pytest.mark.parametrize("tail_bytes", [0, 10**6])
@pytest.mark.parametrize("max_bytes", [1, 1000, 10**6])
async def test_in_bulk_come_whole_batches_from_the_one_that_holds_the_offset(
    tmp_path: Path, tail_bytes: int, max_bytes: int, believed: bool
) -> None:
    clock = Clock()
    async with opened(tmp_path, clock, tail_bytes=tail_bytes) as engine:
        log = engine.log("t", 0)
        for number in range(20):
            await store(log, *[b"%d" % number * 9] * 3)
            clock.now += 1
        log._segments[0].index.believed = believed
        for offset in range(60):
            chunk = await log.read_whole(offset, max_bytes)
            assert chunk.first_offset == offset - offset % 3
            assert [body for _, body in messages(chunk)] == [
                b"%d" % (number // 3) * 9 for number in range(chunk.first_offset, chunk.next_offset)
            ]
            walked = [
                batch.positions for batch in walk(_reader(chunk.frames), 0, len(chunk.frames), offset - offset % 3)
            ]
            assert sum(map(len, walked)) == len(chunk.positions)  # so every batch has its seal
            assert len(walked) == 1 if max_bytes == 1 else len(walked) > 1 or offset >= 57
            first, *marks = struct.unpack(f">{len(chunk.positions)}I", words(chunk.positions))
            assert [mark - first for mark in marks] == [each - chunk.positions[0] for each in chunk.positions][1:]


def _reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda position, length: data[position : position + length]


async def test_in_bulk_only_the_visible_end_cuts_a_batch(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        await store(log, b"a", b"b", b"c")
        log.hold(2)
        assert messages(await log.read_whole(1, 10**6)) == [(0, b"a"), (1, b"b")]
        assert await log.read_whole(2, 10**6) == StoredChunk(2, b"", ())
        with pytest.raises(OffsetOutOfRange):
            await log.read_whole(3, 10**6)


async def test_a_chunk_holds_frames_and_seals_and_nothing_else(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        for number in range(5):
            await store(log, b"x" * number)
        for chunk in (log.read_recent(1, 10**6), await log.read(0, 10**6)):
            assert chunk is not None
            at, kinds = 0, []
            while at < len(chunk.frames):
                kinds.append(int.from_bytes(chunk.frames[at + 4 : at + 8]))
                at += frame_length(chunk.frames, at)
            assert kinds == [MessageType.DATA, MessageType.SEAL] * len(chunk.positions)


async def test_a_record_larger_than_asked_for_comes_alone(tmp_path: Path) -> None:
    async with opened(tmp_path, tail_bytes=0) as engine:
        log = engine.log("t", 0)
        await store(log, b"a", b"B" * 200_000, b"c")
        assert messages(await log.read(1, 10)) == [(1, b"B" * 200_000)]


async def test_a_full_segment_is_followed_by_another(tmp_path: Path) -> None:
    async with opened(tmp_path, segment_bytes=300) as engine:
        log = engine.log("t", 0)
        for number in range(12):
            await store(log, b"%d" % number)
        names = [int(path.stem) for path in logs(tmp_path)]
        assert names[0] == 0
        assert len(names) > 2
        assert log.state().segments == len(names)
        assert all(path.stat().st_size >= 300 for path in logs(tmp_path)[:-1])
        assert log.state().bytes == sum(path.stat().st_size for path in logs(tmp_path))
    assert [path.stat().st_size for path in indexes(tmp_path)] == [
        16 * (end - base) for base, end in zip(names, [*names[1:], 12], strict=True)
    ]
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"%d" % number for number in range(12)]


async def test_a_segment_rolls_by_age_at_the_next_append_but_never_while_empty(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock, segment_hours=1.0) as engine:
        log = engine.log("t", 0)
        clock.now += 5 * HOUR
        await store(log, b"a")
        clock.now += HOUR // 2
        await store(log, b"b")
        assert len(logs(tmp_path)) == 1
        clock.now += HOUR
        await store(log, b"c")
        assert [int(path.stem) for path in logs(tmp_path)] == [0, 2]
    async with opened(tmp_path, clock, segment_hours=1.0) as engine:
        clock.now += HOUR
        await store(engine.log("t", 0), b"d")
        assert [int(path.stem) for path in logs(tmp_path)] == [0, 2, 3]
        assert await everything(engine.log("t", 0)) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("reopen", [False, True])
async def test_a_time_leads_to_the_first_record_appended_then_or_later(tmp_path: Path, reopen: bool) -> None:
    clock = Clock()
    async with opened(tmp_path, clock, segment_bytes=200) as engine:
        for number in range(10):
            clock.now = NOON + 1000 * number
            await store(engine.log("t", 0), b"x", b"y")
        if not reopen:
            await check_times(engine.log("t", 0))
    if reopen:
        async with opened(tmp_path, clock) as engine:
            await check_times(engine.log("t", 0))


async def check_times(log: object) -> None:
    for time_ms, offset in [(0, 0), (NOON, 0), (NOON + 1, 2), (NOON + 5000, 10), (NOON + 5001, 12), (NOON + 9001, 20)]:
        assert await log.offset_for_time(time_ms) == offset  # type: ignore[attr-defined]


async def test_many_partitions_share_few_open_files(tmp_path: Path) -> None:
    async with opened(tmp_path, fsync_on_write=False, tail_bytes=0) as engine:
        await engine.create_topic(Topic(topic="wide", partitions=300))
        receipts = [give(engine.log("wide", number), [b"%d" % number]) for number in range(300)]
        for receipt in receipts:
            await receipt.wait()
        for number in range(300):
            assert await everything(engine.log("wide", number)) == [b"%d" % number]
        assert len(engine._files._open) <= 256


async def test_all_logs_together_keep_no_more_than_tail_bytes_in_memory(tmp_path: Path) -> None:
    async with opened(tmp_path, tail_bytes=20_000) as engine:
        await engine.create_topic(Topic(topic="u"))
        for _ in range(30):
            await store(engine.log("t", 0), b"x" * 1000)
            await store(engine.log("u", 0), b"x" * 1000)
        kept = [
            sum(log._tail.read(offset, 1) is not None for offset in range(30))
            for log in (engine.log("t", 0), engine.log("u", 0))
        ]
        assert 2 < min(kept) <= max(kept) < 11


ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.lists(st.binary(max_size=60), min_size=1, max_size=5)),
    st.tuples(st.just("append together"), st.lists(st.binary(max_size=60), min_size=2, max_size=5)),
    st.tuples(st.just("read"), st.tuples(st.integers(0, 60), st.integers(1, 400))),
    st.tuples(st.just("time"), st.integers(-2, 10)),
    st.tuples(st.just("wait"), st.integers(0, 2 * HOUR)),
    st.tuples(st.just("reopen"), st.none()),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ACTIONS, max_size=25), st.sampled_from([0, 300, 10**6]))
def test_a_log_behaves_like_a_list_whatever_happens(actions: list[tuple[str, object]], tail_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        trio.run(Model(Path(directory), tail_bytes).play, actions)


class Model:
    """Plays actions against an engine and a plain list at the same time."""

    def __init__(self, directory: Path, tail_bytes: int) -> None:
        self.directory, self.clock = directory, Clock()
        self.settings = {"segment_bytes": 400, "segment_hours": 1.0, "tail_bytes": tail_bytes, "fsync_on_write": False}
        self.bodies: list[bytes] = []
        self.times: list[int] = []

    async def play(self, actions: list[tuple[str, object]]) -> None:
        rest = list(actions)
        first = True
        while rest or first:
            async with running(open_engine(self.directory, self.clock, **self.settings)) as engine:
                if first:
                    await engine.create_topic(Topic(topic="t"))
                first = False
                log = engine.log("t", 0)
                assert log.next_offset == len(self.bodies)
                while rest:
                    action, argument = rest.pop(0)
                    if action == "reopen":
                        break
                    await getattr(self, action.replace(" ", "_"))(log, argument)
                assert await everything(log, max_bytes=100) == self.bodies

    async def append(self, log, bodies) -> None:  # type: ignore[no-untyped-def]
        self.times += [await store(log, *bodies)] * len(bodies)
        self.bodies += bodies

    async def append_together(self, log, bodies) -> None:  # type: ignore[no-untyped-def]
        for receipt in [give(log, [body]) for body in bodies]:
            self.times.append(await receipt.wait())
        self.bodies += bodies

    async def read(self, log, where) -> None:  # type: ignore[no-untyped-def]
        offset, max_bytes = where
        if offset > len(self.bodies):
            with pytest.raises(OffsetOutOfRange):
                await log.read(offset, max_bytes)
            return
        found = [body for _, body in messages(await log.read(offset, max_bytes))]
        assert found == self.bodies[offset : offset + len(found)]
        assert bool(found) == (offset < len(self.bodies))

    async def time(self, log, number) -> None:  # type: ignore[no-untyped-def]
        wanted = self.times[number] if -len(self.times) <= number < len(self.times) else self.clock.now + 1
        expected = [offset for offset, time in enumerate(self.times) if time >= wanted]
        assert await log.offset_for_time(wanted) == (expected[0] if expected else len(self.bodies))

    async def wait(self, log, ms) -> None:  # type: ignore[no-untyped-def]
        self.clock.now += ms
