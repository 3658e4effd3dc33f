"""Stages on disk: durable before they are answered, whole or not at all after a crash, never half read."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from qb.core.wire.errors import BrokerError, DiskFull, LogDamaged, LogPoisoned, OutOfSequence, ShuttingDown
from qb.core.wire.frames import MessageType, decode_frame, encode_frame, frame_length
from qb.storage.clean_stop import remove_proof
from qb.storage.engine import StageLog, Where
from qb.storage.local_engine import LocalEngine
from qb.storage.stages.stage_store import NOTED
from qb.storage.stages.transaction_records import check_stage
from qb.storage.verification import verify
from tests.support.disk import patch_sync, patch_write
from tests.support.stores import Receipt, open_engine, opened, running

T0, T1, U0 = ("t", 0), ("t", 1), ("u", 0)


def stage_frame(stage: StageLog, where: Where, bodies: Sequence[bytes], first: int) -> bytes:
    topic, partition = where
    properties = {"stage": stage.stage_id, "topic": topic, "partition": str(partition), "first": str(first)}
    data = b"".join(encode_frame(MessageType.DATA, 99, 5, {"topic": topic}, body) for body in bodies)
    return encode_frame(MessageType.STAGE, 1, 2, properties, data)


def give(stage: StageLog, where: Where, *bodies: bytes) -> Receipt:
    """Append a frame without waiting."""
    receipt = Receipt()
    stage.append(stage_frame(stage, where, bodies, stage.taken), where, len(bodies), receipt)
    return receipt


def give_again(stage: StageLog, where: Where, first: int, *bodies: bytes) -> Receipt:
    """Append a frame again whose numbers were used before, without waiting."""
    receipt = Receipt()
    stage.repeat(stage_frame(stage, where, bodies, first), where, first, len(bodies), receipt)
    return receipt


async def put(stage: StageLog, where: Where, *bodies: bytes) -> None:
    """Append a frame and wait until it is durable."""
    await give(stage, where, *bodies).wait()


async def staged(stage: StageLog, max_bytes: int = 1 << 20) -> dict[Where, list[bytes]]:
    """Return the bodies that a stage holds for each partition, read in portions."""
    found: dict[Where, list[bytes]] = {}
    place = 0
    while True:
        portions, following = await stage.read(place, max_bytes)
        if not portions:
            return found
        assert following > place
        place = following
        for portion in portions:
            bodies, at = [], 0
            while at < len(portion.frames):
                bodies.append(decode_frame(portion.frames, at).body)
                at += frame_length(portion.frames, at)
            assert len(bodies) == portion.count
            found.setdefault((portion.topic, portion.partition), []).extend(bodies)


def file_of(directory: Path, stage: StageLog) -> Path:
    return directory / "data" / "staged" / f"{stage.stage_id}.log"


def only(engine: LocalEngine) -> StageLog:
    (stage,) = engine.stages().values()
    return stage


async def test_a_stage_is_what_it_was_before_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        numbered = await engine.begin_stage("query:1", 7)
        plain = await engine.begin_stage("once", None)
        await put(numbered, T0, b"a", b"b")
        await put(numbered, U0, b"c")
        await put(numbered, T0, b"d")
        before = file_of(tmp_path, numbered).read_bytes()
    async with opened(tmp_path) as engine:
        assert engine.stages().keys() == {numbered.stage_id, plain.stage_id}
        again = engine.stages()[numbered.stage_id]
        assert (again.transaction, again.number, again.failure) == ("query:1", 7, None)
        assert (again.messages, again.taken, again.counts) == (4, 4, {T0: 3, U0: 1})
        assert await staged(again) == {T0: [b"a", b"b", b"d"], U0: [b"c"]}
        other = engine.stages()[plain.stage_id]
        assert (other.transaction, other.number, other.messages) == ("once", None, 0)
        assert await staged(other) == {}
        assert file_of(tmp_path, again).read_bytes() == before
        await put(again, T1, b"e")
        assert await staged(again) == {T0: [b"a", b"b", b"d"], T1: [b"e"], U0: [b"c"]}
        assert engine.recovery.notes == ()


@pytest.mark.parametrize("max_bytes", [1, 200, 1 << 20])
async def test_portions_of_any_size_give_the_same_messages_in_order(tmp_path: Path, max_bytes: int) -> None:
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", None)
        for number in range(20):
            await put(stage, ("t", number % 3), b"%d" % number, b"x" * 10 * number)
        found = await staged(stage, max_bytes)
    for partition, bodies in found.items():
        assert bodies[::2] == [b"%d" % number for number in range(20) if number % 3 == partition[1]]


async def test_a_tail_torn_at_any_byte_leaves_exactly_what_was_answered_before_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", 3)
        sizes, path = [stage.size], file_of(tmp_path, stage)
        for number in range(3):
            await put(stage, T0, b"%d" % number, b"+")
            sizes.append(stage.size)
    whole = path.read_bytes()
    assert len(whole) == sizes[-1]
    for cut in range(sizes[0], len(whole)):
        path.write_bytes(whole[:cut])
        remove_proof(tmp_path / "data")  # as after a kill
        kept = max(index for index, size in enumerate(sizes) if size <= cut)
        async with running(open_engine(tmp_path)) as engine:
            found = only(engine)
            assert (found.messages, found.size) == (2 * kept, sizes[kept])
            await put(found, T1, b"after")
            assert path.stat().st_size == found.size  # nothing of the torn one is left behind it
            expected = [body for number in range(kept) for body in (b"%d" % number, b"+")]
            assert await staged(found) == ({T0: expected} if expected else {}) | {T1: [b"after"]}


async def test_a_flipped_byte_anywhere_is_never_read_as_a_message(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", None)
        path = file_of(tmp_path, stage)
        await put(stage, T0, b"first")
        size = stage.size
        await put(stage, T0, b"second")
        whole = path.read_bytes()
        for at in range(len(whole)):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << at % 8
            path.write_bytes(flipped)
            with pytest.raises(LogDamaged, match=str(path)):
                await staged(stage)
        path.unlink()
        engine._files.forget(str(path))
        with pytest.raises(LogDamaged, match="missing"):
            await staged(stage)
    flipped = bytearray(whole)
    flipped[size - 50] ^= 1
    path.write_bytes(flipped)
    async with running(open_engine(tmp_path)) as engine:
        assert only(engine).messages == 0  # a commit of two messages will be refused
        assert path.read_bytes() == flipped
        (note,) = engine.recovery.notes
        assert str(path) in note
    assert [finding.file for finding in verify(tmp_path / "data").findings] == [str(path)]


async def test_a_stage_whose_beginning_was_torn_was_never_answered_and_goes(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", None)
        path, whole = file_of(tmp_path, stage), file_of(tmp_path, stage).read_bytes()
        await engine.delete_stages([stage.stage_id])  # so that no beginning is noted
    for cut in (0, 1, 40, len(whole) - 1):
        path.write_bytes(whole[:cut])
        async with running(open_engine(tmp_path)) as engine:
            assert engine.stages() == {}
            assert not path.exists()
            assert engine.recovery.notes == (f"dropped stage {stage.stage_id}: its beginning was never finished",)


async def test_a_begun_stage_whose_file_is_missing_or_has_no_head_is_named_and_refused_after_a_kill(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", 3)
        await put(stage, T0, b"a")
    path = file_of(tmp_path, stage)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[40] ^= 1
    for content in (None, b"", whole[:40], damaged):
        path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
        remove_proof(tmp_path / "data")
        assert {finding.file for finding in verify(tmp_path / "data").findings} == {str(path)}
        async with running(open_engine(tmp_path)) as engine:
            lost = only(engine)
            assert (lost.transaction, lost.number, lost.messages) == ("x", 3, 0)
            with pytest.raises(LogDamaged, match=path.name):
                check_stage(lost, "x", 3, 1)
            with pytest.raises(LogDamaged):
                give(lost, T0, b"b")
            (note,) = engine.recovery.notes
            assert str(path) in note
            assert "cannot be committed" in note
        assert (path.read_bytes() if path.exists() else None) == content


@pytest.mark.parametrize("transaction", ["x", "y"])
async def test_the_file_of_another_stage_is_found_after_a_kill_and_cannot_be_committed(
    tmp_path: Path, transaction: str
) -> None:
    async with opened(tmp_path) as engine:
        stage, other = await engine.begin_stage("x", None), await engine.begin_stage(transaction, None)
        await put(stage, T0, b"a")
        await put(other, T0, b"b")
    remove_proof(tmp_path / "data")
    path = file_of(tmp_path, stage)
    path.write_bytes(file_of(tmp_path, other).read_bytes())
    assert [finding.file for finding in verify(tmp_path / "data").findings] == [str(path)]
    async with running(open_engine(tmp_path)) as engine:
        assert engine.stages()[stage.stage_id].transaction == "x"
        assert isinstance(engine.stages()[stage.stage_id].failure, LogDamaged)
        assert engine.stages()[other.stage_id].failure is None
        assert any("under a wrong name" in note for note in engine.recovery.notes)


async def test_an_ended_stage_is_not_missed(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", None)
        await engine.delete_stages([stage.stage_id])
        assert not file_of(tmp_path, stage).exists()
        killed = tmp_path / "killed"
        shutil.copytree(tmp_path / "data", killed / "data")
    assert verify(killed / "data").findings == []
    async with running(open_engine(killed)) as engine:
        assert engine.stages() == {}
        assert engine.recovery.notes == ()


async def test_a_stage_of_a_broker_that_noted_none_is_noted_at_the_next_start(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", None)
        await engine.metadata.delete(NOTED + stage.stage_id)
    async with opened(tmp_path) as engine:
        assert only(engine).failure is None
    remove_proof(tmp_path / "data")
    file_of(tmp_path, stage).unlink()
    async with opened(tmp_path) as engine:
        assert isinstance(only(engine).failure, LogDamaged)


async def test_a_stage_that_cannot_be_read_does_not_keep_the_engine_from_starting(tmp_path: Path) -> None:
    open_engine(tmp_path).close()
    unreadable = tmp_path / "data" / "staged" / "bad.log"
    unreadable.mkdir()
    async with opened(tmp_path) as engine:
        assert engine.stages() == {}
        (note,) = engine.recovery.notes
        assert note.startswith("stage bad is left alone")
    assert unreadable.exists()


async def test_a_stage_is_synced_even_where_publishes_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path, fsync_on_write=False) as engine:
        stage = await engine.begin_stage("x", None)
        synced, real = [], os.fdatasync

        def sync(fd: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{fd}"))
            real(fd)

        patch_sync(monkeypatch, sync)
        await put(stage, T0, b"a")
        assert synced == [str(file_of(tmp_path, stage))]


async def test_what_arrives_while_a_frame_is_synced_is_written_and_answered_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", None)
        reached, go, calls = threading.Event(), threading.Event(), []
        real = os.fdatasync

        def sync(fd: int) -> None:
            calls.append(fd)
            reached.set()
            assert go.wait(30)
            real(fd)

        patch_sync(monkeypatch, sync)
        first = give(stage, T0, b"first")
        await trio.to_thread.run_sync(reached.wait, 10)
        others = [give(stage, T0, b"%d" % number) for number in range(10)]
        repeated = give_again(stage, T0, 0, b"first")
        assert (stage.messages, stage.taken) == (0, 11)
        assert not any(receipt.calls for receipt in (first, *others, repeated))
        go.set()
        for receipt in (first, *others, repeated):
            await receipt.wait()
        assert len(calls) == 2
        assert (stage.messages, stage.taken) == (11, 11)
        assert await staged(stage) == {T0: [b"first", *[b"%d" % number for number in range(10)]]}


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_repeat_is_accepted_only_if_the_same_messages_are_stored(tmp_path: Path, restarted: bool) -> None:
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", None)
        for number in range(0, 200, 2):  # more frames than the stage knows the beginnings of
            await put(stage, T0, b"%d" % number, b"%d" % (number + 1))
        await put(stage, T1, b"other partition")
        if not restarted:
            await check_repeats(stage)
    if restarted:
        async with opened(tmp_path) as engine:
            (stage,) = engine.stages().values()
            await check_repeats(stage)


async def check_repeats(stage: StageLog) -> None:
    same = [(0, b"0", b"1"), (198, b"198", b"199"), (1, b"1"), (101, b"101", b"102", b"103"), (3, b"3", b"4")]
    for first, *bodies in same:
        await give_again(stage, T0, first, *bodies).wait()
    await give_again(stage, T1, 200, b"other partition").wait()
    other = [(0, b"0", b"2"), (0, b"0", b"11"), (198, b"198", b"19"), (198, b""), (199, b"199", b"other partition")]
    for first, *bodies in other:
        with pytest.raises(OutOfSequence, match="holds other messages"):
            await give_again(stage, T0, first, *bodies).wait()
    with pytest.raises(OutOfSequence):
        await give_again(stage, T1, 0, b"0", b"1").wait()


async def test_a_stage_without_room_says_so_until_its_frames_are_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, max_pending_bytes=1000) as engine:
        stage = await engine.begin_stage("x", None)
        go, real = threading.Event(), os.fdatasync

        def sync(fd: int) -> None:
            assert go.wait(30)
            real(fd)

        patch_sync(monkeypatch, sync)
        give(stage, T0, b"x" * 2000)
        assert stage.has_room  # it is being written, not waiting
        last = give(stage, T0, b"x" * 1000)
        assert not stage.has_room
        go.set()
        await stage.wait_for_room()
        await last.wait()
        assert stage.has_room


async def refused(receipt: Receipt, kind: type[BrokerError], text: str | None = None) -> None:
    with pytest.raises(kind, match=text):
        await receipt.wait()


async def test_a_full_disk_takes_back_what_was_not_durable_and_the_stage_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", None)
        await put(stage, T0, b"kept")
        size, real = stage.size, os.pwrite

        def full(fd: int, data: bytes, position: int) -> int:
            if position > size:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd, bytes(data)[:10], position)

        with monkeypatch.context() as patch:
            patch_write(patch, full)
            for receipt in (give(stage, T0, b"lost"), give(stage, T1, b"lost too")):
                await refused(receipt, DiskFull, f"{file_of(tmp_path, stage)} could not store")
        assert (stage.messages, stage.taken, stage.failure) == (1, 1, None)
        assert file_of(tmp_path, stage).stat().st_size == size
        await put(stage, T1, b"later")
        assert await staged(stage) == {T0: [b"kept"], T1: [b"later"]}
    assert verify(tmp_path / "data").findings == []


async def test_a_failed_sync_ends_the_stage_and_is_never_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", None)
        await put(stage, T0, b"kept")
        calls = []

        def failing(fd: int) -> None:
            calls.append(fd)
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch_sync(patch, failing)
            for receipt in (give(stage, T0, b"a"), give(stage, T0, b"b")):
                await refused(receipt, LogPoisoned, f"{file_of(tmp_path, stage)} could not be made durable")
        assert len(calls) == 1
        assert stage.messages == stage.taken == 1
        with pytest.raises(LogPoisoned, match="Input/output error"):
            give(stage, T0, b"c")
    async with running(open_engine(tmp_path)) as engine:
        assert only(engine).messages in (1, 2)  # what was answered is there; what was not, whole or not at all


async def test_a_stage_that_cannot_be_made_durable_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:

        def full(fd: int, data: bytes, position: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch_write(patch, full)
            with pytest.raises(DiskFull):
                await engine.begin_stage("x", None)
        assert engine.stages() == {}
        assert list((tmp_path / "data" / "staged").iterdir()) == []


async def test_a_deleted_stage_is_gone_from_the_disk_and_refuses_what_was_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        stage, other = await engine.begin_stage("x", None), await engine.begin_stage("x", None)
        reached, go, real = threading.Event(), threading.Event(), os.fdatasync

        def sync(fd: int) -> None:
            reached.set()
            assert go.wait(30)
            real(fd)

        with monkeypatch.context() as patch:
            patch_sync(patch, sync)
            writing = give(stage, T0, b"being written")
            await trio.to_thread.run_sync(reached.wait, 10)
            waiting = give(stage, T0, b"waiting")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.delete_stages, [stage.stage_id, "unknown"])
                await waiting.came.wait()
                assert file_of(tmp_path, stage).exists()
                go.set()
        assert writing.calls[0][0] is None
        assert isinstance(waiting.calls[0][0], BrokerError)
        assert not file_of(tmp_path, stage).exists()
        assert engine.stages().keys() == {other.stage_id}
        with pytest.raises(BrokerError, match="ended"):
            give(stage, T0, b"too late")


async def test_every_frame_is_answered_even_if_the_disk_never_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real = threading.Event(), os.fdatasync
    monkeypatch.setattr("qb.storage.local_engine.FINISH_WITHIN", 0.05)
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", None)

        def sync(fd: int) -> None:
            assert go.wait(30)
            real(fd)

        patch_sync(monkeypatch, sync)
        receipts = [give(stage, T0, b"a"), give(stage, T0, b"b")]
    for receipt in receipts:
        await refused(receipt, ShuttingDown)
    go.set()


async def test_verify_proves_stages_and_calls_a_torn_tail_a_note(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        stage = await engine.begin_stage("x", None)
        await put(stage, T0, b"a")
        size = stage.size
        await put(stage, T0, b"b")
    report = verify(tmp_path / "data")
    assert (report.findings, report.notes, report.stages) == ([], [], 1)
    path = file_of(tmp_path, stage)
    path.write_bytes(path.read_bytes()[:-1])
    assert [finding.file for finding in verify(tmp_path / "data").findings] == [str(path)]
    remove_proof(tmp_path / "data")  # as after a kill
    report = verify(tmp_path / "data")
    assert report.findings == []
    assert [(note.file, note.position) for note in report.notes] == [(str(path), size)]


async def test_after_a_clean_stop_a_stage_that_ends_elsewhere_is_refused_and_a_missing_one_is_named(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as engine:
        stage, other = await engine.begin_stage("x", None), await engine.begin_stage("y", None)
        await put(stage, T0, b"a")
        size = stage.size
        await put(stage, T0, b"b")
    path, missing = file_of(tmp_path, stage), file_of(tmp_path, other)
    path.write_bytes(path.read_bytes()[:size])
    missing.unlink()
    assert [finding.file for finding in verify(tmp_path / "data").findings] == [str(path), str(missing)]
    async with running(open_engine(tmp_path)) as engine:
        assert all(isinstance(stage.failure, LogDamaged) for stage in engine.stages().values())
        for file in (path, missing):
            assert [note for note in engine.recovery.notes if str(file) in note and "cannot be committed" in note]
