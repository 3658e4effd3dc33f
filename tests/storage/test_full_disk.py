"""A disk without room refuses what needs room, and nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qb.core.wire.errors import DiskFull
from qb.storage.engine import Topic
from qb.storage.log.segment_index import IndexFile
from qb.storage.verification import verify
from tests.support.disk import patch_write
from tests.support.stores import everything, indexes, logs, open_engine, opened, running, store


@contextmanager
def full(patch: pytest.MonkeyPatch, has_room: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Let every write inside the block that lengthens a file find no room, unless there is some by then."""

    def write(fd: int, data: bytes, position: int) -> int:
        if position + len(data) <= os.fstat(fd).st_size or has_room():
            return real(fd, data, position)
        raise OSError(errno.ENOSPC, "No space left on device")

    def reserve(fd: int, position: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    real = os.pwrite
    with patch.context() as context:
        patch_write(context, write)
        context.setattr(os, "posix_fallocate", reserve)
        yield


@contextmanager
def no_room_to_sync(patch: pytest.MonkeyPatch, name: str, wanted: Callable[[str], bool]) -> Iterator[None]:
    """Let a sync inside the block find no room for the files that are wanted."""
    real = getattr(os, name)

    def sync(fd: int) -> None:
        if wanted(os.readlink(f"/proc/self/fd/{fd}")):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    with patch.context() as context:
        context.setattr(os, name, sync)
        yield


@pytest.mark.parametrize("spoil", ["missing", "short", "wrong"])
async def test_an_engine_starts_on_a_full_disk_and_serves_reads_and_deletions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    async with opened(tmp_path, segment_bytes=200) as engine:
        await engine.create_topic(Topic(topic="other"))
        for number in range(6):
            await store(engine.log("t", 0), b"%d" % number)
    for index in indexes(tmp_path):
        whole = index.read_bytes()
        index.write_bytes({"short": whole[:-16], "wrong": b"?" * len(whole)}.get(spoil, b""))
        if spoil == "missing":
            index.unlink()
    topics = tmp_path / "data" / "topics"

    def is_freed() -> bool:
        return not (topics / "other").exists() and not list(topics.glob(".deleted-other*/*"))

    with full(monkeypatch, is_freed):
        async with running(open_engine(tmp_path, segment_bytes=200)) as engine:
            assert await everything(engine.log("t", 0)) == [b"%d" % number for number in range(6)]
            with pytest.raises(DiskFull):
                await store(engine.log("t", 0), b"refused")
            await engine.delete_topic("other")
            await store(engine.log("t", 0), b"6")
    async with running(open_engine(tmp_path, segment_bytes=200)) as engine:
        assert list(engine.topics()) == ["t"]
        assert await everything(engine.log("t", 0)) == [b"%d" % number for number in range(7)]
    async with running(open_engine(tmp_path, segment_bytes=200)) as engine:
        assert engine.recovery.notes == ()


async def test_a_new_segment_whose_directory_cannot_be_synced_for_want_of_room_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, segment_bytes=10) as engine:
        log = engine.log("t", 0)
        await store(log, b"0")
        directory = str(logs(tmp_path)[0].parent)
        with no_room_to_sync(monkeypatch, "fsync", lambda name: name == directory), pytest.raises(DiskFull):
            await store(log, b"refused")
        assert log.state().status == "ok"
        await store(log, b"1")
        assert await everything(log) == [b"0", b"1"]
    async with opened(tmp_path) as engine:
        assert await everything(engine.log("t", 0)) == [b"0", b"1"]


async def test_the_index_of_a_segment_that_was_closed_without_room_for_it_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, segment_bytes=10) as engine:
        await store(engine.log("t", 0), b"0")
        with monkeypatch.context() as context:
            context.setattr(IndexFile, "write", lambda index: None)  # as it goes on when there is no room
            await store(engine.log("t", 0), b"1")
    assert verify(tmp_path / "data").findings == []


async def test_a_topic_whose_logs_cannot_be_synced_for_want_of_room_is_refused_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        with no_room_to_sync(monkeypatch, "fdatasync", lambda name: name.endswith("new/1/" + "0" * 20 + ".log")):
            with pytest.raises(DiskFull):
                await engine.create_topic(Topic(topic="new", partitions=2))
            assert "new" not in engine.topics()
            assert [path.name for path in (tmp_path / "data" / "topics").iterdir()] == ["t"]
        await engine.create_topic(Topic(topic="new"))
        with no_room_to_sync(monkeypatch, "fdatasync", lambda name: name.endswith("new/1/" + "0" * 20 + ".log")):
            with pytest.raises(DiskFull):
                await engine.add_partitions("new", 2)
            await store(engine.log("new", 0), b"the others are served")
        assert (await engine.add_partitions("new", 2)).partitions == 2
        await store(engine.log("new", 1), b"kept")


async def test_a_refusal_for_want_of_room_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as engine:
        await store(engine.log("t", 0), b"one")
        with full(monkeypatch):
            with pytest.raises(DiskFull, match=f"could not store the message in {logs(tmp_path)[0]}: No space left"):
                await store(engine.log("t", 0), b"refused")
            with pytest.raises(DiskFull, match=r"No space left on device: '/.*/topics/\.creating-.*/0/0{20}\.log'"):
                await engine.create_topic(Topic(topic="new"))
            with pytest.raises(DiskFull, match=r"No space left on device: '/.*/staged/[0-9a-f]+\.log'"):
                await engine.begin_stage("transaction", None)
