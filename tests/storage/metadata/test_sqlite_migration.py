"""A data directory of format 1, whose metadata lies in SQLite, becomes one of format 2."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from qb.storage import data_directory
from qb.storage.data_directory import check_format, prepare
from qb.storage.files import CannotOpen
from qb.storage.metadata.sqlite_migration import DATABASE, read_copy
from qb.storage.verification import verify
from tests.support.disk import Crash, crash_at, recorded
from tests.support.stores import everything, metadata_log, open_engine, opened, running, store

MORE = {
    "subscription/s": ({"topic": "t", "floor": 12, "name": "ä"}, 7),
    "offset/g/t/0": ({"offset": 50, "updated_ms": 1}, 3),
    "producers/key": ("0123", 1),
}
Facts = dict[str, tuple[Any, int]]


def facts_of(engine: Any) -> Facts:
    return {key: (entry.value, entry.version) for key, entry in engine.metadata.under("").items()}


async def _make(directory: Path) -> Facts:
    async with opened(directory) as engine:
        await store(engine.log("t", 0), b"kept")
        return {**facts_of(engine), **MORE}


@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, Facts]:
    """A directory as a broker of format 1 left it, and its metadata."""
    facts = trio.run(_make, tmp_path / "old")
    data_dir = tmp_path / "old" / "data"
    shutil.rmtree(data_dir / "metadata")
    (data_dir / "clean-stop").unlink()
    (data_dir / "metadata-end").unlink()
    (data_dir / "format").write_text("qb-storage 1\n")
    fill(data_dir / DATABASE, facts).close()
    assert list(data_dir.glob(f"{DATABASE}*")) == [data_dir / DATABASE]
    return data_dir, facts


def fill(path: Path, facts: Facts) -> sqlite3.Connection:
    """Write a database as format 1 had it; open, it keeps its newest rows in a log of its own."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE IF NOT EXISTS entries(key TEXT PRIMARY KEY, value TEXT, version INTEGER)")
    for key, (value, version) in facts.items():
        row = (key, msgspec.json.encode(value).decode(), version)
        database.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", row)
    return database


def start(data_dir: Path) -> tuple[Facts, list[str]]:
    engine = open_engine(data_dir.parent)
    engine.close()
    assert engine.log("t", 0).end_offset == 1
    return facts_of(engine), list(engine.recovery.notes)


def migrated(data_dir: Path, facts: Facts) -> None:
    assert start(data_dir) == (facts, [])
    assert (data_dir / "format").read_text() == "qb-storage 2\n"
    assert [path.name for path in data_dir.glob("*.sqlite3*")] == ["metadata.sqlite3.migrated"]
    assert verify(data_dir).findings == verify(data_dir).notes == []


def test_all_of_it_is_there_with_its_versions_and_the_database_is_set_aside(old: tuple[Path, Facts]) -> None:
    data_dir, facts = old
    database = (data_dir / DATABASE).read_bytes()
    assert [note.what for note in verify(data_dir).notes] == [
        "the metadata is of format 1 and has no checksums; the next start migrates it"
    ]
    migrated(data_dir, facts)
    assert (data_dir / "metadata.sqlite3.migrated").read_bytes() == database
    (data_dir / "metadata.sqlite3.migrated").unlink()
    assert start(data_dir) == (facts, [])


async def test_a_migrated_directory_is_written_and_read_on(old: tuple[Path, Facts]) -> None:
    data_dir, facts = old
    async with running(open_engine(data_dir.parent)) as engine:
        assert await engine.metadata.put("subscription/s", 13) == 8
        await store(engine.log("t", 0), b"more")
    async with running(open_engine(data_dir.parent)) as engine:
        assert facts_of(engine) == {**facts, "subscription/s": (13, 8)}
        assert await everything(engine.log("t", 0)) == [b"kept", b"more"]


def test_what_a_killed_broker_left_in_the_databases_own_log_is_migrated(old: tuple[Path, Facts]) -> None:
    data_dir, facts = old
    killed = data_dir.parent.parent / "killed" / "data"
    newest = {"subscription/s": ({"floor": 99}, 8)}
    database = fill(data_dir / DATABASE, newest)
    shutil.copytree(data_dir, killed)
    database.close()
    assert (killed / f"{DATABASE}-wal").stat().st_size > 0
    assert verify(killed).findings == []
    migrated(killed, {**facts, **newest})


