"""Brokers of several versions on one journal: what older ones wrote is read, what newer ones wrote is not ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from qb.replication.engine.payloads import UnknownPayload
from qb.replication.journal.journal_records import JournalRecord, JournalRecordKind, encode
from qb.replication.journal.journal_store import JournalError, JournalNewer
from qb.replication.journal.memory_store import MemoryStore, MemoryStream
from qb.replication.journal.trio_timers import TrioTimers
from tests.replication.stored_journal import plain, read_journal
from tests.support.cells import Cells, answers, caught_up, proved
from tests.support.journal_world import of_a_version
from tests.support.stores import store

JOURNALS = sorted(Path(__file__).parent.glob("journal-*.bin"))


def cells_on(stream: MemoryStream, nursery: trio.Nursery, directory: Path) -> Cells:
    timers = TrioTimers()
    nursery.start_soon(timers.run)
    return Cells(nursery, directory, lambda: MemoryStore(stream, timers), timers)


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
async def test_the_journal_of_an_older_version_is_followed_and_owned(
    path: Path, trimmed: bool, nursery: trio.Nursery, tmp_path: Path
) -> None:
    stored = read_journal(path)
    assert 1 < stored.kept < max(stored.records)
    stream = stored.stream(stored.kept if trimmed else 1)
    cells = cells_on(stream, nursery, tmp_path)
    follower, owner = await cells.node("a"), await cells.node("b")
    await caught_up(follower, stream.last)
    assert plain(await answers(follower.cell._engine)) == stored.asked
    async with cells.owner(owner) as engine:
        assert plain(await answers(engine)) == stored.asked
        await store(engine.log("t", 0), b"goes on")
        await caught_up(follower, owner.cell.applied)
        assert await answers(follower.cell._engine) == await answers(engine)
    for node in (follower, owner):
        await node.cell.release()
        await node.kill()
        proved(node.directory)


def newer_record(epoch: int, writer: int, previous: int) -> bytes:
    return of_a_version(2, 2, JournalRecord(JournalRecordKind.WHOLE, epoch, writer, previous, b"of tomorrow"))


def newer_payload(epoch: int, writer: int, previous: int) -> bytes:
    return encode(JournalRecord(JournalRecordKind.WHOLE, epoch, writer, previous, b"\x09\x02of tomorrow"))


@pytest.mark.parametrize(
    ("newer", "refusal"), [(newer_record, JournalNewer), (newer_payload, UnknownPayload)], ids=["record", "payload"]
)
async def test_a_broker_that_does_not_understand_the_journal_neither_follows_nor_writes(
    newer: object, refusal: type[JournalError], nursery: trio.Nursery, tmp_path: Path
) -> None:
    stored = read_journal(JOURNALS[-1])
    stream = stored.stream()
    cells = cells_on(stream, nursery, tmp_path)
    node = await cells.node("a")
    await caught_up(node, stream.last)
    point = node.cell.point
    stream.add(newer(point.epoch, point.writer, point.valid))  # type: ignore[operator]
    with pytest.raises(refusal, match=r"newer|later version"):
        await node.cell.follow()
    with pytest.raises(refusal):
        await node.cell.take_over()
    assert stream.last == point.position + 1, "nothing was written behind it"
    assert plain(await answers(node.cell._engine)) == stored.asked
