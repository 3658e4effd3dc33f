"""A local data directory that follows a cell's journal, and may become its owner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import msgspec
import trio

from qb.core.wire.clock import now_ms
from qb.replication.engine.apply_queue import CopyFailed
from qb.replication.engine.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from qb.replication.engine.checkpoint_files import CapturedEnds, DoomedFiles, LookAtMetadata, MetadataEnd
from qb.replication.engine.follower import Follower
from qb.replication.engine.journal_positions import JournalPositions
from qb.replication.engine.replicated_engine import ReplicatedEngine
from qb.replication.engine.snapshots import SnapshotSearch, SnapshotWork, TrimSnapshot
from qb.replication.journal.journal import Journal
from qb.replication.journal.journal_store import Fenced, JournalError, JournalGap, RecordsLost
from qb.replication.journal.record_chain import ChainPoint
from qb.storage.cut_back import ANEW, CopyEnds, cut_back, wipe
from qb.storage.data_directory import prepare
from qb.storage.directory_lock import DirectoryLock
from qb.storage.engine import Engine, Metadata
from qb.storage.files import CannotOpen, SyncFailed, make_directory, replace_durably
from qb.storage.local_engine import EngineSettings
from qb.storage.log.segment import Segment
from qb.storage.metadata.metadata_files import DIRECTORY, read_newest
from qb.storage.metadata.metadata_records import encode_changes

logger = logging.getLogger(__name__)
CHECKPOINT_EVERY = 5.0  # seconds
TRIM_EVERY = 30.0  # seconds
TRIM_FROM = 10_000  # records that a trim must remove to be worth a snapshot
LOOK_EVERY = 1.0  # seconds between two looks of an owner for a fence of another one
GATHER = 0.05  # seconds of records that a follower applies together, so that it is not woken for each
LOST = "journal-lost"  # a file: no start goes on while it is there
MIGRATION = "migration"  # the key of the metadata that says that a migration into the journal is under way


class MigrationUnfinished(JournalError):
    """A migration into this journal was interrupted."""

    def __init__(self) -> None:
        super().__init__(
            "the journal holds a migration that is not finished, so no broker may own it: run qb migrate again"
        )


class ReplicatedCell:
    """A copy of a cell on this disk. Belongs to the event loop; open() blocks.

    Example:
        >>> cell = await trio.to_thread.run_sync(ReplicatedCell.open, settings, journal, "QB_main of cluster C1")
        >>> nursery.start_soon(cell.run)
        >>> with trio.move_on_after(60):
        ...     await cell.follow()
        >>> engine = await cell.take_over()
    """

    def __init__(self, journal: Journal, engine: ReplicatedEngine, checkpoint: Checkpoint) -> None:
        """Use open()."""
        self._journal, self._engine = journal, engine
        self._follower = Follower(engine, checkpoint.point, checkpoint.skip_to, checkpoint.ranges)
        self._trimmed = 0  # what is before this position was trimmed by us
        self._stored = checkpoint  # the newest one on the disk
        self._storing = trio.Lock()
        self._is_owner = False

    @classmethod
    def open(
        cls, settings: EngineSettings, journal: Journal, identity: str, *, clock: Callable[[], int] = now_ms
    ) -> ReplicatedCell:
        """Lock the directory, and cut its files back to the checkpoint. Blocks.

        Args:
            identity: Of the stream that the journal is in; a directory is the copy of one stream only.

        Raises:
            RecordsLost: It was noted that the journal has lost records.
            CannotOpen: It is in use, damaged, a copy of another stream, or no copy at all.
        """
        data_dir = Path(settings.data_dir)
        try:
            make_directory(data_dir)
            if (data_dir / LOST).exists():
                raise RecordsLost((data_dir / LOST).read_text())
            lock = DirectoryLock(data_dir)
            try:
                checkpoint = _begun(data_dir, identity)
                ends = _cut_back(data_dir, checkpoint)
                engine = ReplicatedEngine(settings, clock, lock, ends, checkpoint.positions)
            except BaseException:
                lock.close()
                raise
            engine.recover()
        except (CannotOpen, RecordsLost):
            raise
        except OSError as error:
            raise CannotOpen(f"{data_dir} cannot be opened: {error}") from error
        engine.applied = checkpoint.point.position
        return cls(journal, engine, checkpoint)

    # What is known

    @property
    def lost(self) -> trio.Event:
        """Set when the tenure is over (fenced, journal lost, disk failed): this process must behave as killed."""
        return self._engine.committer.lost

    @property
    def why(self) -> BaseException | None:
        """Why it is."""
        return self._engine.committer.failure

    @property
    def point(self) -> ChainPoint:
        """How far the copy has come."""
        return self._journal.point if self._is_owner else self._follower.point

    @property
    def applied(self) -> int:
        """The position in the journal up to which the copy has everything."""
        return self.point.position

    @property
    def epoch(self) -> int:
        """The newest epoch that was read; of an owner its own."""
        return self.point.epoch

    @property
    def owner(self) -> str:
        """Who has written the newest fence, as far as it was read since the start."""
        return self._follower.owner

    @property
    def metadata(self) -> Metadata:
        """What the copy says of everything that is no message; only its owner may change it."""
        return self._engine.metadata

    def segments(self) -> list[tuple[Segment, int]]:
        """Return the files with messages of the copy, and how far each goes."""
        return self._engine.segments()

    async def chains(self, point: ChainPoint, last: int) -> dict[int, int]:
        """Return the checksum of the list of all valid records at each entry behind a point, up to a position."""
        found = {point.position: point.chain}
        while point.position < last and (entries := await self._journal.read(point)):
            found |= {entry.point.position: entry.point.chain for entry in entries}
            point = entries[-1].point
        return found

    # Roles

    async def run(self) -> None:
        """Run the threads of the copy and its checkpoints, until cancelled; it outlives follow() and a tenure."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._engine.keep_copy)
            nursery.start_soon(self._store_checkpoints)
            nursery.start_soon(self._notice_failures)
            nursery.start_soon(self._look_for_fences)
            nursery.start_soon(self._trim_forever)

    async def follow(self) -> None:
        """Apply entries as they come, until cancelled.

        Raises RecordsLost, JournalGap, CopyDiffers (the copy must be taken anew), and OSError if this disk fails.
        """
        queue = self._engine.queue
        error: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_when_broken, nursery.cancel_scope)
            try:
                await self._apply_until(lambda: False, GATHER)
            except (JournalError, OSError) as failed:
                error = failed
            nursery.cancel_scope.cancel()
        if error or queue.failure:
            raise error or queue.failure  # type: ignore[misc]

    async def _end_when_broken(self, scope: trio.CancelScope) -> None:
        await self._engine.queue.broken.wait()
        scope.cancel()

    async def _apply_until(self, done: Callable[[], bool], gather: float = 0.0) -> None:
        """Apply what comes until something holds, or this disk fails."""
        await self._begin_behind_a_trim()
        async with aclosing(self._journal.follow(self._follower.point, gather)) as following:
            async for entries in following:
                await self._follower.apply(entries)
                if done() or self._engine.queue.failure is not None:
                    return

    async def take_over(self) -> Engine:
        """Become the owner: read to the end, fence all others, read back and apply. Nothing else may follow meanwhile.

        Raises MigrationUnfinished, and as Journal.take_over() and follow().
        """
        await self._catch_up()
        await self._check_migration()
        taken = await self._journal.take_over(self._follower.point)
        if self._follower.epoch < taken.tenure.epoch:
            await self._apply_until(lambda: self._follower.epoch >= taken.tenure.epoch)
        await self._check_migration()
        self._engine.committer.own(self._journal)
        self._is_owner = True
        return self._engine

    async def _check_migration(self) -> None:
        """Raises MigrationUnfinished, or what has failed on this disk, by all that was read."""
        await self._engine.queue.drained()
        if self._engine.queue.failure is not None:
            raise self._engine.queue.failure
        if self._engine.metadata.get(MIGRATION) is not None:
            raise MigrationUnfinished

    async def _catch_up(self) -> None:
        await self._begin_behind_a_trim()
        while entries := await self._journal.read(self._follower.point):
            await self._follower.apply(entries)

    async def _begin_behind_a_trim(self) -> None:
        """If the journal was trimmed behind our point, begin with its snapshot.

        Raises JournalGap if this copy has something already: a start takes it anew then.
        """
        try:
            await self._journal.read(self._follower.point, 1)
        except JournalGap:
            snapshot = await self._find_snapshot()
            if self._follower.point.position:
                await self._begin_anew()
                raise
            await self._follower.begin(snapshot)

    async def _begin_anew(self) -> None:
        """Let the next start take the copy anew."""
        async with self._storing:
            self._engine.queue.end(CopyFailed("the copy is behind what was trimmed, and is taken anew"))
            anew = Checkpoint(identity=self._stored.identity)
            await trio.to_thread.run_sync(write_checkpoint, self._engine.data_dir, anew)

    async def _find_snapshot(self) -> TrimSnapshot:
        search = SnapshotSearch()
        async with aclosing(self._journal.follow_stored()) as following:
            async for records in following:
                if found := search.take(records):
                    return found
        raise AssertionError("it follows for ever")

    async def _trim_forever(self) -> None:
        while True:
            await trio.sleep(TRIM_EVERY)
            if self._is_owner and not self.lost.is_set():
                try:
                    await self.trim(TRIM_FROM)
                except (JournalError, OSError, trio.TooSlowError) as error:
                    logger.warning("the journal could not be trimmed, and that is tried again: %s", error)

    async def trim(self, least: int = 1) -> int:
        """As the owner, let the journal forget what no reader needs, if that is at least so many records.

        A snapshot is committed first. Returns the position before which everything is gone; 0: nothing new.
        """
        trim = self._engine.trim_point(self.applied)
        if trim is None or trim.position - self._trimmed < least:
            return 0
        head, entries = self._engine.snapshot(trim)
        body = await trio.to_thread.run_sync(encode_changes, entries.items())
        committed = trio.Event()
        self._engine.committer.submit(SnapshotWork(head, body), lambda result: committed.set())
        await committed.wait()
        await self._journal.trim(trim.position)
        self._trimmed = trim.position
        self._engine.positions.note_trim(trim.position)
        return trim.position

    async def release(self) -> None:
        """End a tenure or a life as a follower in good order: all that was taken is applied, a checkpoint is written.

        The engine's run() has returned before. Raises OSError.
        """
        await self._engine.queue.drained()
        if not self.lost.is_set():
            await self._checkpoint()
            await trio.to_thread.run_sync(self._engine.write_indexes)

    def abandon(self, error: BaseException) -> None:
        """End a tenure at once, as a kill does, and let go of all that wait for an outcome in this process.

        What they are given says nothing: their peers must be gone already.
        """
        self._engine.committer.lose(error)
        self._engine.abandon()

    async def preserve(self) -> None:
        """Note how far a follower's copy goes, from which a journal that has lost records is restored. Raises OSError.

        Of an owner the last checkpoint stays: what was committed behind the loss of its tenure is not applied.
        """
        if self._is_owner:
            return
        await self._engine.queue.drained()
        await self._checkpoint()

    def note_lost(self, why: str) -> None:
        """Have every later start of this directory refused: the journal has lost what this copy may still have."""
        replace_durably(self._engine.data_dir / LOST, why.encode())

    def close(self) -> None:
        """Release files and the lock. Nothing else may be called after."""
        self._engine.close_copy()

    # The end of a tenure

    async def _notice_failures(self) -> None:
        await self._engine.queue.broken.wait()
        if self._is_owner:
            assert self._engine.queue.failure is not None
            self._engine.committer.lose(self._engine.queue.failure)

    async def _look_for_fences(self) -> None:
        """An owner that has nothing to write finds out too that another one has taken over."""
        while True:
            await trio.sleep(LOOK_EVERY)
            if self._is_owner and not self.lost.is_set():
                point = self._journal.point
                try:
                    entries = await self._journal.read(point, 2)
                except JournalError as error:
                    self._engine.committer.lose(error)
                    return
                if entries and entries[-1].epoch > point.epoch and entries[-1].epoch > self._journal.point.epoch:
                    self._engine.committer.lose(Fenced(entries[-1].epoch))

    # Checkpoints

    async def _store_checkpoints(self) -> None:
        while True:
            await trio.sleep(CHECKPOINT_EVERY)
            try:
                await self._checkpoint()
            except SyncFailed as error:
                self._engine.queue.end(error)
            except OSError as error:
                logger.warning("the checkpoint could not be written, and is tried again: %s", error)

    async def _checkpoint(self) -> None:
        """Sync what has changed and note how far it goes. Raises OSError, SyncFailed."""
        async with self._storing:
            point, queue, engine = self.point, self._engine.queue, self._engine
            if point.position == self._stored.point.position or queue.failure is not None:
                return
            ranges = dict(self._follower.ranges)
            captured: list[tuple[CapturedEnds, DoomedFiles]] = []
            positions: list[JournalPositions] = []
            done = trio.Event()

            def look(metadata: MetadataEnd) -> None:
                captured.append((engine.capture(metadata), engine.checkpoint_files.doomed(engine.metadata_log)))
                engine.positions.note_point(point)
                positions.append(msgspec.convert(msgspec.to_builtins(engine.positions), JournalPositions))
                done.set()

            queue.put(LookAtMetadata(engine.metadata_log), look)
            if not await queue.reached(done):
                return
            ends, doomed = captured[0]
            checkpoint = Checkpoint(
                identity=self._stored.identity,
                point=point,
                ends=ends.ends,
                skip_to=self._follower.skip_to,
                ranges=ranges,
                positions=positions[0],
            )
            await trio.to_thread.run_sync(ends.store, engine.data_dir, checkpoint)
            self._stored = checkpoint
            queue.put(engine.checkpoint_files.stored(ends, doomed), _nothing)


def _nothing(_: object) -> None:
    pass


def _begun(data_dir: Path, identity: str) -> Checkpoint:
    """Return the checkpoint of a copy, also of one that is about to begin. Raises CannotOpen."""
    checkpoint = read_checkpoint(data_dir)
    if checkpoint is None:
        if (data_dir / "format").exists() or (data_dir / "topics").exists():
            raise CannotOpen(f"{data_dir} belongs to a broker with the local engine: it is no copy of a journal")
        checkpoint = Checkpoint(identity=identity)
        write_checkpoint(data_dir, checkpoint)
    if checkpoint.identity != identity:
        raise CannotOpen(f"{data_dir} is a copy of {checkpoint.identity!r}, and the journal is {identity!r}. {ANEW}")
    return checkpoint


def _cut_back(data_dir: Path, checkpoint: Checkpoint) -> CopyEnds:
    if checkpoint.ends is not None:
        cut_back(data_dir, checkpoint.ends)
        return checkpoint.ends
    wipe(data_dir)
    prepare(data_dir)
    metadata = read_newest(data_dir / DIRECTORY)
    path = metadata.path.relative_to(data_dir).as_posix()
    return CopyEnds(metadata=path, metadata_end=metadata.log_end, topics={}, partitions={}, stages={})
