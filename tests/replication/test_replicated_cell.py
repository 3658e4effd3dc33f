"""An owner and its followers on one journal in memory: every fact arrives, and nothing that was acked is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from qb.core.wire.errors import UnknownTopic
from qb.replication.journal.journal_store import Fenced
from qb.replication.journal.memory_store import MemoryStore, MemoryStream
from qb.replication.journal.trio_timers import TrioTimers
from qb.storage.engine import Engine, Topic
from qb.storage.files import CannotOpen
from qb.storage.local_engine import LocalEngine
from tests.support.cells import Cells, answers, caught_up, proved
from tests.support.stores import give, store


@pytest.fixture
async def cells(nursery: trio.Nursery, tmp_path: Path) -> Cells:
    timers, stream = TrioTimers(), MemoryStream()
    nursery.start_soon(timers.run)
    return Cells(nursery, tmp_path, lambda: MemoryStore(stream, timers, most_bytes=4096), timers)


async def write_everything(engine: Engine) -> None:
    """Every kind of fact."""
    await engine.create_topic(Topic(topic="t", partitions=2))
    log, other = engine.log("t", 0), engine.log("t", 1)
    await store(log, b"one", b"two", producer_id=7, first_number=1)
    await store(log, b"three", b"four" * 100, producer_id=7, first_number=3)
    await store(other, *[b"%d" % number for number in range(1_000)])
    await engine.metadata.put("cursor/workers/0", {"settled": 4})
    await engine.metadata.put("offset/readers/t/0", {"offset": 2, "updated_ms": 1})
    await engine.add_partitions("t", 3)
    await store(engine.log("t", 2), b"grown")


async def test_a_follower_has_everything_that_clients_can_ask_of_the_owner(cells: Cells) -> None:
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first) as engine:
        await write_everything(engine)
        asked = await answers(engine)
        await caught_up(second, first.cell.applied)
        assert await answers(second.cell._engine) == asked
    assert engine.durability == "replicated"
    for node in (first, second):
        await node.cell.release()
        await node.kill()
        proved(node.directory)


async def test_a_follower_takes_over_and_goes_on_where_the_owner_was_killed(cells: Cells) -> None:
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first) as engine:
        await write_everything(engine)
        asked = await answers(engine)
    await first.kill()
    async with cells.owner(second) as engine:
        assert await answers(engine) == asked
        await store(engine.log("t", 0), b"five")
        assert engine.log("t", 0).end_offset == 5
    assert second.cell.epoch == 2
    assert second.cell.owner == "b"


async def test_a_killed_follower_goes_back_to_its_checkpoint_and_reads_on(cells: Cells) -> None:
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first) as engine:
        await write_everything(engine)
        await caught_up(second, first.cell.applied)
        await second.cell.release()
        await store(engine.log("t", 0), b"later")
        await caught_up(second, first.cell.applied)
        await second.kill()
        again = await cells.node("b")
        assert again.cell.applied < first.cell.applied
        await caught_up(again, first.cell.applied)
        assert await answers(again.cell._engine) == await answers(engine)


async def test_an_owner_that_was_overtaken_answers_nothing_any_more(cells: Cells) -> None:
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first) as engine:
        await write_everything(engine)
        async with cells.owner(second) as newer:
            receipt = give(engine.log("t", 0), [b"lost"])
            await first.cell.lost.wait()
            assert isinstance(first.cell.why, Fenced)
            assert receipt.calls == []
            await store(newer.log("t", 0), b"five")
    assert receipt.calls == []


async def test_a_local_directory_and_a_copy_are_not_mistaken_for_each_other(cells: Cells, tmp_path: Path) -> None:
    node = await cells.node("a")
    await node.kill()
    with pytest.raises(CannotOpen, match="copy of a journal"):
        LocalEngine.open(node.cell._engine._settings)
    with pytest.raises(CannotOpen, match="is a copy of"):
        await cells.node("a", identity="another stream")
    settings = node.cell._engine._settings.__class__(data_dir=str(tmp_path / "c"))
    LocalEngine.open(settings).close()
    with pytest.raises(CannotOpen, match="no copy of a journal"):
        await cells.node("c")


async def test_a_topic_made_again_under_the_same_name_is_another_one(cells: Cells) -> None:
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first) as engine:
        await engine.create_topic(Topic(topic="t"))
        await store(engine.log("t", 0), b"old")
        await engine.delete_topic("t")
        with pytest.raises(UnknownTopic):
            engine.log("t", 0)
        await engine.create_topic(Topic(topic="t"))
        await store(engine.log("t", 0), b"new")
        await caught_up(second, first.cell.applied)
        assert await answers(second.cell._engine) == await answers(engine)
