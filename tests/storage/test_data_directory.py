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

from qb.core.wire.errors import LogPoisoned, ShuttingDown
from qb.storage.directory_lock import DirectoryLost
from qb.storage.engine import Topic
from qb.storage.files import CannotOpen
from qb.storage.metadata.metadata_log import MetadataLog
from tests.support.stores import open_engine, opened, store


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
