"""Small durable facts: grouped writes, compare-and-set, state that may lag."""

from __future__ import annotations

import errno
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from qb.core.wire.errors import DiskFull, Internal, ShuttingDown
from qb.storage.commit.committer import LocalCommitter
from qb.storage.commit.completions import Completions
from qb.storage.commit.sync_pace import SyncPace
from qb.storage.commit.writer_threads import WriterThreads
from qb.storage.data_directory import prepare
from qb.storage.engine import MetadataEntry, VersionConflict
from qb.storage.files import OpenFiles, SyncFailed
from qb.storage.metadata.metadata_log import MetadataLog
from qb.storage.metadata.metadata_records import decode_changes
from qb.storage.metadata.metadata_recovery import recover_metadata
from qb.storage.metadata.metadata_store import MetadataStore
from tests.support.waiting import until


@asynccontextmanager
async def opened(directory: Path, pace: SyncPace | None = None) -> AsyncIterator[MetadataStore]:
    """The metadata of a data directory at work."""
    prepare(directory)
    files, completions = OpenFiles(), Completions()
    writers = WriterThreads("writer", 2, completions)
    found = recover_metadata(files, directory)
    pace = pace or SyncPace()
    committer = LocalCommitter(writers, pace, syncs=True)
    metadata = MetadataStore(found.log, found.entries, committer, completions, pace)
    writers.start()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writers.deliver_forever)
            nursery.start_soon(metadata.run)
            yield metadata
            nursery.cancel_scope.cancel()
        await metadata.finish()
    finally:
        metadata.abandon(ShuttingDown("the test ends"))
        writers.stop(5.0)
        writers.close()
        files.close()


