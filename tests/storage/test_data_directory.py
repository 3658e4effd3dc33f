"""Who can get into a data directory, and what a lock may be."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from qb.storage.engine import Topic
from qb.storage.files import CannotOpen
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
