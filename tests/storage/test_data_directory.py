"""Who can get into a data directory, what a lock may be, and what happens when the directory goes away."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from qb.core.wire.errors import LogDamaged, LogPoisoned, ShuttingDown
from qb.storage import local_engine
from qb.storage.directory_lock import DirectoryLost
from qb.storage.engine import Topic
from qb.storage.files import CannotOpen
from qb.storage.metadata.metadata_log import MetadataLog
from tests.support.stores import everything, open_engine, opened, running, store


@pytest.fixture
def open_umask() -> Iterator[None]:
    """The system takes nothing away from the modes that the broker asks for."""
    before = os.umask(0)
    yield
    os.umask(before)


async def test_what_the_broker_makes_is_for_its_user_alone(tmp_path: Path, open_umask: None) -> None:
    async with opened(tmp_path, segment_bytes=200) as engine:
        for number in range(5):
            await store(engine.log("t", 0), b"%d" % number)
        await engine.create_topic(Topic(topic="wide", partitions=2))
        await engine.add_partitions("wide", 3)
        await engine.begin_stage("transaction", None)
        found = [tmp_path / "data", *(tmp_path / "data").rglob("*")]
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in found}
    assert len(modes) > 20
    assert {path: mode for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)} == {}


async def test_what_is_missing_above_a_data_directory_is_made_with_the_usual_mode(
    tmp_path: Path, open_umask: None
) -> None:
    open_engine(tmp_path / "above").close()
    assert stat.S_IMODE((tmp_path / "above").stat().st_mode) == 0o777


async def test_a_directory_that_others_can_get_into_is_named_in_one_line_at_every_start(tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    engine.close()
    assert engine.recovery.notes == ()
    (tmp_path / "data").chmod(0o755)
    for _ in range(2):
        engine = open_engine(tmp_path)
        engine.close()
        (note,) = engine.recovery.notes
        assert "open to other users (mode 755)" in note
        assert f"chmod 700 {tmp_path / 'data'}" in note
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o755


@pytest.mark.parametrize("kind", ["symbolic", "dangling", "hard"])
async def test_a_lock_that_leads_elsewhere_is_refused_and_its_target_is_left_alone(tmp_path: Path, kind: str) -> None:
    target, lock = tmp_path / "precious", tmp_path / "data" / "lock"
    open_engine(tmp_path).close()
    lock.unlink()
    if kind == "dangling":
        lock.symlink_to(target)
    else:
        target.write_text("precious")
        lock.symlink_to(target) if kind == "symbolic" else lock.hardlink_to(target)
    with pytest.raises(CannotOpen, match=r"lock is .*: remove it"):
        open_engine(tmp_path)
    assert target.exists() == (kind != "dangling")
    assert kind == "dangling" or target.read_text() == "precious"


async def test_a_removed_lock_file_lets_no_second_broker_in(tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    (tmp_path / "data" / "lock").unlink()
    for _ in range(2):
        with pytest.raises(CannotOpen, match="in use by another process, whose lock file was removed"):
            open_engine(tmp_path)
    engine.close()
    open_engine(tmp_path).close()


def move(data_dir: Path) -> None:
    data_dir.rename(data_dir.with_name("moved"))


def replace(data_dir: Path) -> None:
    move(data_dir)
    open_engine(data_dir.parent).close()


def remove(data_dir: Path) -> None:
    shutil.rmtree(data_dir)


def empty(data_dir: Path) -> None:
    for path in data_dir.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def unlock(data_dir: Path) -> None:
    (data_dir / "lock").unlink()


@pytest.mark.parametrize("lose", [move, replace, remove, empty, unlock])
async def test_a_directory_that_goes_away_is_noticed_and_nothing_is_acked_afterwards(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    data_dir = tmp_path / "data"
    refused: list[object] = []
    with trio.fail_after(30), pytest.RaisesGroup(pytest.RaisesExc(DirectoryLost), flatten_subgroups=True):
        async with opened(tmp_path) as engine:
            log = engine.log("t", 0)
            await store(log, b"kept")
            lose(data_dir)
            began = time.monotonic()
            while not refused:
                await trio.lowlevel.checkpoint()
                with trio.CancelScope(shield=True):
                    try:
                        await store(log, b"more")
                    except LogPoisoned as error:
                        refused.append(error)
            assert time.monotonic() - began < 5, "one second, on a machine that has time"
            with trio.CancelScope(shield=True), pytest.raises(ShuttingDown):
                await engine.metadata.put("key", 1)
            await trio.sleep_forever()
    assert "was moved or removed while the broker ran" in str(refused[0])
    if lose is replace:
        assert not (data_dir / "clean-stop").exists(), "another directory's stop"


def cover(data_dir: Path) -> None:
    """Move what is above the directory, and put a file in its place."""
    above = data_dir.parent
    above.rename(above.with_name("moved"))
    above.touch()


async def test_a_file_in_place_of_what_was_above_the_directory_is_noticed(tmp_path: Path) -> None:
    (above := tmp_path / "above").mkdir()
    with trio.fail_after(30), pytest.RaisesGroup(pytest.RaisesExc(DirectoryLost), flatten_subgroups=True):
        async with opened(above):
            cover(above / "data")
            await trio.sleep_forever()


def move_topics(data_dir: Path) -> None:
    (data_dir / "topics").rename(data_dir / "moved")


def remove_topic(data_dir: Path) -> None:
    shutil.rmtree(data_dir / "topics" / "t")


def move_partition(data_dir: Path) -> None:
    (data_dir / "topics" / "t" / "0").rename(data_dir / "moved")


def copy_segment(data_dir: Path) -> None:
    """Put a copy of the newest segment in its place: what is written to the other one is not found by a start."""
    path = max((data_dir / "topics" / "t" / "0").glob("*.log"))
    shutil.copy(path, data_dir / "copy")
    (data_dir / "copy").rename(path)


@pytest.mark.parametrize("lose", [move_topics, remove_topic, move_partition, copy_segment])
async def test_files_of_a_topic_that_go_away_are_noticed_and_nothing_is_acked_afterwards(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    with trio.fail_after(30):
        async with opened(tmp_path) as engine:
            await engine.create_topic(Topic(topic="other", partitions=1))
            log, other = engine.log("t", 0), engine.log("other", 0)
            await store(other, b"kept")
            await store(log, b"kept")
            lose(tmp_path / "data")
            with pytest.raises(LogDamaged, match=r"0\.log.* was moved or removed while the broker ran") as refused:
                while True:
                    await store(log, b"more")
            for _ in range(2):
                with pytest.raises(LogDamaged):
                    await store(log, b"more")
            with pytest.raises(LogDamaged):
                await log.read(0, 1000)
            assert refused.value.file.startswith(str(tmp_path / "data" / "topics" / "t" / "0"))
            if lose is not move_topics:
                await store(other, b"kept too")
    if lose is not move_topics:
        async with running(open_engine(tmp_path)) as engine:
            assert await everything(engine.log("other", 0)) == [b"kept", b"kept too"]


async def test_a_topic_goes_on_after_its_segments_are_rolled_and_dropped_and_other_topics_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the broker itself moves and removes is no loss, whenever it looks."""
    monkeypatch.setattr(local_engine, "INTERVAL", 0)
    async with opened(tmp_path, segment_bytes=200, retention_bytes=400, retention_interval=0.01) as engine:
        for _ in range(50):
            await engine.create_topic(Topic(topic="short", partitions=2))
            await store(engine.log("short", 1), b"gone")
            for number in range(10):
                await store(engine.log("t", 0), b"%d" % number * 50)
            stage = await engine.begin_stage("transaction", None)
            await engine.delete_stages([stage.stage_id])
            await engine.delete_topic("short")
        assert engine.log("t", 0).damage is None