class Slow:
    """Counts the changes of each record, and holds the first until it may go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.threads: list[int] = []
        self.reached, self.go = threading.Event(), threading.Event()
        self._real: Callable[..., Any] = MetadataLog.commit
        patch.setattr(MetadataLog, "commit", lambda log, body, entries: self._commit(log, body, entries))

    def _commit(self, log: MetadataLog, body: bytes, entries: Any) -> Any:
        self.sizes.append(len(list(decode_changes(body))))
        self.threads.append(threading.get_ident())
        self.reached.set()
        assert self.go.wait(20)
        return self._real(log, body, entries)


class Quick(SyncPace):
    """A disk that is known to be quick."""

    is_quick = True


async def test_what_was_put_is_there_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as metadata:
        assert metadata.get("topic/a") is None
        assert await metadata.put("topic/a", {"partitions": 3, "name": "ä"}) == 1
        assert await metadata.put("topic/a", {"partitions": 4}) == 2
        assert await metadata.put("topic/b", [1, None, "x"]) == 1
        assert await metadata.put("other", 1.5) == 1
        assert metadata.get("topic/a") == MetadataEntry({"partitions": 4}, 2)
    async with opened(tmp_path) as metadata:
        assert metadata.get("topic/a") == MetadataEntry({"partitions": 4}, 2)
        assert list(metadata.under("topic/").items()) == [
            ("topic/a", MetadataEntry({"partitions": 4}, 2)),
            ("topic/b", MetadataEntry([1, None, "x"], 1)),
        ]


async def test_a_stored_value_does_not_follow_the_object_it_came_from(tmp_path: Path) -> None:
    async with opened(tmp_path) as metadata:
        value = {"a": [1]}
        await metadata.put("k", value)
        value["a"].append(2)
        assert metadata.get("k") == MetadataEntry({"a": [1]}, 1)


async def test_compare_and_set_replaces_only_the_version_it_names(tmp_path: Path) -> None:
    async with opened(tmp_path) as metadata:
        assert await metadata.put("k", "first", expected=0) == 1
        with pytest.raises(VersionConflict):
            await metadata.put("k", "absent?", expected=0)
        assert await metadata.put("k", "second", expected=1) == 2
        with pytest.raises(VersionConflict):
            await metadata.put("k", "late", expected=1)
        assert metadata.get("k") == MetadataEntry("second", 2)


async def test_of_many_who_compare_and_set_at_once_one_wins(tmp_path: Path) -> None:
    async with opened(tmp_path) as metadata:
        won: list[int] = []

        async def attempt(number: int) -> None:
            try:
                await metadata.put("leader", number, expected=0)
                won.append(number)
            except VersionConflict:
                pass

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(attempt, number)
        assert metadata.get("leader") == MetadataEntry(won[0], 1)
        assert len(won) == 1


async def test_writes_that_arrive_while_a_record_is_synced_share_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as metadata:
        slow = Slow(monkeypatch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(metadata.put, "first", 0)
            await trio.to_thread.run_sync(slow.reached.wait, 10)
            for number in range(30):
                nursery.start_soon(metadata.put, f"k{number}", number)
            await trio.testing.wait_all_tasks_blocked()
            assert metadata.get("first") is None  # not before it is durable
            slow.go.set()
        assert slow.sizes == [1, 30]
        assert len(metadata.under("k")) == 30


async def test_delete_removes_all_or_nothing_and_does_not_mind_what_is_absent(tmp_path: Path) -> None:
    async with opened(tmp_path) as metadata:
        for key in "abc":
            await metadata.put(key, key)
        await metadata.delete("a", "b", "never there")
        await metadata.delete()
        assert list(metadata.under("")) == ["c"]
        assert await metadata.put("a", "again", expected=0) == 1


async def test_state_that_may_lag_is_coalesced_and_durable_after_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as metadata:
        slow = Slow(monkeypatch)
        slow.go.set()
        for number in range(1000):
            metadata.put_soon("cursor", number)
        metadata.put_soon("gone", 1)
        metadata.put_soon("gone", None)
        await metadata.flush()
        assert metadata.get("cursor") == MetadataEntry(999, 1)
        assert metadata.get("gone") is None
        assert slow.sizes == [1]  # the cursor; what was never there need not be removed


async def test_state_that_may_lag_is_written_without_a_waiter(tmp_path: Path) -> None:
    async with opened(tmp_path) as metadata:
        metadata.put_soon("cursor", 1)
        await until(lambda: metadata.get("cursor") is not None)
        metadata.put_soon("cursor", 2)
    async with opened(tmp_path) as metadata:
        assert metadata.get("cursor") == MetadataEntry(2, 2)


async def test_writes_of_one_key_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as metadata:
        metadata.put_soon("k", "old")
        await metadata.delete("k")
        assert metadata.get("k") is None
        metadata.put_soon("k", 1)
        await metadata.put("k", 2)
        metadata.put_soon("k", 3)
        await metadata.flush()
        assert metadata.get("k") == MetadataEntry(3, 3)


@pytest.mark.parametrize(
    ("error", "kind"), [(OSError(errno.ENOSPC, "no room"), DiskFull), (SyncFailed(errno.EIO, "no disk"), Internal)]
)
async def test_a_record_that_fails_changes_nothing_and_lagging_state_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, kind: type[Exception]
) -> None:
    def failing(*_: object) -> None:
        raise error

    async with opened(tmp_path) as metadata:
        with monkeypatch.context() as patch:
            patch.setattr(MetadataLog, "commit", failing)
            metadata.put_soon("lags", 1)
            with pytest.raises(kind, match=rf"metadata could not be written to .*\.log: {error.strerror}"):
                await metadata.put("k", 1)
        assert metadata.get("k") is None
        assert await metadata.put("k", 2, expected=0) == 1
        assert metadata.get("lags") == MetadataEntry(1, 1)


async def test_puts_of_many_tasks_in_one_step_share_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path, Quick()) as metadata:
        slow = Slow(monkeypatch)
        slow.go.set()
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for number in range(32):
                    nursery.start_soon(metadata.put, f"k{number}", number)
        assert slow.sizes == [32, 32, 32]
        assert threading.get_ident() not in slow.threads


async def test_a_lone_short_put_on_a_quick_disk_needs_no_change_of_threads_and_a_long_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, Quick()) as metadata:
        slow = Slow(monkeypatch)
        slow.go.set()
        await metadata.put("k", "short")
        await metadata.put("k", "x" * 20_000)
        assert [thread == threading.get_ident() for thread in slow.threads] == [True, False]


async def test_what_is_given_together_is_stored_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as metadata:
        slow = Slow(monkeypatch)
        slow.go.set()
        done = trio.Event()
        metadata.put_then({f"k{number}": number for number in range(9)}, lambda error: done.set())
        await done.wait()
        assert slow.sizes == [9]


async def test_after_the_end_writes_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as metadata:
        pass
    with pytest.raises(ShuttingDown):
        await metadata.put("k", 1)
    outcomes: list[Any] = []
    metadata.put_then({"k": 1}, outcomes.append)
    assert outcomes == [], "never inside the call"
    await trio.testing.wait_all_tasks_blocked()
    assert [type(error) for error in outcomes] == [ShuttingDown]


async def test_a_caller_that_does_not_wait_is_notified_when_it_is_durable_or_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as metadata:
        outcomes: list[Any] = []

        def done(error: Any) -> None:
            outcomes.append((error, metadata.get("a"), metadata.get("b")))
            if len(outcomes) == 1:
                metadata.put_then({"a": 3}, done)

        metadata.put_soon("a", 0)
        metadata.put_then({"a": 1, "b": 2}, done)
        assert not outcomes, "it does not block"
        await until(lambda: len(outcomes) == 2)
        assert outcomes == [
            (None, MetadataEntry(1, 2), MetadataEntry(2, 1)),
            (None, MetadataEntry(3, 3), MetadataEntry(2, 1)),
        ]
        with monkeypatch.context() as patch:
            patch.setattr(MetadataLog, "commit", lambda *_: 1 / 0)
            metadata.put_then({"a": 4}, done)
            await until(lambda: len(outcomes) == 3)
        error, kept, _ = outcomes[-1]
        assert isinstance(error, Internal)
        assert kept == MetadataEntry(3, 3)
