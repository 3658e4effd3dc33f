"""An owner and its followers on one journal in memory: every fact arrives, and nothing that was acked is lost."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from qb.core.broker.fetching import FetchLimits
from qb.core.broker.message_broker import MessageBroker
from qb.core.groups.group_manager import GroupManager
from qb.core.settings import ServerSettings, Settings
from qb.core.wire.errors import ShuttingDown, UnknownTopic
from qb.core.wire.frames import MessageType, encode_frame
from qb.replication.journal.journal_store import Fenced, RecordsLost
from qb.replication.journal.memory_store import MemoryStore, MemoryStream
from qb.replication.journal.trio_timers import TrioTimers
from qb.storage.engine import Engine, Topic
from qb.storage.files import CannotOpen
from qb.storage.local_engine import LocalEngine
from qb.storage.log.segment import Segment
from tests.support.cells import CellNode, Cells, answers, caught_up, proved
from tests.support.stores import Receipt, frames, give, store


def stage_frame(stage_id: str, bodies: list[bytes]) -> bytes:
    properties = {"stage": stage_id, "topic": "t", "partition": "0"}
    return encode_frame(MessageType.STAGE, 0, 0, properties, b"".join(frames(0, bodies)))


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


async def test_an_owner_that_has_nothing_to_write_finds_out_that_it_was_overtaken(cells: Cells) -> None:
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first), cells.owner(second):
        with trio.fail_after(20):
            await first.cell.lost.wait()
        assert isinstance(first.cell.why, Fenced)
        assert not second.cell.lost.is_set()


async def test_a_consistent_read_at_an_owner_that_was_overtaken_is_never_answered(cells: Cells) -> None:
    """Whatever its clock says of its lease: here nothing keeps it from answering the other reads."""
    first, second = await cells.node("a"), await cells.node("b")
    broker = lambda engine: MessageBroker(engine, Settings())  # noqa: E731
    async with cells.owner(first) as engine:
        await engine.create_topic(Topic(topic="t"))
        await store(engine.log("t", 0), b"one", b"two", b"three", b"four")
        assert (await broker(engine).offsets("t", consistent=True))["next"] == 4
        async with cells.owner(second) as newer:
            await store(newer.log("t", 0), b"five")
            assert (await broker(newer).offsets("t", consistent=True))["next"] == 5
            assert (await broker(engine).offsets("t"))["next"] == 4, "stale, and the reason for what follows"
            stale: list[object] = []

            async def read(consistently: Callable[[], Awaitable[object]]) -> None:
                with suppress(ShuttingDown):
                    stale.append(await consistently())

            async with trio.open_nursery() as reading:
                reading.start_soon(read, lambda: broker(engine).offsets("t", consistent=True))
                reading.start_soon(read, lambda: broker(engine).fetch("t", 0, 4, FetchLimits(consistent=True)))
                groups = GroupManager(engine, ServerSettings())
                reading.start_soon(read, lambda: groups.committed("readers", consistent=True))
                await first.cell.lost.wait()
                first.cell.abandon(RuntimeError("killed"))
            assert stale == []
            assert isinstance(first.cell.why, Fenced)


async def test_reads_that_come_at_once_share_the_record_that_makes_them_consistent(cells: Cells) -> None:
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first) as engine:
        await engine.create_topic(Topic(topic="t"))
        before = first.cell.applied
        async with trio.open_nursery() as reading:
            for _ in range(20):
                reading.start_soon(engine.confirm_current)
        assert 1 <= first.cell.applied - before <= 2
        await caught_up(second, first.cell.applied)
        assert await answers(second.cell._engine) == await answers(engine)


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


async def test_a_topic_made_again_has_nothing_of_one_whose_first_messages_were_dropped(cells: Cells) -> None:
    first, second = await cells.node("a", segment_bytes=1_000), await cells.node("b", segment_bytes=1_000)
    async with cells.owner(first) as engine:
        await engine.create_topic(Topic(topic="t"))
        log = engine.log("t", 0)
        for _ in range(5):
            await store(log, b"x" * 800)
        await first.cell._engine._drop(log, 2)  # type: ignore[arg-type]
        await caught_up(second, first.cell.applied)
        await engine.delete_topic("t")
        await engine.create_topic(Topic(topic="t"))
        await caught_up(second, first.cell.applied)
        for node in (first, second):
            assert node.cell._engine.log("t", 0).end_offset == 0
        await store(engine.log("t", 0), b"new")
        await caught_up(second, first.cell.applied)
        assert await answers(second.cell._engine) == await answers(engine)


async def test_a_generation_that_a_killed_owner_gave_out_is_never_given_out_again(cells: Cells) -> None:
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first) as engine:
        await engine.create_topic(Topic(topic="t"))
        old = await GroupManager(engine, ServerSettings()).join("g", "m", ["t"])
        first.cell.abandon(RuntimeError("killed"))
    await first.kill()
    async with cells.owner(second) as engine:
        new = await GroupManager(engine, ServerSettings()).join("g", "m", ["t"])
        assert new.generation > old.generation


async def test_retention_drops_the_same_messages_everywhere_though_copies_have_other_segments(cells: Cells) -> None:
    first, second = await cells.node("a", segment_bytes=1_000), await cells.node("b", segment_bytes=5_000)
    async with cells.owner(first) as engine:
        await engine.create_topic(Topic(topic="t"))
        log = engine.log("t", 0)
        for number in range(20):
            await store(log, b"%d" % number + b"x" * 400)
        await first.cell._engine._drop(log, 3)  # type: ignore[arg-type]
        assert log.first_offset > 0
        await caught_up(second, first.cell.applied)
        assert await answers(second.cell._engine) == await answers(engine)
    for node in (first, second):
        await node.cell.release()
        await node.kill()
        proved(node.directory)
        await node_again(cells, node, log.first_offset)


async def node_again(cells: Cells, node: CellNode, first_offset: int) -> None:
    """Open a directory again; its log begins where it did."""
    again = await cells.node(node.directory.name)
    assert again.cell._engine.log("t", 0).first_offset == first_offset


async def test_frames_of_a_stage_are_copied_and_end_with_it(cells: Cells) -> None:
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first) as engine:
        stage = await engine.begin_stage("tx", None)
        receipt = Receipt()
        stage.append(stage_frame(stage.stage_id, [b"one", b"two"]), ("t", 0), 2, receipt)
        await receipt.wait()
        await caught_up(second, first.cell.applied)
        assert await answers(second.cell._engine) == await answers(engine)
        await second.cell.release()
        await engine.delete_stages([stage.stage_id])
        await caught_up(second, first.cell.applied)
        assert second.cell._engine.stages() == engine.stages() == {}
        await second.kill()
        again = await cells.node("b")
        assert list(again.cell._engine.stages()) == [stage.stage_id], "it is there at the checkpoint"
        await caught_up(again, first.cell.applied)
        assert again.cell._engine.stages() == {}


async def test_a_hot_takeover_opens_no_log_anew(cells: Cells) -> None:
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first) as engine:
        await write_everything(engine)
        await caught_up(second, first.cell.applied)
    log = second.cell._engine.log("t", 0)
    await first.kill()
    async with cells.owner(second) as engine:
        assert engine.log("t", 0) is log


async def test_a_journal_that_has_lost_what_a_copy_has_is_refused(nursery: trio.Nursery, tmp_path: Path) -> None:
    timers, streams = TrioTimers(), [MemoryStream()]
    nursery.start_soon(timers.run)
    cells = Cells(nursery, tmp_path, lambda: MemoryStore(streams[0], timers), timers)
    node = await cells.node("a")
    async with cells.owner(node) as engine:
        await write_everything(engine)
    await node.cell.release()
    await node.kill()
    streams[0] = MemoryStream()
    for number in range(100):
        streams[0].add(b"another record %d" % number)
    again = await cells.node("a")
    with pytest.raises(RecordsLost):
        await again.cell.follow()
    with pytest.raises(RecordsLost):
        await again.cell.take_over()


async def test_a_copy_in_which_a_loss_is_noted_is_never_opened_again(cells: Cells) -> None:
    node = await cells.node("a")
    node.cell.note_lost("position 7 holds another record")
    await node.kill()
    with pytest.raises(RecordsLost, match="position 7"):
        await cells.node("a")


async def test_a_follower_of_an_idle_owner_lags_by_nothing(cells: Cells) -> None:
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first):
        await caught_up(second, 1)
        await second.follow_until(lambda: second.cell.point == first.cell.point)


async def test_a_disk_that_fails_behind_a_committed_record_ends_the_tenure_and_another_broker_goes_on(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await cells.node("a"), await cells.node("b")
    async with cells.owner(first) as engine:
        await engine.create_topic(Topic(topic="t"))
        with monkeypatch.context() as failing:
            failing.setattr(Segment, "write", full_disk)
            receipt = give(engine.log("t", 0), [b"committed, and not on this disk"])
            await first.cell.lost.wait()
        assert receipt.calls == [], "its outcome is known to the next owner only"
    await first.kill()
    async with cells.owner(second) as engine:
        assert engine.log("t", 0).end_offset == 1


def full_disk(*_: object, **__: object) -> float:
    raise OSError(errno.ENOSPC, "no room")