async def test_a_stage_whose_file_goes_away_takes_no_more(tmp_path: Path) -> None:
    with trio.fail_after(30):
        async with opened(tmp_path) as engine:
            stage = await engine.begin_stage("transaction", None)
            (tmp_path / "data" / "staged" / f"{stage.stage_id}.log").unlink()
            while stage.failure is None:
                await trio.lowlevel.checkpoint()
            assert isinstance(stage.failure, LogDamaged)
            assert "was moved or removed while the broker ran" in str(stage.failure)


async def test_metadata_that_goes_away_ends_the_broker(tmp_path: Path) -> None:
    with (
        trio.fail_after(30),
        pytest.RaisesGroup(
            pytest.RaisesExc(DirectoryLost, match=r"metadata/0+\.log was moved"), flatten_subgroups=True
        ),
    ):
        async with opened(tmp_path) as engine:
            await engine.metadata.put("key", 1)
            shutil.rmtree(tmp_path / "data" / "metadata")
            shutil.rmtree(tmp_path / "data" / "metadata-copy")
            await trio.sleep_forever()


async def test_metadata_that_is_being_written_when_the_directory_goes_away_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go, real = threading.Event(), threading.Event(), MetadataLog.commit

    def commit(*arguments: Any) -> float:
        reached.set()
        assert go.wait(20)
        return real(*arguments)

    async def put() -> None:
        with trio.CancelScope(shield=True), pytest.raises(LogPoisoned):
            await engine.metadata.put("key", 1)
        go.set()

    with trio.fail_after(30), pytest.RaisesGroup(pytest.RaisesExc(DirectoryLost), flatten_subgroups=True):
        async with opened(tmp_path) as engine, trio.open_nursery() as nursery:
            monkeypatch.setattr(MetadataLog, "commit", commit)
            nursery.start_soon(put)
            await trio.to_thread.run_sync(reached.wait, 10)
            move(tmp_path / "data")
            await trio.sleep_forever()
    assert go.is_set()
