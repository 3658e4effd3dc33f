"""A broker that is killed anywhere in its takeover harms nothing: before and after each operation on the store."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
import trio

from qb.replication.journal.journal_store import Answered, Found, StoredRecord
from qb.replication.journal.memory_store import MemoryStore, MemoryStream
from qb.replication.journal.trio_timers import TrioTimers
from qb.storage.engine import Topic
from tests.support.cells import CellNode, Cells, answers
from tests.support.journal_world import check_fences
from tests.support.stores import Receipt, everything, give, store


class EndingStore(MemoryStore):
    """The way to the stream of a broker that is killed at its so-many-th operation."""

    def __init__(self, stream: MemoryStream, timers: TrioTimers, step: int, carried_out: bool) -> None:
        """`carried_out`: the operation itself still reaches the stream, and its answer is lost."""
        super().__init__(stream, timers)
        self._step, self._carried_out = step, carried_out
        self._counts = False
        self.ended = trio.Event()

    def begin(self) -> None:
        """The takeover begins: operations count."""
        self._counts = True

    def _is_due(self) -> bool:
        if self._counts and not self._step:
            self.ended.set()
        self._step -= self._counts
        return self.ended.is_set()

    def write(self, after: int, records: Sequence[bytes], answered: Answered) -> None:
        was_alive = not self.ended.is_set()
        if not self._is_due():
            super().write(after, records, answered)
        elif was_alive and self._carried_out:
            self._stream.write(after, records)

    def look(self, first: int, most: int, found: Found) -> None:
        if not self._is_due():
            super().look(first, most, found)

    async def follow(self, first: int, gather: float = 0.0) -> AsyncGenerator[Sequence[StoredRecord], None]:
        async with aclosing(super().follow(first, gather)) as following:
            async for records in following:
                if self._is_due():
                    await trio.sleep_forever()
                yield records


async def take_over_and_end(node: CellNode, way: EndingStore) -> bool:
    """Take over until the store's end, then kill it; returns whether that came before the takeover was done."""
    taken: list[object] = []

    async def take_over() -> None:
        taken.append(await node.cell.take_over())
        way.ended.set()

    way.begin()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_over)
        await way.ended.wait()
        nursery.cancel_scope.cancel()
    await node.kill()
    return not taken


async def killed_in_a_takeover(nursery: trio.Nursery, directory: Path, step: int, carried_out: bool) -> bool:
    """An owner works, the next one is killed at a step of its takeover, a third one takes over; was it so?"""
    timers, stream = TrioTimers(), MemoryStream()
    nursery.start_soon(timers.run)
    ways = iter([EndingStore(stream, timers, -1, False), way := EndingStore(stream, timers, step, carried_out)])
    cells = Cells(nursery, directory, lambda: next(ways, None) or MemoryStore(stream, timers), timers)
    first, second = await cells.node("a"), await cells.node("b")
    receipts: list[tuple[bytes, Receipt]] = []
    async with cells.owner(first) as engine:
        await engine.create_topic(Topic(topic="t"))
        log = engine.log("t", 0)
        await store(log, b"before")
        # more than its window: some are on their way when it is fenced
        receipts += [(b"%d" % number, give(log, [b"%d" % number])) for number in range(20)]
        was_killed = await take_over_and_end(second, way)
        third = await cells.node("c")
        async with cells.owner(third) as newest:
            await store(newest.log("t", 0), b"after")
            found = await everything(newest.log("t", 0))
            asked = await answers(newest)
            receipts.append((b"late", give(log, [b"late"])))
            with trio.fail_after(10):
                await first.cell.lost.wait()
        for body, receipt in receipts:
            assert not receipt.calls or body in found, f"{body!r} was acked"
    check_fences(stream)
    await first.kill()
    again = await cells.node("b")
    async with cells.owner(again) as engine:
        assert await answers(engine) == asked
    for node in (third, again):
        await node.kill()
    return was_killed


@pytest.mark.parametrize("carried_out", [False, True])
async def test_a_takeover_may_be_killed_at_every_step(nursery: trio.Nursery, tmp_path: Path, carried_out: bool) -> None:
    for step in itertools.count():
        if not await killed_in_a_takeover(nursery, tmp_path / str(step), step, carried_out):
            break
    assert step >= 4, "it reads, fences, reads the fence back, and applies it"
