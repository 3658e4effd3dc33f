"""Every record of the metadata stands twice: one damaged place loses nothing, and is named."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from qb.storage.clean_stop import remove_proof
from qb.storage.files import CannotOpen, OpenFiles
from qb.storage.metadata import metadata_log as metadata_log_module
from qb.storage.metadata.metadata_files import copy_of, read_log, read_newest
from qb.storage.metadata.metadata_recovery import recover_metadata
from qb.storage.verification import verify
from tests.support.stores import flip, metadata_log, open_engine, opened, running

KEYS = {"subscription/s": {"topic": "t"}, "offset/g/t/0": {"offset": 50}, "group": [1, None, "ä"], "last": 1}
Damaging = Callable[[Path], Any]


@pytest.fixture(params=["clean", "killed"])
def data_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    trio.run(fill, tmp_path)
    if request.param == "killed":
        remove_proof(tmp_path / "data")
    return tmp_path / "data"


async def fill(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        for key, value in KEYS.items():
            await engine.metadata.put(key, value)


def state_of(data_dir: Path) -> dict[str, Any]:
    return {key: value.data for key, value in read_newest(data_dir / "metadata").entries.items()}


def recovered(data_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """What a start finds and says. Raises CannotOpen."""
    files = OpenFiles()
    try:
        found = recover_metadata(files, data_dir)
    finally:
        files.close()
    return {key: value.data for key, value in found.entries.items()}, found.notes


def put_back(data_dir: Path, whole: Path) -> None:
    shutil.rmtree(data_dir)
    shutil.copytree(whole, data_dir)


def test_a_flip_anywhere_in_the_log_loses_nothing_and_is_named_with_its_place(data_dir: Path, tmp_path: Path) -> None:
    path, state, whole = metadata_log(data_dir), state_of(data_dir), tmp_path / "whole"
    shutil.copytree(data_dir, whole)
    for at in range(0, path.stat().st_size, 3):
        flip(path, at)
        (finding,) = verify(data_dir).findings
        assert finding.file == str(path)
        assert finding.position <= at
        found, (note,) = recovered(data_dir)
        assert found == state
        assert f"{path} is damaged at byte {finding.position}" in note
        assert "read from the copy" in note
        assert verify(data_dir).findings == [], "a new file was begun"
        assert recovered(data_dir) == (state, [])
        put_back(data_dir, whole)


def test_a_flip_in_the_log_and_another_in_the_copy_lose_nothing_even_in_the_same_record(
    data_dir: Path, tmp_path: Path
) -> None:
    path, state, whole = metadata_log(data_dir), state_of(data_dir), tmp_path / "whole"
    shutil.copytree(data_dir, whole)
    size = read_log(path).size
    for at in range(0, size, 3):
        flip(path, at)
        flip(copy_of(path), at + 1 if at % 2 and at + 1 < size else (at + 61) % size)
        findings = verify(data_dir).findings
        assert findings
        assert all(finding.file == str(path) for finding in findings)
        found, notes = recovered(data_dir)
        assert found == state
        assert len(notes) == len(findings)
        put_back(data_dir, whole)


@pytest.mark.parametrize("length", [2, 40, 400])
def test_two_ranges_overwritten_near_each_other_lose_nothing(data_dir: Path, tmp_path: Path, length: int) -> None:
    path, state, whole = metadata_log(data_dir), state_of(data_dir), tmp_path / "whole"
    shutil.copytree(data_dir, whole)
    size = read_log(path).size
    for at in range(0, size - 2 * length - 20, 11):
        for file, start in ((path, at), (copy_of(path), at + length + 20)):
            data = file.read_bytes()
            file.write_bytes(data[:start] + os.urandom(length) + data[start + length :])
        assert recovered(data_dir)[0] == state
        put_back(data_dir, whole)


def test_the_same_byte_damaged_in_both_refuses_the_start_and_changes_nothing(data_dir: Path, tmp_path: Path) -> None:
    path, whole = metadata_log(data_dir), tmp_path / "whole"
    shutil.copytree(data_dir, whole)
    for at in range(0, read_log(path).snapshot_size, 3):
        flip(path, at)
        flip(copy_of(path), at)
        (finding,) = verify(data_dir).findings
        assert (finding.file, finding.position) == (str(path), 0)
        with pytest.raises(
            CannotOpen, match=f"{path} is damaged at byte 0: .* its copy is missing or damaged there too"
        ):
            recovered(data_dir)
        put_back(data_dir, whole)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove_directory(path: Path) -> None:
    shutil.rmtree(path.parent)


def cut_a_record(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: read_log(path).snapshot_size])


def take_out_some(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:200] + data[231:])


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        remove_directory,
        cut_a_record,
        take_out_some,
        lambda path: path.write_bytes(b""),
        lambda path: path.rename(path.with_name(f"{99:020}.log")),
        lambda path: path.write_bytes(b"rubbish" * 1000),
    ],
)
def test_a_log_that_is_missing_older_or_rubbish_loses_nothing_and_is_named(data_dir: Path, damage: Damaging) -> None:
    path, state = metadata_log(data_dir), state_of(data_dir)
    damage(path)
    assert {Path(finding.file).parent for finding in verify(data_dir).findings} == {path.parent}
    found, notes = recovered(data_dir)
    assert found == state
    assert all(str(path.parent) in note and "read from the copy" in note for note in notes)
    assert recovered(data_dir) == (state, [])


def test_an_older_copy_of_the_log_is_not_believed_after_a_kill(tmp_path: Path) -> None:
    async def change() -> None:
        async with opened(tmp_path) as engine:
            older = metadata_log(tmp_path / "data").read_bytes()
            await engine.metadata.put("offset", 50)
            shutil.copytree(tmp_path / "data", tmp_path / "killed" / "data")
            metadata_log(tmp_path / "killed" / "data").write_bytes(older)

    trio.run(change)
    assert verify(tmp_path / "killed" / "data").findings
    engine = open_engine(tmp_path / "killed")
    engine.close()
    assert engine.metadata.get("offset") == (50, 1)
    assert [note for note in engine.recovery.notes if "is damaged" in note]


def test_an_older_state_of_both_files_is_found_after_a_kill(tmp_path: Path) -> None:
    async def change() -> None:
        async with opened(tmp_path) as engine:
            path = metadata_log(tmp_path / "data")
            older = {each: each.read_bytes() for each in (path, copy_of(path))}
            for number in (1, 2):
                await engine.metadata.put("offset", number)
            shutil.copytree(tmp_path / "data", tmp_path / "killed" / "data")
            for each, data in older.items():
                (tmp_path / "killed" / each.relative_to(tmp_path)).write_bytes(data)

    trio.run(change)
    assert [finding for finding in verify(tmp_path / "killed" / "data").findings if "older state" in finding.what]
    with pytest.raises(CannotOpen, match=r"number \d+ was stored: this is an older state of the metadata"):
        open_engine(tmp_path / "killed")


def test_a_damaged_or_missing_copy_is_written_anew_and_noted(data_dir: Path) -> None:
    path, state = metadata_log(data_dir), state_of(data_dir)
    for damage in (Path.unlink, remove_directory, empty, lambda copy: flip(copy, 50)):
        damage(copy_of(path))
        assert verify(data_dir).findings == []
        assert [note.file for note in verify(data_dir).notes] == [str(copy_of(path))]
        found, (note,) = recovered(data_dir)
        assert found == state
        assert str(copy_of(path)) in note
        size = read_log(path).size
        assert copy_of(path).read_bytes() == path.read_bytes()[:size]


async def test_a_copy_that_lost_its_end_is_noted_after_a_clean_stop(tmp_path: Path) -> None:
    async with opened(tmp_path) as engine:
        for number in range(3):
            await engine.metadata.put("key", number)
    copy = copy_of(metadata_log(tmp_path / "data"))
    os.truncate(copy, copy.stat().st_size - 1)
    (note,) = verify(tmp_path / "data").notes
    assert note.file == str(copy)
    assert str(note).count(str(copy)) == 1
    (said,) = recovered(tmp_path / "data")[1]
    assert str(copy) in said
    assert verify(tmp_path / "data").notes == []


def test_records_that_are_damaged_in_both_files_are_refused_and_left_as_they_are(data_dir: Path) -> None:
    path = metadata_log(data_dir)
    start = read_log(path).snapshot_size + 5
    flip(path, start)
    flip(copy_of(path), start)
    before = path.read_bytes(), copy_of(path).read_bytes()
    (finding,) = (finding for finding in verify(data_dir).findings if "copy" in finding.what)
    assert finding.file == str(path)
    assert finding.what.endswith(f"a start is refused; to see what it costs to go on without: qb repair {data_dir}")
    with pytest.raises(CannotOpen, match="its copy is missing or damaged there too"):
        recovered(data_dir)
    assert (path.read_bytes(), copy_of(path).read_bytes()) == before


def test_damage_at_another_record_in_each_file_loses_nothing(data_dir: Path) -> None:
    path, state = metadata_log(data_dir), state_of(data_dir)
    contents = read_log(path)
    flip(path, contents.snapshot_size + 5)
    flip(copy_of(path), contents.size - 1)
    assert recovered(data_dir)[0] == state


async def test_a_copy_that_cannot_be_written_refuses_no_change_and_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.pwrite

    def write(fd: int, data: bytes, position: int) -> int:
        if "-copy/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, position)

    async with opened(tmp_path) as engine:
        path = metadata_log(tmp_path / "data")
        behind = copy_of(path).read_bytes()
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(os, "pwrite", write)
            for number in range(3):
                await engine.metadata.put("key", number)
        assert [str(copy_of(path)) in record.getMessage() for record in caplog.records] == [True], "once"
        assert copy_of(path).read_bytes() == behind
        await engine.metadata.put("key", 3)
        assert copy_of(path).read_bytes() == path.read_bytes()[: read_log(path).size]


async def test_a_damaged_log_is_served_on_a_full_disk_and_replaced_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        await engine.metadata.put("key", 1)
    path = metadata_log(tmp_path / "data")
    flip(path, 30)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(metadata_log_module, "write_snapshot", full)
        engine = open_engine(tmp_path)
    assert verify(tmp_path / "data").findings, "it is as it was"
    async with running(engine):
        assert engine.metadata.get("key") == (1, 1)
        await engine.metadata.put("key", 2)
    assert verify(tmp_path / "data").findings == []
    async with opened(tmp_path) as engine:
        assert engine.metadata.get("key") == (2, 2)
