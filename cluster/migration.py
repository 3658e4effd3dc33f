"""Migrating a data directory into a journal on NATS, and back. No broker of the cell runs meanwhile."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import trio

from qb.cluster.nats_access import nats_client
from qb.core.settings import Settings
from qb.replication.jetstream.jetstream_store import JetStreamStore
from qb.replication.journal.journal import Journal
from qb.replication.journal.journal_store import JournalError
from qb.replication.journal.trio_timers import TrioTimers
from qb.replication.lease.lease_keeper import LeaseKeeper
from qb.replication.lease.lease_store import LeaseStore
from qb.replication.migration.copy_to_local import copy_to_local
from qb.replication.migration.directory_payloads import StoppedDirectory, was_stopped
from qb.replication.migration.journal_filling import JournalFilling
from qb.replication.nats.nats_protocol import NatsError
from qb.storage.files import CannotOpen
from qb.storage.local_engine import LocalEngine

NAME = "qb migrate"
RELEASE_WITHIN = 2.0  # seconds


class Migrated(NamedTuple):
    """What a migration has brought."""

    topics: int
    messages: int


class CellInUse(JournalError):
    """A broker owns the cell."""


async def migrate_to_journal(settings: Settings) -> Migrated:
    """Bring the data directory that the settings name into the empty journal that they name.

    Raises CannotOpen, JournalError, NatsError, trio.TooSlowError, OSError: then nothing of it counts.
    """
    data_dir = Path(settings.storage.data_dir)
    if not await trio.to_thread.run_sync(was_stopped, data_dir):
        engine = await trio.to_thread.run_sync(LocalEngine.open, settings.storage)
        try:
            await engine.end()
        finally:
            engine.close()
    directory = await trio.to_thread.run_sync(StoppedDirectory, data_dir)
    try:
        async with _cell(settings) as cell:
            filling = JournalFilling(cell.journal, f"{data_dir} on {socket.gethostname()}")
            await filling.check()
            async with cell.leased() as hold:
                hold(await filling.begin(directory.stages))
                await filling.fill(directory.payloads(filling.stages))
    finally:
        directory.close()
    return Migrated(directory.topics, directory.messages)


async def migrate_to_directory(settings: Settings) -> Migrated:
    """Bring what that journal holds into that data directory, a new one. Raises as migrate_to_journal()."""
    async with _cell(settings) as cell, cell.leased() as hold:
        source = f"{cell.store.identity} at {', '.join(settings.cluster.nats_servers)}"
        found = await copy_to_local(settings.storage, cell.journal, cell.store.identity, source, own=hold)
    return Migrated(found.topics, found.messages)


class _Cell:
    """The journal and the lease of a cell, for as long as a migration takes."""

    def __init__(self, store: JetStreamStore, journal: Journal, keeper: LeaseKeeper, patience: float) -> None:
        self.store, self.journal = store, journal
        self._keeper, self._patience = keeper, patience

    @asynccontextmanager
    async def leased(self) -> AsyncIterator[Callable[[int], None]]:
        """Hold the lease inside the block, from the call with our epoch on. Raises CellInUse."""
        with trio.move_on_after(self._patience) as limit:
            await self._keeper.claim()
        if limit.cancelled_caught:
            raise CellInUse("a broker owns the cell: stop all brokers of it before a migration")
        try:
            async with trio.open_nursery() as nursery:
                yield lambda epoch: nursery.start_soon(self._keeper.hold, epoch)
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True), suppress(NatsError), trio.move_on_after(RELEASE_WITHIN):
                await self._keeper.release()


@asynccontextmanager
async def _cell(settings: Settings) -> AsyncIterator[_Cell]:
    cluster = settings.cluster
    client, timers = nats_client(cluster, NAME), TrioTimers()
    store, leases = JetStreamStore(client, timers, cluster.cell), LeaseStore(client, cluster.cell)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        nursery.start_soon(timers.run)
        try:
            await store.open(replicas=cluster.nats_replicas)
            await leases.open(replicas=cluster.nats_replicas)
        except trio.TooSlowError:
            raise CannotOpen(f"NATS does not answer: {', '.join(cluster.nats_servers)}") from None
        keeper = LeaseKeeper(leases, NAME, ttl=cluster.lease_ttl)
        yield _Cell(store, Journal(store, timers, NAME), keeper, 1.5 * cluster.lease_ttl)
        nursery.cancel_scope.cancel()
