"""What a log has at least is noted in the metadata: whole files that are missing, and ends cut between two batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from qb.core.wire.errors import LogDamaged
from qb.storage.clean_stop import remove_proof
from qb.storage.engine import ProducerRange, Topic
from qb.storage.local_engine import LocalEngine
from qb.storage.log import segment
from qb.storage.log.log_extents import LogExtent, key_of
from qb.storage.verification import verify
from tests.support.stores import everything, logs, open_engine, opened, partition, running, store

BODIES = [b"%d" % number for number in range(6)]


@asynccontextmanager
async def killed(directory: Path, segment_bytes: int = 1) -> AsyncIterator[LocalEngine]:
    """An engine whose log has six messages, each in a segment of its own, and that leaves no proof of a clean stop."""
    async with opened(directory, segment_bytes=segment_bytes) as engine:
        for body in BODIES:
            await store(engine.log("t", 0), body)
        yield engine
    remove_proof(directory / "data")


async def note(engine: LocalEngine) -> None:
    """Have the ends of logs noted, durably."""
    engine._extents.note()
    await engine.metadata.flush()


def damage_of(directory: Path) -> str:
    """Return what a start says of the log; verify has to find it too."""
    assert verify(directory / "data").findings
    engine = open_engine(directory)
    try:
        engine.log("t", 0).check_writable()
    except LogDamaged as damage:
        return str(damage)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize("number", [0, 2, 5])
async def test_a_segment_that_is_missing_after_a_kill_is_damage(tmp_path: Path, number: int) -> None:
    async with killed(tmp_path) as engine:
        await note(engine)
    logs(tmp_path)[number].unlink()
    assert damage_of(tmp_path)


async def test_the_oldest_segment_is_missed_even_if_nothing_was_noted_since_the_topic_was_made(tmp_path: Path) -> None:
    async with killed(tmp_path):
        pass
    logs(tmp_path)[0].unlink()
    assert "begins with offset 1, but the log begins with 0: a segment is missing" in damage_of(tmp_path)


async def test_an_end_that_is_cut_between_two_batches_after_a_kill_is_damage(tmp_path: Path) -> None:
    async with killed(tmp_path, segment_bytes=2**20) as engine:
        await store(engine.log("t", 0), b"last")
        await note(engine)
        size = engine.log("t", 0)._segments[-1].size
    (log,) = logs(tmp_path)
    whole = log.read_bytes()
    last = whole.rindex(b"last")
    ends = [size for size in range(last) if damage_free(whole, size)]
    log.write_bytes(whole[: ends[-1]])
    assert "ends before offset 6, but all before 7 was stored" in damage_of(tmp_path)
    assert log.read_bytes() == whole[: ends[-1]], "nothing is cut"
    log.write_bytes(whole[: ends[-1]] + bytes(size - ends[-1]))
    assert "ends before offset 6" in damage_of(tmp_path)


def notes_of(directory: Path) -> list[str]:
    """Return what a start says, and verify as a note, of a log that is served."""
    noted = [note.what for note in verify(directory / "data").notes]
    engine = open_engine(directory)
    engine.log("t", 0).check_writable()
    engine.close()
    said = [note for note in engine.recovery.notes if not note.startswith("rebuilt")]
    assert len([note for note in noted if "index" not in note]) == len(said)
    return said


async def test_a_last_batch_that_is_cut_off_exactly_at_its_border_at_once_after_its_ack_is_reported(
    tmp_path: Path,
) -> None:
    async with killed(tmp_path, segment_bytes=2**20) as engine:
        before = engine.log("t", 0)._segments[-1].size
        await store(engine.log("t", 0), b"last")
    (log,) = logs(tmp_path)
    whole = log.read_bytes()
    for shorter in (whole[:before], whole[:before] + bytes(5_000)):
        log.write_bytes(shorter)
        noted = "".join([note.what for note in verify(tmp_path / "data").notes])
        assert "the last batch is missing; if it was acked, it is lost" in noted
    (said,) = notes_of(tmp_path)
    assert said.startswith(f"{log} ends before offset 6, but all before 7 was stored when the broker was killed")
    assert notes_of(tmp_path) == [], "it is reported once"


async def test_two_batches_that_are_cut_off_at_once_after_their_acks_are_damage(tmp_path: Path) -> None:
    async with killed(tmp_path, segment_bytes=2**20) as engine:
        before = engine.log("t", 0)._segments[-1].size
        await store(engine.log("t", 0), b"last")
        await store(engine.log("t", 0), b"but one")
    (log,) = logs(tmp_path)
    log.write_bytes(log.read_bytes()[:before])
    assert "ends before offset 6, but all before 7 was stored" in damage_of(tmp_path)


async def test_notes_of_ends_that_are_damaged_or_missing_are_named_and_take_out_nothing(tmp_path: Path) -> None:
    async with killed(tmp_path):
        pass
    ends = tmp_path / "data" / "log-ends"
    whole = ends.read_bytes()
    for bit in range(8 * 28):
        ends.write_bytes((int.from_bytes(whole) ^ 1 << 8 * len(whole) - 1 - bit).to_bytes(len(whole)))
        (note,) = notes_of(tmp_path)
        assert "1 of 1 notes of where logs end are not what was written: nothing is lost" in note
    ends.unlink()
    assert notes_of(tmp_path) == []


async def test_a_namesake_is_not_measured_by_what_was_noted_at_once_of_the_deleted_topic(tmp_path: Path) -> None:
    async with killed(tmp_path) as engine:
        stale = (tmp_path / "data" / "log-ends").read_bytes()
        await engine.delete_topic("t")
        engine._shared.clock.now += 1  # type: ignore[attr-defined]
        await engine.create_topic(Topic(topic="t"))
    (tmp_path / "data" / "log-ends").write_bytes(stale)  # as a power cut may leave it
    assert notes_of(tmp_path) == []


async def test_a_deleted_log_leaves_its_slot_to_another(tmp_path: Path) -> None:
    async with killed(tmp_path):
        pass
    async with running(open_engine(tmp_path)) as engine:
        await engine.create_topic(Topic(topic="u"))
        await store(engine.log("u", 0), b"one")
        await engine.delete_topic("t")
        await engine.create_topic(Topic(topic="v"))
        await store(engine.log("v", 0), b"one")
    assert (tmp_path / "data" / "log-ends").stat().st_size == 2 * 32


def damage_free(whole: bytes, size: int) -> bool:
    """Does a batch end there?"""
    from qb.storage.log.sealed_batches import BadBatch, walk

    try:
        return bool(list(walk(lambda position, length: whole[position : position + length], 0, size, 0)))
    except BadBatch:
        return False


async def test_a_last_segment_that_was_noted_is_never_taken_for_one_that_was_being_made(tmp_path: Path) -> None:
    async with killed(tmp_path) as engine:
        await note(engine)
    newest = logs(tmp_path)[-1]
    newest.write_bytes(b"\xff" * newest.stat().st_size)
    assert f"{newest} is damaged at byte 0" in damage_of(tmp_path)
    assert newest.exists()


async def test_a_namesake_of_a_deleted_topic_begins_anew(tmp_path: Path) -> None:
    async with killed(tmp_path) as engine:
        await note(engine)
        await engine.delete_topic("t")
        assert not engine.metadata.under(key_of("t"))
        await engine.create_topic(Topic(topic="t"))
        await store(engine.log("t", 0), b"new")
    async with running(open_engine(tmp_path)) as engine:
        assert await everything(engine.log("t", 0)) == [b"new"]


async def test_a_namesake_begins_anew_even_if_the_end_of_the_deleted_log_was_still_to_be_written(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as engine:
        await store(engine.log("t", 0), b"of the first")
        engine._extents.note()
        await engine.delete_topic("t")
        await engine.metadata.flush()
        assert engine.metadata.under(key_of("t")) == {}
        await engine.create_topic(Topic(topic="t", partitions=1))
        engine.log("t", 0).check_writable()


async def test_without_syncs_no_end_is_noted_since_a_power_cut_may_take_it(tmp_path: Path) -> None:
    async with opened(tmp_path, fsync_on_write=False) as engine:
        await store(engine.log("t", 0), b"x")
        await note(engine)
        assert engine._extents.of("t", 0) == LogExtent(0, 0)


@pytest.mark.parametrize("other", ["topics/u/0", "topics/t/1"])
async def test_segments_that_are_swapped_after_a_kill_are_found_in_both_logs(tmp_path: Path, other: str) -> None:
    async with opened(tmp_path) as engine:
        await engine.add_partitions("t", 2)
        await engine.create_topic(Topic(topic="u"))
        for log in (engine.log("t", 0), engine.log("t", 1), engine.log("u", 0)):
            await store(log, b"of %s" % log.topic.encode(), b"%d" % log.partition)
        await note(engine)
    remove_proof(tmp_path / "data")
    pair = [tmp_path / "data" / place / f"{0:020}.log" for place in ("topics/t/0", other)]
    contents = [path.read_bytes() for path in pair]
    for path, content in zip(pair, reversed(contents), strict=True):
        path.write_bytes(content)
    assert {str(path) for path in pair} <= {finding.file for finding in verify(tmp_path / "data").findings}
    engine = open_engine(tmp_path)
    engine.close()
    for path in pair:
        assert [line for line in engine.recovery.notes if f"{path} is damaged" in line]


async def test_a_closed_segment_of_another_log_is_found_at_the_start(tmp_path: Path) -> None:
    async with killed(tmp_path) as engine:
        await engine.create_topic(Topic(topic="u"))
        for body in BODIES:
            await store(engine.log("u", 0), body[:1] * len(body))
    name = f"topics/{{}}/0/{2:020}.log"
    other = (tmp_path / "data" / name.format("u")).read_bytes()
    (tmp_path / "data" / name.format("t")).write_bytes(other)
    assert "it is a segment of another partition" in damage_of(tmp_path)


async def as_by_older_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill t/0 and t/1 with segments of equal offsets that do not say whose they are, and kill the broker."""
    with monkeypatch.context() as patch:
        patch.setattr(segment, "identity_of", lambda _: ProducerRange(1, 0, 0, 0))
        async with killed(tmp_path) as engine:
            await engine.add_partitions("t", 2)
            for number in range(len(BODIES)):
                await store(engine.log("t", 1), b"other %d" % number)


