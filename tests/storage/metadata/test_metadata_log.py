"""The file of the metadata log: snapshots, disks that fail, and kills in the middle."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qb.storage.files import OpenFiles, SyncFailed
from qb.storage.metadata import metadata_log as module
from qb.storage.metadata.metadata_files import log_paths, read_log
from qb.storage.metadata.metadata_log import MetadataLog, create_log
from qb.storage.metadata.metadata_records import (
    Entries,
    RecordKind,
    StoredValue,
    apply_changes,
    decode_record,
    encode_changes,
    length_of,
)
from tests.support.disk import Crash, crash_at, patch_sync, patch_write, recorded


class Facts:
    """A log and the state that it should have."""

    def __init__(self, directory: Path) -> None:
        self._files = OpenFiles()
        contents = read_log(log_paths(directory)[-1])
        self.entries: Entries = contents.entries
        self.log = MetadataLog(self._files, contents)
        self.directory = directory

    def put(self, key: str, text: str) -> None:
        known = self.entries.get(key)
        value = StoredValue(f'"{text}"'.encode(), known.version + 1 if known else 1)
        self.log.commit(encode_changes([(key, value)]), self.entries)
        apply_changes(self.entries, {key: value})

    def close(self) -> None:
        self._files.close()

    def again(self) -> Facts:
        """What the next start finds."""
        self.close()
        return Facts(self.directory)


@pytest.fixture
def facts(tmp_path: Path) -> Iterator[Facts]:
    create_log(tmp_path, {})
    made = Facts(tmp_path)
    yield made
    made.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots come after few changes."""
    monkeypatch.setattr(module, "SNAPSHOT_FROM", 300)


@contextmanager
def failing(directory: Path, name: str, error: OSError, when: Callable[[str], bool]) -> Iterator[None]:
    """Let one call of os fail on descriptors of files that `when` names."""
    real = getattr(os, name)

    def call(fd: int, *arguments: object) -> object:
        if when(os.readlink(f"/proc/self/fd/{fd}")):
            raise error
        return real(fd, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        yield


def test_a_long_log_becomes_a_snapshot_and_the_old_file_goes(facts: Facts, short: None) -> None:
    for number in range(200):
        facts.put(f"key{number % 7}", f"value {number}")
    (path,) = facts.directory.iterdir()
    assert 100 < int(path.stem) <= 200
    contents = read_log(path)
    assert contents.entries == facts.entries
    assert contents.end.number == 200
    assert contents.size < 3000
    assert facts.again().entries == facts.entries


def test_the_chain_goes_on_from_file_to_file(facts: Facts, short: None) -> None:
    first, before = facts.log.path, b""
    while facts.log.path == first:
        before = first.read_bytes()[: read_log(first).size]
        facts.put("key", "value")
    data = facts.log.path.read_bytes()
    snapshot = decode_record(data[: length_of(data[:24])])
    assert snapshot.kind == RecordKind.SNAPSHOT
    starts = [0]
    while (end := starts[-1] + length_of(before[starts[-1] : starts[-1] + 24])) < len(before):
        starts.append(end)
    assert snapshot.previous == decode_record(before[starts[-1] :]).crc
    assert snapshot.number == int(facts.log.path.stem)


def test_a_large_state_is_not_written_anew_for_every_few_changes(facts: Facts, short: None) -> None:
    for number in range(500):
        facts.put(f"key{number}", "x" * 100)
    path = facts.log.path
    for _ in range(20):
        facts.put("key0", "y" * 100)
    assert facts.log.path == path


def test_a_snapshot_interrupted_at_any_step_loses_nothing(tmp_path: Path, short: None) -> None:
    (tmp_path / "whole").mkdir()
    create_log(tmp_path / "whole", {})
    whole = Facts(tmp_path / "whole")
    while not whole.log._wants_snapshot:
        whole.put("key", "value")
    before = dict(whole.entries)
    whole.close()
    step, finished, outcomes = 0, False, set()
    while not finished:
        step += 1
        place = tmp_path / str(step)
        shutil.copytree(tmp_path / "whole", place)
        facts = Facts(place)
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, step)
            try:
                facts.put("key", "last")
                finished = True
            except Crash:
                pass
        found = facts.again()
        outcomes.add(found.entries["key"].data)
        assert {**found.entries, "key": before["key"]} == before
        assert finished <= (found.entries["key"].data == b'"last"'), "acked is there"
        found.put("key", "after")
        assert found.again().entries["key"] == StoredValue(b'"after"', found.entries["key"].version)
        found.close()
        assert len(list(place.iterdir())) == 1
    assert step > 8
    assert outcomes == {b'"value"', b'"last"'}


