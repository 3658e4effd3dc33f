"""Cells on one journal: owners and followers in directories of their own, and what clients can ask of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from qb.core.settings import StorageSettings
from qb.replication.engine.replicated_cell import ReplicatedCell
from qb.replication.journal.journal import Journal
from qb.replication.journal.journal_store import JournalStore, Timers
from qb.storage.engine import Engine
from qb.storage.verification import verify
from tests.support.stores import Clock, messages
from tests.support.waiting import until

IDENTITY = "the stream of a test"


class CellNode:
    """One broker's part of a cell, without doors."""

    def __init__(self, cell: ReplicatedCell, journal: Journal, directory: Path) -> None:
        self.cell, self.journal, self.directory = cell, journal, directory
        self.scope = trio.CancelScope()
        self.engine: Engine | None = None
        self.owning = trio.CancelScope()
        self.ended = trio.Event()

    async def live(self, task_status: trio.TaskStatus[None]) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.cell.run)
                task_status.started()
        self.ended.set()

    async def follow_until(self, done: Callable[[], bool]) -> None:
        """Follow until something holds."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.cell.follow)
            await until(done)
            nursery.cancel_scope.cancel()

    async def kill(self) -> None:
        """End without another word: nothing is written any more."""
        self.scope.cancel()
        await self.ended.wait()
        self.cell.close()


class Cells:
    """Nodes that share a journal."""

    def __init__(self, nursery: trio.Nursery, directory: Path, new_store: Callable[[], JournalStore], timers: Timers):
        self._nursery, self._directory, self._new_store, self._timers = nursery, directory, new_store, timers
        self.clock = Clock()

    async def node(self, name: str, *, identity: str = IDENTITY, **settings: Any) -> CellNode:
        """Open a directory as a copy, and run it."""
        journal = Journal(self._new_store(), self._timers, name, window=8)
        directory = self._directory / name
        wanted = StorageSettings(data_dir=str(directory), **settings)
        open_cell = lambda: ReplicatedCell.open(wanted, journal, identity, clock=self.clock)  # noqa: E731
        node = CellNode(await trio.to_thread.run_sync(open_cell), journal, directory)
        await self._nursery.start(node.live)
        return node

    @asynccontextmanager
    async def owner(self, node: CellNode) -> AsyncIterator[Engine]:
        """Let a node own the cell inside the block; at its end everything that was taken is committed."""
        engine = await node.cell.take_over()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            yield engine
            nursery.cancel_scope.cancel()


async def caught_up(node: CellNode, position: int) -> None:
    """Follow up to a position, and until all of that is on this disk."""
    await node.follow_until(lambda: node.cell.applied >= position)
    await node.cell._engine.queue.drained()


async def answers(engine: Any) -> dict[str, Any]:
    """Return all that clients can ask of an engine: topics, messages, metadata, stages, producers."""
    logs = {}
    for name, topic in sorted(engine.topics().items()):
        for partition in range(topic.partitions):
            log = engine.log(name, partition)
            found: list[Any] = []
            offset = log.first_offset
            while offset < log.end_offset:
                chunk = await log.read(offset, 10_000)
                found += messages(chunk)
                offset = chunk.next_offset
            logs[name, partition] = (log.first_offset, log.end_offset, found, list(log.ranges()))
    stages = {
        stage_id: (stage.transaction, stage.number, stage.messages, dict(stage.counts), await stage.read(0, 1 << 20))
        for stage_id, stage in sorted(engine.stages().items())
    }
    metadata = {key: (entry.value, entry.version) for key, entry in engine.metadata.under("").items()}
    return {"topics": msgspec.to_builtins(dict(engine.topics())), "logs": logs, "stages": stages, "metadata": metadata}


def proved(directory: Path) -> None:
    """The directory is whole."""
    report = verify(directory)
    assert report.findings == [], report.findings