def swapped(tmp_path: Path, number: int) -> None:
    one, two = (sorted(partition(tmp_path, number=each).glob("*.log"))[number] for each in (0, 1))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)


async def test_segments_that_do_not_say_whose_they_are_are_believed_once_and_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await as_by_older_broker(tmp_path, monkeypatch)
    assert verify(tmp_path / "data").findings == []
    for _ in range(2):
        async with opened(tmp_path) as engine:
            assert await everything(engine.log("t", 0)) == BODIES
    assert verify(tmp_path / "data").findings == []


@pytest.mark.parametrize("number", [0, 2, -1])
async def test_a_swap_of_segments_that_do_not_say_whose_they_are_is_found_after_the_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    await as_by_older_broker(tmp_path, monkeypatch)
    async with opened(tmp_path):
        pass
    remove_proof(tmp_path / "data")
    swapped(tmp_path, number)
    assert any("does not begin as when it was marked" in each.what for each in verify(tmp_path / "data").findings)
    assert "does not begin as when it was marked" in damage_of(tmp_path)


async def test_marks_go_with_their_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await as_by_older_broker(tmp_path, monkeypatch)
    async with opened(tmp_path) as engine:
        await engine.metadata.flush()
        assert engine.metadata.get(key_of("t", "0/marks"))
        await engine.delete_topic("t")
        assert engine.metadata.under(key_of("t")) == {}
    async with opened(tmp_path) as engine:
        await store(engine.log("t", 0), b"new")
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"new"]


@pytest.mark.parametrize("number", [0, 5])
async def test_a_log_of_which_nothing_was_noted_is_noted_at_the_next_start(tmp_path: Path, number: int) -> None:
    async with killed(tmp_path) as engine:
        await note(engine)
        await engine.metadata.delete(key_of("t"), key_of("t", 0))  # as after a migration from format 1
    async with running(open_engine(tmp_path)) as engine:
        await engine.metadata.flush()
    remove_proof(tmp_path / "data")
    logs(tmp_path)[number].unlink()
    assert damage_of(tmp_path)