def test_a_migration_interrupted_at_any_step_is_begun_anew_or_finished(old: tuple[Path, Facts], tmp_path: Path) -> None:
    whole, facts = old
    step, finished, formats = 0, False, []
    while not finished:
        step += 1
        data_dir = tmp_path / str(step) / "data"
        shutil.copytree(whole, data_dir)
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, step)
            try:
                prepare(data_dir)
                finished = True
            except Crash:
                pass
        formats.append((data_dir / "format").read_text())
        if formats[-1] == "qb-storage 1\n":
            stored = read_copy(data_dir / DATABASE)
            assert stored is not None, "an older broker goes on with its database"
            assert {key: (msgspec.json.decode(each.data), each.version) for key, each in stored.items()} == facts
        assert verify(data_dir).findings == []
        migrated(data_dir, facts)
    assert step > 12
    assert formats == sorted(formats)
    assert len(set(formats)) == 2


def test_the_format_is_raised_only_when_the_log_is_durable_and_the_database_goes_last(old: tuple[Path, Facts]) -> None:
    data_dir, _ = old
    with recorded() as calls:
        prepare(data_dir)
    first = "0" * 20
    assert calls == [
        "fsync data",  # the directory of the metadata has its name
        f"fdatasync {first}.new",
        f"replace {first}.new {first}.log",
        "fsync metadata",
        f"fdatasync {first}.log",
        "fsync metadata-copy",
        "fdatasync format.new",
        "replace format.new format",
        "fsync data",
        f"rename {DATABASE} {DATABASE}.migrated",
        "fsync data",
    ]


def test_a_migration_killed_at_any_byte_of_what_it_writes_is_begun_anew(old: tuple[Path, Facts]) -> None:
    data_dir, facts = old
    whole = {path: path.read_bytes() for path in (data_dir / "format", data_dir / DATABASE)}
    prepare(data_dir)
    log = metadata_log(data_dir)
    written = log.read_bytes()
    for size in range(0, len(written), 7):
        for left in (log, log.with_suffix(".new"), data_dir / "format.new"):
            shutil.rmtree(data_dir / "metadata")
            (data_dir / "metadata.sqlite3.migrated").unlink()
            for path, data in whole.items():
                path.write_bytes(data)
            log.parent.mkdir(0o700)
            left.write_bytes(written[:size])
            prepare(data_dir)
            assert log.read_bytes() == written
            assert os.listdir(log.parent) == [log.name]
    migrated(data_dir, facts)


@pytest.mark.parametrize("damage", ["rubbish", "cut", "no json", "missing", "empty"])
def test_a_database_that_cannot_be_read_is_refused_and_left_alone(old: tuple[Path, Facts], damage: str) -> None:
    data_dir, facts = old
    path = data_dir / DATABASE
    whole = path.read_bytes()
    if damage == "no json":
        database = sqlite3.connect(path)
        with database:
            database.execute("UPDATE entries SET value = '{' WHERE key = 'topic/t'")
        database.close()
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"rubbish": b"rubbish" * 1000, "cut": whole[:5000]}.get(damage, b""))
    for _ in range(2):
        with pytest.raises(CannotOpen, match=rf"{DATABASE} .*restore it from a backup"):
            open_engine(data_dir.parent)
        assert verify(data_dir).findings
        assert (data_dir / "format").read_text() == "qb-storage 1\n"
        assert not (data_dir / "metadata").exists()
    path.unlink(missing_ok=True)
    for side in data_dir.glob(f"{DATABASE}-*"):
        side.unlink()
    path.write_bytes(whole)
    migrated(data_dir, facts)


@pytest.mark.parametrize("left", ["nothing", "an empty file", "no table"])
def test_a_broker_killed_at_its_very_first_start_has_nothing_to_migrate(tmp_path: Path, left: str) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir(0o700)
    (data_dir / "format").write_text("qb-storage 1\n")
    if left == "no table":
        database = sqlite3.connect(data_dir / DATABASE)
        database.execute("PRAGMA journal_mode=WAL")
        database.close()
    elif left == "an empty file":
        (data_dir / DATABASE).touch()
    engine = open_engine(tmp_path)
    engine.close()
    assert facts_of(engine) == {}
    assert (data_dir / "format").read_text() == "qb-storage 2\n"


def test_a_broker_of_format_1_refuses_a_migrated_directory(
    old: tuple[Path, Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir, _ = old
    prepare(data_dir)
    monkeypatch.setattr(data_directory, "VERSION", 1)
    with pytest.raises(CannotOpen, match="version 2; this broker reads up to 1: use a newer one"):
        check_format(data_dir / "format")


def test_a_new_directory_interrupted_at_any_step_is_begun_anew(tmp_path: Path) -> None:
    step, finished = 0, False
    while not finished:
        step += 1
        (tmp_path / str(step)).mkdir(0o700)
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, step)
            try:
                prepare(tmp_path / str(step))
                finished = True
            except Crash:
                pass
        prepare(tmp_path / str(step))
        assert verify(tmp_path / str(step)).findings == []
    assert step > 8
