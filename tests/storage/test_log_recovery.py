"""What a start makes of the files that it finds: tears are cut, damage is named, indexes are mended."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from qb.core.wire.errors import LogDamaged
from qb.storage.engine import ProducerRange, Topic
from qb.storage.log.sealed_batches import seal
from qb.storage.maintenance import drop_expired, prove
from qb.storage.verification import verify
from tests.support.stores import (
    Clock,
    as_killed,
    everything,
    frames,
    indexes,
    logs,
    make_run,
    open_engine,
    opened,
    store,
)


async def fill(directory: Path, batches: list[list[bytes]], **settings: int) -> None:
    async with opened(directory, **settings) as engine:
        for bodies in batches:
            await store(engine.log("t", 0), *bodies)
    as_killed(directory / "data")


def copy(directory: Path, name: str) -> Path:
    """Another place with the same data, to be spoilt."""
    shutil.rmtree(directory.parent / name, ignore_errors=True)
    shutil.copytree(directory, directory.parent / name)
    return directory.parent / name


def written(tail: bytes) -> int:
    """How much of what lies behind a log was ever written: zeros may be room that was kept ready."""
    return len(tail.rstrip(b"\0"))


BATCHES = [[b"1", b"2"], [b"3"], [b"4", b"5"]]
BODIES = [body for bodies in BATCHES for body in bodies]


async def test_a_log_cut_at_any_byte_of_its_last_batch_keeps_every_acked_record(tmp_path: Path) -> None:
    await fill(tmp_path / "whole", BATCHES)
    whole = logs(tmp_path / "whole")[0].read_bytes()
    await fill(tmp_path / "shorter", BATCHES[:2])
    keep = logs(tmp_path / "shorter")[0].stat().st_size
    assert whole[:keep] == logs(tmp_path / "shorter")[0].read_bytes()
    for length in range(keep, len(whole) + 1):
        torn = copy(tmp_path / "whole", "torn")
        logs(torn)[0].write_bytes(whole[:length])
        expected = BODIES if length == len(whole) else BODIES[:3]
        async with opened(torn) as engine:
            assert engine.recovery.cut_bytes == (0 if length == len(whole) else written(whole[keep:length]))
            log = engine.log("t", 0)
            assert await everything(log) == expected
            assert log.next_offset == len(expected)
            await store(log, b"after")
            assert await everything(log) == [*expected, b"after"]
        async with opened(torn) as engine:
            assert await everything(engine.log("t", 0)) == [*expected, b"after"]


@pytest.mark.parametrize("garbage", [b"\0" * 5000, b"\xff" * 300, b"\0\0\0\x20" * 50, frames(3, [b"unsealed"])[0]])
async def test_bytes_that_were_never_sealed_are_cut(tmp_path: Path, garbage: bytes) -> None:
    await fill(tmp_path, BATCHES[:2])
    with logs(tmp_path)[0].open("ab") as log:
        log.write(garbage)
    async with opened(tmp_path) as engine:
        assert engine.recovery.cut_bytes == written(garbage)
        assert await everything(engine.log("t", 0)) == BODIES[:3]


async def test_a_note_names_a_tail_that_was_cut(tmp_path: Path) -> None:
    await fill(tmp_path, BATCHES)
    (log,) = logs(tmp_path)
    with log.open("ab") as file:
        file.write(b"half a batch" + b"\0" * 100)
    async with opened(tmp_path) as engine:
        (note,) = engine.recovery.notes
        assert note.startswith(f"cut 12 bytes off the end of {log}: the last batch was half written, or damaged later")
        assert note.endswith("if it was acked, it is lost")
    async with opened(tmp_path) as engine:
        assert engine.recovery.notes == ()


async def test_one_note_names_the_indexes_that_were_rebuilt(tmp_path: Path) -> None:
    await fill(tmp_path, BATCHES, segment_bytes=10)
    first, *others = indexes(tmp_path)
    assert others
    for path in (first, *others):
        path.unlink()
    async with opened(tmp_path, segment_bytes=10) as engine:
        (note,) = engine.recovery.notes
        assert note.startswith(f"rebuilt {first} and {len(others)} more from the log")
    first.unlink()
    async with opened(tmp_path, segment_bytes=10) as engine:
        (note,) = engine.recovery.notes
        assert note.startswith(f"rebuilt {first} from the log")


async def test_damage_is_noted_once_however_many_sound_segments_follow_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await fill(tmp_path, [[b"%d" % number] for number in range(8)], segment_bytes=10)
    damaged = logs(tmp_path)[0]
    damaged.write_bytes(damaged.read_bytes().replace(b"topic=t", b"topic=x"))
    engine = open_engine(tmp_path, segment_bytes=10)
    await prove(engine._logs)
    engine.close()
    assert len([line for line in caplog.messages if str(damaged) in line]) == 1


async def test_a_whole_batch_that_was_never_acked_is_there_whole(tmp_path: Path) -> None:
    await fill(tmp_path, BATCHES[:2])
    run = make_run(3, [b"x", b"y"])
    with logs(tmp_path)[0].open("ab") as log:
        log.write(run.data + seal([run.data], 3, 2, 2**41, []))
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [*BODIES[:3], b"x", b"y"]


async def test_what_a_start_finds_is_synced_before_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path, BATCHES)
    synced: list[str] = []
    real = os.fdatasync

    def sync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    engine = open_engine(tmp_path)
    assert str(logs(tmp_path)[-1]) in synced
    engine.close()


async def test_a_log_that_cannot_be_synced_at_the_start_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path, BATCHES)

    real = os.fdatasync

    def sync(fd: int) -> None:
        if "/topics/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(5, "Input/output error")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", sync)
        engine = open_engine(tmp_path)
    log = engine.log("t", 0)
    with pytest.raises(LogDamaged, match="cannot be synced"):
        log.append(make_run(log.next_offset, [b"x"]), lambda *_: None)
    engine.close()


async def test_room_that_was_ready_when_the_broker_was_killed_is_no_tear_and_no_damage(tmp_path: Path) -> None:
    bodies = [b"%05d" % number * 100 for number in range(60)]
    async with opened(tmp_path / "live") as engine:
        log = engine.log("t", 0)
        for body in bodies:
            await store(log, body)
        killed = copy(tmp_path / "live", "killed")
    assert logs(killed)[0].stat().st_size > logs(tmp_path / "live")[0].stat().st_size, "a stop gives the room back"
    report = verify(killed / "data")
    assert (report.findings, report.messages) == ([], 60)
    assert not [note for note in report.notes if "torn" in note.what]
    torn = copy(killed, "torn")
    size = logs(tmp_path / "live")[0].stat().st_size
    with logs(torn)[0].open("r+b") as file:
        file.seek(size)
        file.write(frames(60, [b"half a batch"])[0])
    for place, cut_bytes in ((killed, 0), (torn, len(frames(60, [b"half a batch"])[0]))):
        async with opened(place) as engine:
            assert engine.recovery.cut_bytes == cut_bytes
            assert any(note.startswith("cut ") for note in engine.recovery.notes) is bool(cut_bytes)
            assert await everything(engine.log("t", 0)) == bodies
            await store(engine.log("t", 0), b"after")
        assert verify(place / "data").findings == []


async def test_a_segment_gives_back_its_room_before_the_next_one_begins(tmp_path: Path) -> None:
    async with opened(tmp_path, segment_bytes=40_000) as engine:
        for number in range(100):
            await store(engine.log("t", 0), b"%04d" % number * 200)
        killed = copy(tmp_path, "killed")
    assert len(logs(tmp_path)) > 1
    for closed, left in list(zip(logs(tmp_path), logs(killed), strict=True))[:-1]:
        assert closed.read_bytes() == left.read_bytes()
    async with opened(killed, segment_bytes=40_000) as engine:
        assert engine.log("t", 0).end_offset == 100
        assert engine.log("t", 0).state().status == "ok"


async def test_a_flip_before_the_last_batch_is_damage_and_one_in_it_costs_at_most_that_batch(tmp_path: Path) -> None:
    await fill(tmp_path / "whole", BATCHES)
    whole = logs(tmp_path / "whole")[0].read_bytes()
    await fill(tmp_path / "shorter", BATCHES[:2])
    last = logs(tmp_path / "shorter")[0].stat().st_size
    spoilt = copy(tmp_path / "whole", "spoilt")
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        logs(spoilt)[0].write_bytes(flipped)
        engine = open_engine(spoilt)
        log = engine.log("t", 0)
        if log.state().status == "ok":
            assert at >= last
            assert log.end_offset == 3
            assert engine.recovery.cut_bytes == len(whole) - last
        else:
            with pytest.raises(LogDamaged) as caught:
                log.append(make_run(log.next_offset, [b"x"]), lambda *_: None)
            assert caught.value.file == str(logs(spoilt)[0])
            assert caught.value.position <= at
            assert any(str(caught.value) in note for note in engine.recovery.notes)
            assert bytes(flipped) == logs(spoilt)[0].read_bytes()  # it was not repaired
        engine.close()


async def test_a_flip_anywhere_in_a_closed_segment_is_never_served_and_always_found(tmp_path: Path) -> None:
    await fill(tmp_path, [[b"1", b"2"], [b"3"], [b"4"]], segment_bytes=200)
    closed = logs(tmp_path)[0]
    whole = closed.read_bytes()
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        closed.write_bytes(flipped)
        engine = open_engine(tmp_path, segment_bytes=200)
        log = engine.log("t", 0)
        try:
            assert await everything(log) == BODIES[:4]
        except LogDamaged as damage:
            assert damage.file == str(closed)
        await prove(engine._logs)
        with pytest.raises(LogDamaged) as caught:
            await log.read(0, 100)
        assert caught.value.file == str(closed)
        engine.close()


async def test_a_damaged_topic_names_file_and_position_and_the_others_go_on(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        await engine.create_topic(Topic(topic="pair", partitions=2))
        await engine.create_topic(Topic(topic="other"))
        for topic, number in (("pair", 0), ("pair", 1), ("other", 0)):
            for body in (b"a", b"b"):
                await store(engine.log(topic, number), body)
    (path,) = (tmp_path / "data" / "topics" / "pair" / "1").glob("*.log")
    path.write_bytes(path.read_bytes().replace(b"topic=t", b"topic=x", 1))
    async with opened(tmp_path) as engine:
        for number in (0, 1):
            log = engine.log("pair", number)
            assert log.state().status == "damaged"
            assert log.read_recent(0, 100) is None
            with pytest.raises(LogDamaged) as caught:
                await log.read(0, 100)
            assert caught.value.file == str(path)
            assert caught.value.position == 72
            with pytest.raises(LogDamaged):
                log.append(make_run(log.next_offset, [b"x"]), lambda *_: None)
            with pytest.raises(LogDamaged):
                await log.offset_for_time(0)
        await store(engine.log("other", 0), b"c")
        assert await everything(engine.log("other", 0)) == [b"a", b"b", b"c"]


async def test_a_missing_partition_is_damage(tmp_path: Path) -> None:
    await fill(tmp_path, BATCHES)
    logs(tmp_path)[0].unlink()
    engine = open_engine(tmp_path)
    assert engine.log("t", 0).state().status == "damaged"
    assert "no log" in engine.recovery.notes[0]
    engine.close()


async def test_a_missing_segment_in_the_middle_is_damage(tmp_path: Path) -> None:
    await fill(tmp_path, BATCHES, segment_bytes=10)
    first, second, third = logs(tmp_path)
    second.unlink()
    engine = open_engine(tmp_path)
    assert engine.log("t", 0).state().status == "damaged"
    assert str(first) in engine.recovery.notes[0]
    engine.close()
    assert third.exists()


@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("spoil", ["missing", "empty", "short", "half an entry", "long", "garbage", "stale"])
async def test_a_bad_index_is_rebuilt(tmp_path: Path, segment: int, spoil: str) -> None:
    await fill(tmp_path, BATCHES, segment_bytes=250)
    assert len(logs(tmp_path)) == 2
    path = indexes(tmp_path)[segment]
    good = path.read_bytes()
    bad = {
        "missing": None,
        "empty": b"",
        "short": good[:-16],
        "half an entry": good[:-8],
        "long": good + good[:16],
        "garbage": bytes(byte ^ 0x55 for byte in good),
        "stale": good[:-16] + b"\0" * 16,
    }[spoil]
    path.unlink() if bad is None else path.write_bytes(bad)
    async with opened(tmp_path) as engine:
        assert engine.recovery.rebuilt_indexes == 1
        assert await everything(engine.log("t", 0), max_bytes=1) == BODIES
        assert path.read_bytes() == good
    async with opened(tmp_path) as engine:
        assert engine.recovery.rebuilt_indexes == 0


@pytest.mark.parametrize("left", ["empty", "half", "flipped", "no index"])
async def test_a_segment_that_was_never_finished_is_made_again(tmp_path: Path, left: str) -> None:
    await fill(tmp_path, BATCHES)
    first = seal((), 5, 0, 2**41, [ProducerRange(1, 1, 4, 1)])
    contents = {"empty": b"", "half": first[:50], "flipped": first[:-1] + b"\xff", "no index": b""}[left]
    unborn = logs(tmp_path)[0].with_name(f"{5:020}.log")
    unborn.write_bytes(contents)
    if left != "no index":
        unborn.with_suffix(".idx").touch()
    async with opened(tmp_path) as engine:
        assert not unborn.exists()
        assert not unborn.with_suffix(".idx").exists()
        await store(engine.log("t", 0), b"6")
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [*BODIES, b"6"]


async def test_a_segment_that_was_being_followed_has_no_tear(tmp_path: Path) -> None:
    """The next segment is begun when all of this one is durable: what is missing from it was acked."""
    await fill(tmp_path, BATCHES)
    log = logs(tmp_path)[0]
    log.with_name(f"{5:020}.log").touch()
    log.write_bytes(log.read_bytes()[:-1])
    engine = open_engine(tmp_path)
    assert engine.log("t", 0).state().status == "damaged"
    assert str(log) in engine.recovery.notes[0]
    engine.close()


async def test_the_newest_segment_alone_restores_what_is_known_of_producers(tmp_path: Path) -> None:
    async with opened(tmp_path, segment_bytes=300) as engine:
        log = engine.log("t", 0)
        for number in range(1, 20, 2):
            await store(log, b"x", b"y", producer_id=7, first_number=number)
            await store(log, b"z")
            await store(log, b"w", producer_id=8, first_number=number)
        known = list(log.ranges())
        assert ProducerRange(7, 19, 36, 2) in known
        assert ProducerRange(8, 1, 3, 1) in known
        assert len(logs(tmp_path)) > 3
        await drop_expired(log, 0, 0, 1)
    assert len(logs(tmp_path)) == 1
    engine = open_engine(tmp_path)
    assert sorted(engine.log("t", 0).ranges()) == sorted(known)
    assert engine.log("t", 0).first_offset > 0
    engine.close()


async def test_time_does_not_go_back_in_a_log_when_the_clock_does(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as engine:
        late = await store(engine.log("t", 0), b"a")
        clock.now -= 5000
        assert await store(engine.log("t", 0), b"b") == late
    async with opened(tmp_path, clock) as engine:
        assert await store(engine.log("t", 0), b"c") == late
        assert await engine.log("t", 0).offset_for_time(late) == 0
        assert await engine.log("t", 0).offset_for_time(late + 1) == 3
