"""A data directory becomes a journal and a directory again. Clients see no difference, and it may be interrupted."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from qb.core.settings import StorageSettings
from qb.replication.engine.replicated_cell import MigrationUnfinished
from qb.replication.journal.journal import Journal
from qb.replication.journal.memory_store import MemoryStore, MemoryStream
from qb.replication.journal.trio_timers import TrioTimers
from qb.replication.migration.copy_to_local import copy_to_local
from qb.replication.migration.directory_payloads import StoppedDirectory, was_stopped
from qb.replication.migration.journal_filling import JournalFilling, JournalInUse
from qb.storage.directory_lock import DirectoryLock
from qb.storage.engine import Topic
from qb.storage.files import CannotOpen
from qb.storage.local_engine import LocalEngine
from qb.storage.verification import verify
from tests.damage.directories import make_clean, make_killed
from tests.support.cells import IDENTITY, Cells, answers, caught_up, proved
from tests.support.local_state import state
from tests.support.stores import store

pytestmark = [pytest.mark.process]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with something of everything."""
    return make_clean(tmp_path_factory.mktemp("original"))


@pytest.fixture
async def cells(nursery: trio.Nursery, tmp_path: Path) -> Cells:
    timers, stream = TrioTimers(), MemoryStream()
    nursery.start_soon(timers.run)
    return Cells(nursery, tmp_path, lambda: MemoryStore(stream, timers), timers)


@asynccontextmanager
async def stopped(directory: Path) -> AsyncIterator[StoppedDirectory]:
    opened = StoppedDirectory(directory)
    try:
        yield opened
    finally:
        opened.close()


async def fill(cells: Cells, directory: Path, payloads: int | None = None) -> int:
    """Migrate a directory, or stop after so many payloads; returns how many there are."""
    filling = JournalFilling(Journal(cells._new_store(), cells._timers, "migration"), "a test")
    async with stopped(directory) as source:
        await filling.begin(source.stages)
        wanted = list(source.payloads(filling.stages))
        if payloads is None:
            await filling.fill(iter(wanted))
        else:
            for payload in wanted[:payloads]:
                await filling._append(payload)
            await filling._settled(0)
    return len(wanted)


async def back(cells: Cells, directory: Path) -> None:
    journal = Journal(cells._new_store(), cells._timers, "migration")
    await copy_to_local(StorageSettings(data_dir=str(directory)), journal, IDENTITY, "a test")


def stat_of(directory: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.stat() for path in directory.rglob("*") if path.is_file()}
    return {str(path): (stat.st_mtime_ns, stat.st_size) for path, stat in found.items() if path.name != "lock"}


async def test_there_and_back_clients_see_no_difference_and_the_source_is_not_touched(
    original: Path, cells: Cells, tmp_path: Path
) -> None:
    before = stat_of(original)
    await fill(cells, original)
    assert stat_of(original) == before
    await back(cells, tmp_path / "local")
    assert verify(tmp_path / "local").findings == []
    seen = await trio.to_thread.run_sync(state, original, tmp_path / "seen before")
    assert await trio.to_thread.run_sync(state, tmp_path / "local", tmp_path / "seen after") == seen


async def test_brokers_own_and_follow_a_journal_that_was_filled(original: Path, cells: Cells, tmp_path: Path) -> None:
    await fill(cells, original)
    shutil.copytree(original, tmp_path / "asked")
    engine = await trio.to_thread.run_sync(LocalEngine.open, StorageSettings(data_dir=str(tmp_path / "asked")))
    wanted = await answers(engine)
    await engine.end()
    engine.close()
    owner, follower = await cells.node("a"), await cells.node("b")
    async with cells.owner(owner) as served:
        found = await answers(served)
        assert found["logs"] == wanted["logs"]
        assert found["stages"] == wanted["stages"]
        kept = {key: value for key, value in wanted["metadata"].items() if not key.startswith(("topic/", "log/"))}
        assert kept.items() <= found["metadata"].items()
        await store(served.log("orders", 0), b"goes on")
        found = await answers(served)
        await caught_up(follower, owner.cell.applied)
        assert await answers(follower.cell._engine) == found
    for node in (owner, follower):
        await node.cell.release()
        await node.kill()
        proved(node.directory)
    again = await cells.node("b")
    assert (await answers(again.cell._engine))["logs"] == found["logs"]


async def test_a_follower_that_is_killed_where_a_log_begins_goes_back_to_its_checkpoint(
    original: Path, cells: Cells
) -> None:
    await fill(cells, original)
    node = await cells.node("a")
    entries = iter(await node.journal.read())
    while "short" not in node.cell._engine.topics():
        await node.cell._follower.apply([next(entries)])
        await node.cell._engine.queue.drained()
    log = node.cell._engine.log("short", 0)
    assert log.next_offset == 0
    await node.cell.release()
    await node.cell._follower.apply(list(entries))
    await node.cell._engine.queue.drained()
    first = log.first_offset
    assert first > 0
    await node.kill()
    again = await cells.node("a")
    assert again.cell._engine.log("short", 0).next_offset == 0
    async with cells.owner(again) as engine:
        assert engine.log("short", 0).first_offset == first


