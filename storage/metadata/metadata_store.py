"""Metadata as the broker uses it: read from memory, written in groups that share a record and its sync."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import trio

from qb.core.wire.errors import BrokerError, DiskFull, Internal, ShuttingDown
from qb.storage.commit.commit_step import CommitSteps
from qb.storage.commit.committer import Committer
from qb.storage.commit.completions import Completions
from qb.storage.commit.sync_pace import SyncPace
from qb.storage.commit.writer_threads import result_of
from qb.storage.engine import MetadataEntry, VersionConflict
from qb.storage.files import NO_ROOM
from qb.storage.metadata.metadata_log import MetadataLog
from qb.storage.metadata.metadata_records import (
    Entries,
    StoredValue,
    apply_changes,
    decode_changes,
    encode_changes,
)

logger = logging.getLogger(__name__)
SOON = 0.1  # how long state that may lag waits for company

Changes = dict[str, StoredValue | None]  # None: removed
Changed = Callable[[Mapping[str, Any | None]], None]


class MetadataWrite(msgspec.Struct, eq=False):
    """Entries to store (None: remove) in one step, and what became of it."""

    values: dict[str, bytes | None]
    expected: int | None = None  # the version that the only entry must have
    lags: bool = False  # no caller waits for it: a newer value may replace it, and a failure is tried again
    needs_record: bool = False  # even if nothing changes
    event: trio.Event | None = None
    done: Callable[[BrokerError | None], None] | None = None  # called with the outcome, in the event loop
    outcome: int | BaseException | None = None  # the new version of the last entry


class MetadataCommit(NamedTuple):
    """What the metadata hands to a committer. It is the only write of the metadata meanwhile."""

    log: MetadataLog
    body: bytes
    changes: Changes  # the same, as they are applied
    entries: Entries  # the state before them

    def carry_out(self) -> float:
        """Write and sync the record; returns how many seconds that took. Blocks. Raises OSError."""
        return self.log.commit(self.body, self.entries)


class MetadataStore:
    """Implements qb.storage.engine.Metadata. All methods belong to the event loop, and to the start before it runs."""

    def __init__(
        self,
        log: MetadataLog,
        entries: Entries,
        committer: Committer,
        completions: Completions,
        pace: SyncPace,
        commit_steps: CommitSteps | None = None,
    ) -> None:
        self._log = log
        self._entries = entries  # what is durable; never changed while a commit is under way
        self._committer, self._completions, self._pace = committer, completions, pace
        self._commit_steps = commit_steps or CommitSteps(completions, pace)
        self._pending: list[MetadataWrite] = []
        self._lagging: dict[str, MetadataWrite] = {}  # those in _pending that the next put_soon() of a key may change
        self._wanted, self._some_lag = trio.Event(), trio.Event()
        self._writing: Sequence[MetadataWrite] = ()  # what the record under way holds
        self._watchers: list[tuple[str, Changed]] = []
        self._stopped = False

    # Reading

    def get(self, key: str) -> MetadataEntry | None:
        stored = self._entries.get(key)
        return None if stored is None else _decoded(stored)

    def under(self, prefix: str) -> Mapping[str, MetadataEntry]:
        keys = sorted([key for key in self._entries if key.startswith(prefix)])
        return {key: _decoded(self._entries[key]) for key in keys}

    def keys(self) -> list[str]:
        return list(self._entries)

    def entries(self) -> Entries:
        """Return all that is durable, as it is stored."""
        return dict(self._entries)

    def watch(self, prefix: str, changed: Changed) -> None:
        self._watchers.append((prefix, changed))
        changed({key: entry.value for key, entry in self.under(prefix).items()})

    def _apply(self, changes: Changes) -> None:
        """Have what is durable now be in force."""
        apply_changes(self._entries, changes)
        for prefix, changed in self._watchers:
            if found := {key: value for key, value in changes.items() if key.startswith(prefix)}:
                changed({key: None if value is None else _decoded(value).value for key, value in found.items()})

    # Writing

    async def put(self, key: str, value: Any, *, expected: int | None = None) -> int:
        return await self._store(MetadataWrite({key: msgspec.json.encode(value)}, expected))

    async def delete(self, *keys: str) -> None:
        await self._store(MetadataWrite(dict.fromkeys(keys)))

    async def put_all(self, values: Mapping[str, Any | None]) -> None:
        encoded = {key: None if value is None else msgspec.json.encode(value) for key, value in values.items()}
        await self._store(MetadataWrite(encoded))

    async def flush(self) -> None:
        await self._store(MetadataWrite({}))

    async def write_record(self) -> None:
        """Return when a record is durable that was begun after the call, if need be an empty one."""
        await self._store(MetadataWrite({}, needs_record=True))

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
        self._add(MetadataWrite({key: msgspec.json.encode(value) for key, value in values.items()}, done=done))

    async def _store(self, write: MetadataWrite) -> int:
        """Wait until a record has taken the write. Raises what kept it from doing so."""
        if self._stopped:
            raise ShuttingDown("the broker is about to exit")
        write.event = trio.Event()
        self._add(write)
        await write.event.wait()
        if isinstance(write.outcome, BaseException):
            raise write.outcome
        return write.outcome or 0

    def _add(self, write: MetadataWrite) -> None:
        """Let the next record have this write.

        It begins at the end of the step that is open, or when the tasks that can run now have had their turn.
        """
        for key in write.values:
            self._lagging.pop(key, None)  # so that a later put_soon() comes after this
        self._pending.append(write)
        if self._commit_steps.is_open:
            self._commit_steps.commit(self)
        else:
            self._wanted.set()

    # Committing

    def write_now(self, values: dict[str, bytes | None]) -> None:
        """Store durably, before the event loop runs. Blocks. Raises OSError."""
        changes = decide(self._entries, [MetadataWrite(values)])
        if changes:
            self._log.commit(encode_changes(changes.items()), self._entries)
            self._apply(changes)

    def commit(self, *, alone: bool) -> bool:
        """Begin to write what is pending, at the end of a step."""
        self._commit()
        return False

    def _commit(self) -> None:
        """Make one record of all that is pending, and begin to write it."""
        if self._writing or not self._pending:
            return
        writes, self._pending = self._pending, []
        self._lagging.clear()
        self._writing = writes
        try:
            changes = decide(self._entries, writes)
            body = encode_changes(changes.items())
        except Exception as fault:  # one of ours: else nothing would be written ever again
            self._committed(writes, {}, fault)
            return
        finished = partial(self._committed, writes, changes)
        if not changes and not any(write.needs_record for write in writes):
            finished(0.0)  # all that was given before is durable
            return
        commit = MetadataCommit(self._log, body, changes, self._entries)
        wanted = len(writes) - sum([write.lags for write in writes])
        if wanted < 2 and self._committer.may_hold_loop and self._log.is_short(body):
            finished(result_of(commit.carry_out))
        else:
            self._committer.submit(commit, finished)

    def replay(self, body: bytes) -> tuple[MetadataCommit, Callable[[Any], None]]:
        """Return the work that brings changes here which another broker has made durable, and what takes its result.

        No other commit of the metadata may be under way. Raises BadRecord.
        """
        changes: Changes = dict(decode_changes(body))

        def finished(_: object) -> None:
            self._apply(changes)

        return MetadataCommit(self._log, body, changes, self._entries), finished

    def _committed(self, writes: Sequence[MetadataWrite], changes: Changes, result: float | BaseException) -> None:
        """Make a durable record visible, or take it back, and answer its writers."""
        if self._writing is not writes:
            return  # they were answered already
        self._writing = ()
        if isinstance(result, BaseException):
            self._take_back(writes, result)
        else:
            self._apply_or_refuse(writes, changes)
            if result:
                self._pace.note(result)
        if any(not write.lags for write in self._pending):
            self._wanted.set()
        elif self._pending:
            self._some_lag.set()
        self._answer(writes)

    def _apply_or_refuse(self, writes: Sequence[MetadataWrite], changes: Changes) -> None:
        """Have what is durable now be in force. A fault of ours leaves no writer without an answer."""
        try:
            self._apply(changes)
        except Exception as fault:
            refusal = _refusal(fault, self._log)
            logger.exception("%s", refusal)
            for write in writes:
                write.outcome = refusal

    def _answer(self, writes: Sequence[MetadataWrite]) -> None:
        for write in writes:
            if write.event is not None:
                write.event.set()
            if write.done is not None:
                error = write.outcome if isinstance(write.outcome, BrokerError) else None
                self._completions.add(partial(write.done, error))

    def _take_back(self, writes: Sequence[MetadataWrite], error: BaseException) -> None:
        """Refuse these; what no caller waits for is tried again, unless there is a newer value."""
        refusal = _refusal(error, self._log)
        logger.error("%s", refusal, exc_info=None if isinstance(error, OSError) else error)
        for write in writes:
            write.outcome = refusal
        newer = self._lagging.keys()
        again = [write for write in writes if write.lags and not write.values.keys() & newer]
        self._pending[:0] = again

    # Running

    async def run(self) -> None:
        """Commit what is wanted, and give what may lag a record of its own if none comes along."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._commit_what_lags)
            while True:
                await self._wanted.wait()
                self._wanted = trio.Event()
                self._commit_in_a_step()

    async def _commit_what_lags(self) -> None:
        while True:
            await self._some_lag.wait()
            self._some_lag = trio.Event()
            await trio.sleep(SOON)
            self._commit_in_a_step()

    def _commit_in_a_step(self) -> None:
        with self._completions:
            self._commit()

    async def finish(self) -> None:
        """Write what was given, and take no more."""
        self._stopped = True
        for _ in range(2):  # what is under way, then what has gathered meanwhile
            while self._writing:
                await self._committer.deliver()
            self._commit_in_a_step()
        while self._writing:
            await self._committer.deliver()

    def abandon(self, error: BrokerError) -> None:
        """Take no more, and answer also for what is being written: its result will not be waited for."""
        self._stopped = True
        abandoned, self._writing, self._pending = [*self._writing, *self._pending], (), []
        for write in abandoned:
            write.outcome = error
        self._answer(abandoned)


def decide(entries: Entries, writes: Sequence[MetadataWrite]) -> Changes:
    """Return what the writes change, one after another, and note the outcome of each.

    A write whose expected version is not in force changes nothing, and its outcome says so.
    """
    changes: Changes = {}
    for write in writes:
        for key, value in write.values.items():
            known = changes[key] if key in changes else entries.get(key)
            version = known.version if known else 0
            if write.expected is not None and version != write.expected:
                write.outcome = VersionConflict(f"{key} has version {version}, not {write.expected}")
            elif value is not None:
                write.outcome = version + 1
                changes[key] = StoredValue(value, version + 1)
            elif known:
                changes[key] = None
    return changes


def _decoded(stored: StoredValue) -> MetadataEntry:
    return MetadataEntry(msgspec.json.decode(stored.data), stored.version)


def _refusal(error: BaseException, log: MetadataLog) -> BrokerError:
    """Return what the callers get for a record that could not be written."""
    if not isinstance(error, OSError):
        return Internal(f"metadata could not be written: {error!r}")
    kind = DiskFull if error.errno in NO_ROOM else Internal
    return kind(f"metadata could not be written to {log.path}: {error.strerror}")
