"""Small durable facts in SQLite, read from memory.

Writes gather while a transaction is under way and go into the next one together, as publishes do.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import trio

from qb.core.wire.errors import BrokerError, DiskFull, Internal, ShuttingDown
from qb.storage.commit.completions import Completions
from qb.storage.commit.writer_threads import WriterThreads
from qb.storage.engine import MetadataEntry, VersionConflict
from qb.storage.files import PRIVATE_FILE

logger = logging.getLogger(__name__)
SOON = 0.1  # how long state that may lag waits for company

Changes = dict[str, MetadataEntry | None]  # None: removed


class MetadataWrite(msgspec.Struct, eq=False):
    """Entries to store (None: remove) in one step, and what became of it."""

    values: dict[str, bytes | None]
    expected: int | None = None  # the version that the only entry must have
    lags: bool = False  # no caller waits for it: a newer value may replace it, and a failure is tried again
    event: trio.Event | None = None
    done: Callable[[BrokerError | None], None] | None = None  # called with the outcome, in the event loop
    outcome: int | BaseException | None = None  # the new version of the last entry


class MetadataStore:
    """Implements qb.storage.engine.Metadata. All methods but write_now() belong to the event loop."""

    def __init__(self, path: Path, completions: Completions) -> None:
        """Open the database and read all of it. Blocks. Raises sqlite3.Error."""
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))
        self._completions = completions
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute("CREATE TABLE IF NOT EXISTS entries(key TEXT PRIMARY KEY, value TEXT, version INTEGER)")
        rows = self._database.execute("SELECT key, value, version FROM entries")
        self._entries = {key: MetadataEntry(msgspec.json.decode(value), version) for key, value, version in rows}
        self._writer = WriterThreads("metadata", 1, completions)
        self._pending: list[MetadataWrite] = []
        self._lagging: dict[
            str, MetadataWrite
        ] = {}  # the write in _pending that the next put_soon() of a key may change
        self._some_lag = trio.Event()
        self._writing = False
        self._stopped = False

    # Reading

    def get(self, key: str) -> MetadataEntry | None:
        return self._entries.get(key)

    def under(self, prefix: str) -> Mapping[str, MetadataEntry]:
        return {key: self._entries[key] for key in sorted(self._entries) if key.startswith(prefix)}

    # Writing

    async def put(self, key: str, value: Any, *, expected: int | None = None) -> int:
        return await self._store(MetadataWrite({key: msgspec.json.encode(value)}, expected))

    async def delete(self, *keys: str) -> None:
        await self._store(MetadataWrite(dict.fromkeys(keys)))

    async def flush(self) -> None:
        await self._store(MetadataWrite({}))

    def put_soon(self, key: str, value: Any | None) -> None:
        encoded = None if value is None else msgspec.json.encode(value)
        write = self._lagging.get(key)
        if write:
            write.values[key] = encoded
            return
        self._lagging[key] = write = MetadataWrite({key: encoded}, lags=True)
        self._pending.append(write)
        self._some_lag.set()

    def put_then(self, values: Mapping[str, Any], done: Callable[[BrokerError | None], None]) -> None:
        if self._stopped:
            self._completions.add(partial(done, ShuttingDown("the broker is about to exit")))
            return
        self._give(MetadataWrite({key: msgspec.json.encode(value) for key, value in values.items()}, done=done))

    async def _store(self, write: MetadataWrite) -> int:
        """Wait until a transaction has taken the write. Raises what kept it from doing so."""
        if self._stopped:
            raise ShuttingDown("the broker is about to exit")
        write.event = trio.Event()
        self._give(write)
        await write.event.wait()
        if isinstance(write.outcome, BaseException):
            raise write.outcome
        return write.outcome or 0

    def _give(self, write: MetadataWrite) -> None:
        """Let the next transaction have this write, and begin that as soon as possible."""
        for key in write.values:
            self._lagging.pop(key, None)  # so that a later put_soon() comes after this
        self._pending.append(write)
        self._start()

    def _start(self) -> None:
        """Hand everything that has gathered to the writer thread."""
        if self._writing or not self._pending:
            return
        writes, self._pending = self._pending, []
        self._lagging.clear()
        self._writing = True
        self._writer.submit(partial(self.write_now, writes), partial(self._written, writes))

    def _written(self, writes: Sequence[MetadataWrite], changes: Changes | BaseException) -> None:
        self._writing = False
        if isinstance(changes, BaseException):
            self._try_again(writes, changes)
        else:
            self.take_in(changes)
        for write in writes:
            if write.event is not None:
                write.event.set()
        if any(not write.lags for write in self._pending):
            self._start()
        elif self._pending:
            self._some_lag.set()
        for write in writes:
            if write.done is not None:
                error = write.outcome if isinstance(write.outcome, BrokerError) else None
                self._completions.add(partial(write.done, error))

    def _try_again(self, writes: Sequence[MetadataWrite], error: BaseException) -> None:
        logger.error("metadata could not be written: %s", error)
        for write in writes:
            write.outcome = as_refusal(error)
        newer = self._lagging.keys()
        self._pending[:0] = [write for write in writes if write.lags and not write.values.keys() & newer]

    def take_in(self, changes: Changes) -> None:
        """Make durable changes visible."""
        for key, entry in changes.items():
            if entry is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = entry

    # In the writer thread

    def write_now(self, writes: Sequence[MetadataWrite]) -> Changes:
        """Store in one transaction and return what changed. Blocks. Raises sqlite3.Error, and then changed nothing.

        A write whose expected version is not in force is left out, and its outcome says so.
        """
        changes: Changes = {}
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            for write in writes:
                self._apply(write, changes)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        return changes

    def _apply(self, write: MetadataWrite, changes: Changes) -> None:
        for key, value in write.values.items():
            row = self._database.execute("SELECT version FROM entries WHERE key = ?", (key,)).fetchone()
            version: int = row[0] if row else 0
            if write.expected is not None and version != write.expected:
                write.outcome = VersionConflict(f"{key} has version {version}, not {write.expected}")
            elif value is None:
                self._database.execute("DELETE FROM entries WHERE key = ?", (key,))
                changes[key] = None
            else:
                write.outcome = version + 1
                row = (key, value.decode(), version + 1)
                self._database.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", row)
                changes[key] = MetadataEntry(msgspec.json.decode(value), version + 1)

    # Running

    def start(self) -> None:
        """Start the writer thread."""
        self._writer.start()

    async def write_forever(self) -> None:
        """Hand over results, and give what may lag a transaction of its own if none comes along."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._writer.deliver_forever)
            while True:
                await self._some_lag.wait()
                self._some_lag = trio.Event()
                await trio.sleep(SOON)
                self._start()

    async def finish(self) -> None:
        """Write what was given, and take no more."""
        self._stopped = True
        for _ in range(2):  # what is under way, then what has gathered meanwhile
            while self._writer.busy:
                await self._writer.deliver()
            self._start()
        while self._writer.busy:
            await self._writer.deliver()

    def stop(self, patience: float) -> None:
        """End the writer thread; callers that still wait are answered."""
        self._writer.stop(patience)
        for write in self._pending:
            write.outcome = ShuttingDown("the broker is about to exit")
            if write.event is not None:
                write.event.set()
        self._pending.clear()

    def close(self) -> None:
        """Close the database."""
        self._writer.close()
        if not self._writer.is_stuck:
            self._database.close()


def as_refusal(error: BaseException) -> BrokerError:
    """Return the refusal that a caller gets for a transaction that failed."""
    full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    kind: Callable[[str], BrokerError] = DiskFull if full else Internal
    return kind(f"metadata could not be written: {error}")