async def test_a_migration_that_is_interrupted_anywhere_does_not_count_and_can_be_begun_again(
    original: Path, cells: Cells, tmp_path: Path
) -> None:
    seen = await trio.to_thread.run_sync(state, original, tmp_path / "seen before")
    async with stopped(original) as source:
        count = len(list(source.payloads()))
    follower = await cells.node("follower")
    for interrupted in [0, 1, 2, count // 3, count // 2, count - 1, count]:
        await fill(cells, original, interrupted)
        node = await cells.node(f"broker {interrupted}")
        with pytest.raises(MigrationUnfinished):
            await node.cell.take_over()
        await node.kill()
    await caught_up(follower, 2 * count)
    await fill(cells, original)
    await back(cells, tmp_path / "local")
    assert await trio.to_thread.run_sync(state, tmp_path / "local", tmp_path / "seen after") == seen
    async with cells.owner(follower) as engine:
        assert engine.metadata.get("migration") is None


async def test_the_way_back_can_be_interrupted_and_begun_again(original: Path, cells: Cells, tmp_path: Path) -> None:
    await fill(cells, original)
    local, seen = tmp_path / "local", await trio.to_thread.run_sync(state, original, tmp_path / "seen before")
    for steps in (2**number for number in itertools.count(6)):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(_cancel_after, steps, scope))
                await back(cells, local)
                nursery.cancel_scope.cancel()
            break
        if (local / "checkpoint").exists():
            with pytest.raises(CannotOpen, match="copy of a journal"):
                LocalEngine.open(StorageSettings(data_dir=str(local)))
    assert steps > 2**8
    assert await trio.to_thread.run_sync(state, local, tmp_path / "seen after") == seen


async def _cancel_after(steps: int, scope: trio.CancelScope) -> None:
    """Cancel after so many passes of the event loop."""
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_a_journal_is_restored_from_the_copy_of_a_broker(
    original: Path, cells: Cells, nursery: trio.Nursery, tmp_path: Path
) -> None:
    await fill(cells, original)
    owner, follower = await cells.node("a"), await cells.node("b")
    async with cells.owner(owner) as engine:
        await store(engine.log("events", 0), b"only in the journal and in copies")
        await caught_up(follower, owner.cell.applied)
        wanted = await answers(engine)
    await follower.cell.preserve()
    await follower.kill()
    stream = MemoryStream()
    anew = Cells(nursery, tmp_path / "anew", lambda: MemoryStore(stream, cells._timers), cells._timers)
    await fill(anew, follower.directory)
    restored = await anew.node("c")
    async with anew.owner(restored) as engine:
        found = await answers(engine)
        assert found["logs"] == wanted["logs"]
        assert found["stages"] == wanted["stages"]
        kept = {key: value for key, value in wanted["metadata"].items() if not key.startswith(("topic/", "log/"))}
        assert kept == {key: found["metadata"].get(key) for key in kept}


async def test_only_an_empty_journal_and_a_new_directory_will_do(original: Path, cells: Cells, tmp_path: Path) -> None:
    node = await cells.node("a")
    async with cells.owner(node) as engine:
        await engine.create_topic(Topic(topic="t"))
    await node.kill()
    with pytest.raises(JournalInUse):
        await fill(cells, original)
    assert node.cell.epoch == 1, "the owner's journal was fenced for nothing"
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    with pytest.raises(CannotOpen, match="not empty"):
        await back(cells, tmp_path / "used")


async def test_a_directory_in_use_or_not_stopped_cleanly_or_damaged_is_refused(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "data")
    lock = DirectoryLock(tmp_path / "data")
    with pytest.raises(CannotOpen, match="in use"):
        StoppedDirectory(tmp_path / "data")
    lock.close()
    log = max((tmp_path / "data").rglob("topics/orders/*/*.log"), key=lambda path: path.stat().st_size)
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    async with stopped(tmp_path / "data") as source:
        with pytest.raises(CannotOpen, match=log.name):
            list(source.payloads())
    (tmp_path / "data" / "clean-stop").unlink()
    assert not was_stopped(tmp_path / "data")
    with pytest.raises(CannotOpen, match="not stopped cleanly"):
        StoppedDirectory(tmp_path / "data")


async def test_a_directory_whose_broker_was_killed_is_recovered_first(cells: Cells, tmp_path: Path) -> None:
    killed = await trio.to_thread.run_sync(make_killed, tmp_path / "killed")
    assert not was_stopped(killed)
    engine = await trio.to_thread.run_sync(LocalEngine.open, StorageSettings(data_dir=str(killed)))
    await engine.end()
    engine.close()
    await fill(cells, killed)
    await back(cells, tmp_path / "local")
    seen = await trio.to_thread.run_sync(state, killed, tmp_path / "seen before")
    assert await trio.to_thread.run_sync(state, tmp_path / "local", tmp_path / "seen after") == seen