def test_the_old_file_goes_only_when_the_new_one_and_its_name_are_durable(facts: Facts, short: None) -> None:
    while not facts.log._wants_snapshot:
        facts.put("key", "value")
    old = facts.log.path.name
    with recorded() as calls:
        facts.put("key", "last")
    new = facts.log.path.name
    draft = old.replace(".log", ".new")
    assert calls == [
        f"fdatasync {draft}",
        f"replace {draft} {new}",
        f"fsync {facts.directory.name}",
        f"fdatasync {new}",  # the copy
        f"fsync {facts.directory.name}-copy",
        f"unlink {old}",
        f"unlink {old}",
    ]


def test_a_full_disk_refuses_a_change_and_the_same_file_goes_on_when_there_is_room(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts.put("key", "kept")
    path = facts.log.path
    real = os.pwrite

    def write(fd: int, data: bytes, position: int) -> int:
        real(fd, data[: len(data) // 2], position)
        raise OSError(errno.ENOSPC, "No space left on device")

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch_write(patch, write)
            facts.put("key", "too much")
        assert read_log(path).torn_bytes == 0, "what was written of it was cut off"
        assert facts.again().entries == facts.entries
    facts.put("key", "fits")
    assert facts.log.path == path
    assert facts.again().entries["key"] == StoredValue(b'"fits"', 2)


def test_after_a_failed_sync_a_new_file_is_made_from_memory_before_anything_is_acked(
    facts: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts.put("key", "kept")
    facts.put("other", "kept too")

    def sync(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    inode = facts.log.path.stat().st_ino
    with monkeypatch.context() as patch:
        patch_sync(patch, sync)
        for _ in range(3):
            with pytest.raises(SyncFailed):
                facts.put("key", "refused")
            assert facts.log.end is None
    facts.put("key", "new")
    assert facts.log.path.stat().st_ino != inode
    assert len(list(facts.directory.iterdir())) == 1
    assert facts.log.end is not None
    found = facts.again()
    assert found.entries == facts.entries
    assert found.entries["key"] == StoredValue(b'"new"', 2)


def test_a_snapshot_that_cannot_be_written_is_logged_and_the_old_file_goes_on(
    facts: Facts, short: None, caplog: pytest.LogCaptureFixture
) -> None:
    first = facts.log.path
    full = OSError(errno.ENOSPC, "No space left on device")
    with caplog.at_level(logging.WARNING), failing(facts.directory, "pwrite", full, lambda name: name.endswith(".new")):
        for number in range(60):
            facts.put("key", f"{number:05}")
    warnings = [record.getMessage() for record in caplog.records]
    assert 2 <= len(warnings) < 30, "not for every change"
    assert all("goes on without a snapshot" in text and "No space left" in text for text in warnings)
    assert list(facts.directory.iterdir()) == [first]
    assert facts.again().entries == facts.entries
    for number in range(20):
        facts.put("key", f"{number:05}")
    assert facts.log.path != first


def test_a_snapshot_whose_name_may_not_last_is_made_again_before_anything_is_acked(facts: Facts, short: None) -> None:
    while not facts.log._wants_snapshot:
        facts.put("key", "value")
    error = OSError(errno.EIO, "Input/output error")
    with failing(facts.directory, "fsync", error, lambda name: name == str(facts.directory)):
        for _ in range(2):
            with pytest.raises(SyncFailed):
                facts.put("key", "refused")
            assert facts.log.end is None
    facts.put("key", "new")
    assert len(list(facts.directory.iterdir())) == 1
    assert facts.again().entries == facts.entries


def test_the_room_behind_the_log_is_given_back_at_the_end(facts: Facts) -> None:
    facts.put("key", "value")
    assert facts.log.path.stat().st_size > module.ROOM
    facts.log.tidy()
    assert facts.log.end is not None
    assert facts.log.path.stat().st_size == facts.log.end.size
    facts.put("key", "more")
    assert facts.again().entries == facts.entries
