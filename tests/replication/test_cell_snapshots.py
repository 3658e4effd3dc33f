"""What is not needed any more is trimmed behind a snapshot, and empty and outdated copies begin with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from qb.core.broker.user_registry import UserRegistry, watch_users
from qb.core.rights.known_users import KnownUsers, LoggedIn
from qb.core.rights.users_file import hash_of
from qb.replication.engine.journal_positions import JournalPositions
from qb.replication.journal.journal_store import JournalGap
from qb.replication.journal.memory_store import MemoryStore, MemoryStream
from qb.replication.journal.record_chain import ChainPoint
from qb.replication.journal.trio_timers import TrioTimers
from qb.storage.engine import Engine, Topic
from tests.support.cells import CellNode, Cells, answers, caught_up, proved
from tests.support.stores import store

SETTINGS = {"segment_bytes": 2_000, "retention_bytes": 3_000}


class TrimmedCell:
    """A cell whose journal was trimmed once."""

    def __init__(self, nursery: trio.Nursery, directory: Path, timers: TrioTimers) -> None:
        self.stream = MemoryStream()
        self.cells = Cells(nursery, directory, lambda: MemoryStore(self.stream, timers, most_bytes=4096), timers)

    async def fill(self, owner: CellNode, engine: Engine, count: int) -> None:
        """Append, checkpoint and drop, again and again."""
        log = engine.log("t", 0)
        for number in range(count):
            await store(log, b"%d" % number + b"x" * 300, producer_id=9, first_number=log.end_offset + 1)
            await owner.cell._checkpoint()
        closed = len(log.closed_segments)  # type: ignore[attr-defined]
        await owner.cell._engine._drop(log, closed)  # type: ignore[arg-type]
        assert log.first_offset > 0


@pytest.fixture
async def trimmed(nursery: trio.Nursery, tmp_path: Path) -> TrimmedCell:
    timers = TrioTimers()
    nursery.start_soon(timers.run)
    return TrimmedCell(nursery, tmp_path, timers)


async def test_an_empty_copy_begins_with_the_snapshot_and_an_outdated_one_is_taken_anew(trimmed: TrimmedCell) -> None:
    cells = trimmed.cells
    owner, late = await cells.node("a", **SETTINGS), await cells.node("late", **SETTINGS)
    async with cells.owner(owner) as engine:
        await engine.create_topic(Topic(topic="gone"))
        await store(engine.log("gone", 0), b"deleted")
        await engine.create_topic(Topic(topic="t", partitions=2))
        await caught_up(late, owner.cell.applied)
        await late.cell.release()
        await engine.delete_topic("gone")
        await trimmed.fill(owner, engine, 30)
        stage = await engine.begin_stage("tx", 1)
        before = len(trimmed.stream.records)
        assert await owner.cell.trim()
        assert len(trimmed.stream.records) < before
        await store(engine.log("t", 0), b"behind the snapshot")
        await store(engine.log("t", 1), b"the first here")
        asked = await answers(engine)
        new = await cells.node("new", **SETTINGS)
        await caught_up(new, owner.cell.applied)
        assert await answers(new.cell._engine) == asked
        with pytest.raises(JournalGap):
            await late.cell.follow()
        await late.kill()
        late = await cells.node("late", **SETTINGS)
        await caught_up(late, owner.cell.applied)
        assert await answers(late.cell._engine) == asked
        assert stage.stage_id in late.cell._engine.stages()
    for node in (new, late):
        await node.cell.release()
        await node.kill()
        proved(node.directory)
    async with cells.owner(await cells.node("new", **SETTINGS)) as engine:
        assert await answers(engine) == asked
        await store(engine.log("t", 0), b"of an owner that began with a snapshot")


async def test_a_copy_that_is_killed_between_its_snapshot_and_the_end_goes_on(trimmed: TrimmedCell) -> None:
    cells = trimmed.cells
    owner = await cells.node("a", **SETTINGS)
    async with cells.owner(owner) as engine:
        await engine.create_topic(Topic(topic="t"))
        await trimmed.fill(owner, engine, 30)
        await engine.metadata.put("cursor/w/0", 1)
        assert await owner.cell.trim()
        await engine.metadata.put("cursor/w/0", 2)
        new = await cells.node("new", **SETTINGS)
        snapshot = await new.cell._find_snapshot()
        await new.cell._follower.begin(snapshot)
        await new.cell._checkpoint()
        await new.kill()
        new = await cells.node("new", **SETTINGS)
        assert 0 < new.cell.applied < owner.cell.applied
        await caught_up(new, owner.cell.applied)
        assert await answers(new.cell._engine) == await answers(engine)


async def test_the_late_trim_of_an_owner_that_was_overtaken_harms_no_copy(
    trimmed: TrimmedCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = trimmed.cells
    first, second = await cells.node("a", **SETTINGS), await cells.node("b", **SETTINGS)
    late: list[int] = []

    async def hold_back(before: int) -> None:
        late.append(before)

    async with cells.owner(first) as engine:
        await engine.create_topic(Topic(topic="t"))
        await trimmed.fill(first, engine, 30)
        with monkeypatch.context() as patch:
            patch.setattr(first.journal, "trim", hold_back)
            assert await first.cell.trim()
        async with cells.owner(second) as engine:
            await engine.delete_topic("t")
            await engine.create_topic(Topic(topic="t"))
            await trimmed.fill(second, engine, 20)
            before = len(trimmed.stream.records)
            await first.journal.trim(*late)  # it has reached the store only now
            assert len(trimmed.stream.records) < before
            new = await cells.node("new", **SETTINGS)
            await caught_up(new, second.cell.applied)
            assert await answers(new.cell._engine) == await answers(engine)


def test_the_journal_is_needed_from_the_oldest_message_or_open_stage_on() -> None:
    positions = JournalPositions()
    for position in (10, 20, 30, 40):
        positions.note_point(ChainPoint(position=position))
    positions.note_batch("a/0", 0, 12, starts_segment=True)
    positions.note_batch("a/0", 100, 25, starts_segment=True)
    positions.note_batch("b/0", 7, 33, starts_segment=False)
    assert positions.needed({"a/0": 0, "b/0": 7}, 50) == 12
    positions.note_drop("a/0", 100)
    assert positions.needed({"a/0": 100, "b/0": 7}, 50) == 25
    assert positions.trim_point(25) == ChainPoint(position=20)
    positions.stages["s"] = 15
    assert positions.needed({"a/0": 100}, 50) == 15
    assert positions.needed({"unknown/0": 3}, 50) == 0
    assert positions.trim_point(0) is None
    positions.forget_topic("a")
    assert positions.begins.keys() == {"b/0"}


def test_of_many_points_some_older_ones_are_forgotten() -> None:
    positions = JournalPositions()
    for position in range(1, 5_000):
        positions.note_point(ChainPoint(position=position))
    assert len(positions.points) <= 400
    assert positions.points[-1].position == 4_999
    assert positions.points[0].position < 4_000


async def test_users_are_in_force_at_followers_after_a_takeover_and_in_copies_that_begin_with_a_snapshot(
    trimmed: TrimmedCell,
) -> None:
    cells = trimmed.cells
    owner, follower = await cells.node("a", **SETTINGS), await cells.node("b", **SETTINGS)
    known = {name: KnownUsers() for name in ("a", "b", "new")}
    for node, name in ((owner, "a"), (follower, "b")):
        watch_users(node.cell.metadata, known[name])
    async with cells.owner(owner) as engine:
        registry = UserRegistry(engine.metadata, known["a"])
        await registry.add("ops", [f"sha256:{hash_of('ops')}", "admin:*"])
        await registry.add("till", [f"sha256:{hash_of('till')}", "read:t"])
        await registry.limit_address("10.0.0.0/8", ["connections:3"])
        await caught_up(follower, owner.cell.applied)
        session = LoggedIn(known["b"].with_token("till"))
        ended: list[str] = []
        session.changed = lambda: ended.append("till")  # type: ignore[method-assign]
        known["b"].watch(session)
        await registry.rotate("till", hash_of("second"))
        await caught_up(follower, owner.cell.applied)
        assert ended == ["till"]
        await engine.create_topic(Topic(topic="t"))
        await trimmed.fill(owner, engine, 30)
        await caught_up(follower, owner.cell.applied)
        assert await owner.cell.trim()
        new = await cells.node("new", **SETTINGS)
        watch_users(new.cell.metadata, known["new"])
        assert not known["new"].enabled, "it has read nothing yet"
        await caught_up(new, owner.cell.applied)
        assert known["a"].known == known["b"].known == known["new"].known
        assert list(known["new"].known.users) == ["ops", "till"]
        assert known["new"].with_token("second").name == "till"
    async with cells.owner(follower) as engine:
        await UserRegistry(engine.metadata, known["b"]).remove("till")
        await caught_up(new, follower.cell.applied)
        assert list(known["b"].known.users) == list(known["new"].known.users) == ["ops"]
