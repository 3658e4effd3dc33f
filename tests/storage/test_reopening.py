"""A poisoned log is proved anew and takes messages again, without a restart; never with less than was durable."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import trio

from qb.core.wire.errors import LogDamaged, LogPoisoned
from qb.storage import maintenance
from qb.storage.local_engine import LocalEngine
from qb.storage.log.partition_log import LocalLog
from qb.storage.verification import verify
from tests.support.disk import patch_sync
from tests.support.stores import everything, give, logs, open_engine, opened, running, store

PATIENCE = 60.0


def failing(fd: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


async def poisoned(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> LocalLog:
    """Return a log with two durable messages whose third could not be synced."""
    log = engine.log("t", 0)
    await store(log, b"a", producer_id=7, first_number=1)
    await store(log, b"b")
    with monkeypatch.context() as patch, pytest.raises(LogPoisoned):
        patch_sync(patch, failing)
        await store(log, b"refused")
    assert log.state().status == "poisoned"
    return log


async def test_a_poisoned_log_is_proved_anew_and_takes_messages_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log = await poisoned(engine, monkeypatch)
        ranges = log.ranges()
        await log.reopen()
        assert log.state().status == "ok"
        assert log.ranges() == ranges
        assert not log.may_reopen
        await store(log, b"c")
        assert await everything(log) == [b"a", b"b", b"c"], "what was refused is not there"
    assert verify(tmp_path / "data").findings == []
    async with running(open_engine(tmp_path)) as engine:
        assert await everything(engine.log("t", 0)) == [b"a", b"b", b"c"]


async def test_a_log_is_opened_anew_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, opened_anew, reopen = trio.Event(), trio.Event(), LocalLog.reopen

    async def watched(log: LocalLog) -> None:
        try:
            await reopen(log)
        except OSError:
            failed.set()
            raise
        opened_anew.set()

    monkeypatch.setattr(LocalLog, "reopen", watched)
    monkeypatch.setattr(maintenance, "REOPEN_AFTER", 0.01)
    async with opened(tmp_path) as engine:
        log = engine.log("t", 0)
        await store(log, b"a")
        with monkeypatch.context() as patch, trio.fail_after(PATIENCE):
            patch_sync(patch, failing)
            with pytest.raises(LogPoisoned):
                await store(log, b"refused")
            await failed.wait()
            assert log.state().status == "poisoned"
        with trio.fail_after(PATIENCE):
            await opened_anew.wait()
        await store(log, b"b")
        assert await everything(log) == [b"a", b"b"]


async def test_a_log_stays_poisoned_while_the_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as engine:
        log = await poisoned(engine, monkeypatch)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
            patch_sync(patch, failing)
            await log.reopen()
        assert log.state().status == "poisoned"
        with pytest.raises(LogPoisoned):
            give(log, [b"c"])
        assert await everything(log) == [b"a", b"b"]


async def test_a_poisoned_log_that_has_lost_what_was_durable_stops_its_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log = await poisoned(engine, monkeypatch)
        (path,) = logs(tmp_path)
        with path.open("r+b") as file:
            file.seek(log.size - 5)
            file.write(b"?")
        await log.reopen()
        assert log.state().status == "damaged"
        assert str(path) in str(log.state().reason)
        with pytest.raises(LogDamaged):
            give(log, [b"c"])


async def test_a_log_that_is_deleted_while_it_is_proved_anew_stays_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as engine:
        log = await poisoned(engine, monkeypatch)
        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(log.reopen)
                nursery.start_soon(engine.delete_topic, "t")
        assert log.is_deleted
        assert not (tmp_path / "data" / "topics" / "t").exists()
