"""The engine of a cell: a copy on this disk that is brought on by the journal, and written through it by its owner."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import trio

from qb.core.wire.errors import ShuttingDown, TopicExists, UnknownTopic
from qb.replication.engine.apply_queue import ApplyQueue
from qb.replication.engine.cell_changes import TOPIC, CellChanges, cell_changes
from qb.replication.engine.checkpoint_files import CapturedEnds, CheckpointFiles, MetadataEnd
from qb.replication.engine.journal_positions import JournalPositions
from qb.replication.engine.replicated_committer import ReplicatedCommitter
from qb.replication.engine.snapshots import TrimHead
from qb.replication.journal.journal_store import JournalError
from qb.replication.journal.record_chain import ChainPoint
from qb.storage import maintenance as background
from qb.storage.commit.batch_commit import BatchCommit
from qb.storage.commit.committer import Committer, Work
from qb.storage.cut_back import ANEW, CopyEnds
from qb.storage.directory_lock import INTERVAL, DirectoryLock, DirectoryLost
from qb.storage.engine import Topic
from qb.storage.faults import keep_running
from qb.storage.files import CannotOpen
from qb.storage.local_engine import FINISH_WITHIN, EngineSettings, LocalEngine, OpenTopic
from qb.storage.log.log_extents import LogExtents, key_of
from qb.storage.log.log_recovery import RecoveredLog, recover
from qb.storage.log.partition_log import LocalLog
from qb.storage.log.segment import Segment
from qb.storage.metadata.metadata_log import MetadataLog
from qb.storage.metadata.metadata_records import Entries
from qb.storage.metadata.metadata_recovery import RecoveredMetadata, recover_metadata
from qb.storage.metadata.metadata_store import MetadataCommit
from qb.storage.stages.stage_store import NOTED, LocalStage, NotedStage, new_stage_id

logger = logging.getLogger(__name__)


class CopyExtents(LogExtents):
    """Only where logs begin is noted, by a record of the journal; where they end, the checkpoint says."""

    def moved(self, log: object, first: int) -> None:
        pass

    def forget(self, log: object) -> None:
        pass

    def adopt(self, topic: str, logs: object) -> None:
        pass

    def mark(self, topic: str, partition: int, found: object) -> None:
        pass


class AppliedChanges(NamedTuple):
    """A record of changes with the files that come and go with it."""

    commit: MetadataCommit
    make: Callable[[], Any]

    def carry_out(self) -> tuple[Any, float]:
        """Make the files, then note the changes. Blocks. Raises OSError."""
        return self.make(), self.commit.carry_out()


class MadeFiles(NamedTuple):
    """What a thread has made for a record of changes."""

    hidden: list[Path]
    created: list[tuple[Topic, list[RecoveredLog]]]
    grown: list[tuple[Topic, list[RecoveredLog]]]
    begun: list[LocalStage]


class ReplicatedEngine(LocalEngine):
    """Implements qb.storage.engine.Engine for the owner of a cell, and the copy of its followers."""

    def __init__(
        self,
        settings: EngineSettings,
        clock: Callable[[], int],
        lock: DirectoryLock,
        ends: CopyEnds,
        positions: JournalPositions,
    ) -> None:
        """Go on where the ends say, to which all files were cut back. recover() comes next."""
        self._copy_ends = ends
        self.positions, self.applied = positions, 0
        self._by_uid: dict[int, str] = {}
        self._retired: dict[str, OpenTopic] = {}  # topics whose deletion is under way
        self.checkpoint_files = CheckpointFiles(Path(settings.data_dir), ends)
        super().__init__(settings, clock, lock)

    def _recover_metadata(self) -> RecoveredMetadata:
        return recover_metadata(self._files, Path(self._settings.data_dir), self._copy_ends.log_ends())

    def _new_committer(self) -> Committer:
        self._appliers = self._new_threads("applier", 1)
        self.queue = ApplyQueue(self._appliers, self._completions)
        self.committer = ReplicatedCommitter(self, self._completions)
        return self.committer

    def _metadata_committer(self) -> Committer:
        return self.committer

    def _new_extents(self) -> LogExtents:
        return CopyExtents(self._metadata, are_durable=False)

    def recover(self) -> None:
        """Open all logs and stages. Blocks. Raises CannotOpen, OSError, and then is closed."""
        self._recover_or_close()

    def _recover(self) -> None:
        super()._recover()
        for _, log in self._logs():
            if damage := log.damage:
                raise CannotOpen(f"{damage}. {ANEW}")
        for stage in self._stages.known.values():
            if stage.failure is not None:
                raise CannotOpen(f"{stage.failure}. {ANEW}")

    @property
    def durability(self) -> str:
        return "replicated"

    def uid_of(self, topic: str) -> int:
        """Return the unique id of a topic."""
        return self._topics[topic].number

    # Applying what is committed

    def apply(self, work: Work, finished: Callable[[Any], None], position: int) -> None:
        """Have a work done on this disk, behind all before it, that is committed at a position of the journal."""
        if isinstance(work, MetadataCommit):
            self._apply_changes(work, finished, position)
            return

        def done(result: Any) -> None:
            self.applied = position
            if isinstance(work, BatchCommit):
                self._note_batch(work, position)
            finished(result)

        self.queue.put(work, done, is_short=isinstance(work, BatchCommit) and work.is_short)

    def _note_batch(self, work: BatchCommit, position: int) -> None:
        key = self._position_key(*work.where)
        if key is not None:
            self.positions.note_batch(key, work.batch.first_offset, position, starts_segment=work.starts_segment)

    def _position_key(self, name: str, partition: int) -> str | None:
        topic = self._topics.get(name)
        return f"{topic.number:016x}/{partition}" if topic is not None else None

    def _apply_changes(self, work: MetadataCommit, finished: Callable[[Any], None], position: int) -> None:
        topics = self._topics | {name: kept.topic for name, kept in self._retired.items()}
        plan = cell_changes(work.changes, topics, self._stages.known)
        is_short = plan.are_short and work.log.is_short(work.body)

        def done(result: tuple[MadeFiles, float]) -> None:
            made, seconds = result
            self.applied = position
            self._take_in_files(plan, made, position)
            finished(seconds)

        self.queue.put(AppliedChanges(work, partial(self._make_files, plan)), done, is_short=is_short)

    def _make_files(self, plan: CellChanges) -> MadeFiles:
        """Make and hide what comes and goes. Blocks. Raises OSError."""
        hidden = [self._hide(topic) for topic in plan.removed]
        created = []
        for topic in plan.created:
            self._directories.create(self._files, topic.topic, topic.partitions, topic.created_ms)
            created.append((topic, self._recover_topic(topic)))
        grown = [(topic, self._add_directories(topic)) for topic in plan.grown]
        begun = [self._stages.create(noted.transaction, noted.number, each) for each, noted in plan.begun.items()]
        return MadeFiles(hidden, created, grown, begun)

    def _hide(self, topic: Topic) -> Path:
        hidden = self._directories.hide(topic.topic, f"{topic.number:016x}")
        self._files.forget_below(self._directories.partition(topic.topic, 0).parent)  # a namesake may come there
        return hidden

    def _add_directories(self, topic: Topic) -> list[RecoveredLog]:
        first = len(self._kept[topic.topic].logs)
        if first < topic.partitions:
            self._directories.add(self._files, topic.topic, first, topic.partitions, topic.created_ms)
        paths = [self._directories.partition(topic.topic, number) for number in range(first, topic.partitions)]
        return [recover(self._files, path) for path in paths]

    def _take_in_files(self, plan: CellChanges, made: MadeFiles, position: int) -> None:
        for topic, hidden in zip(plan.removed, made.hidden, strict=True):
            self._forget_topic(topic, hidden)
        for topic, parts in made.created:
            self._keep(topic, parts)
        for topic, parts in made.grown:
            self._grow_kept(topic, parts)
        for stage in made.begun:
            self._stages.known[stage.stage_id] = stage
            self.positions.stages[stage.stage_id] = position
        for stage_id in plan.ended:
            self._stages.known.pop(stage_id, None)
            self.positions.stages.pop(stage_id, None)
            self.checkpoint_files.doom_stage(stage_id)
        for name, partition, first_offset in plan.dropped:
            kept = self._kept.get(name)
            if kept is not None and partition < len(kept.logs):
                dropped = kept.logs[partition].drop_before(first_offset)
                self._files.forget(*(path for each in dropped for path in (each.log_path, each.index_path)))
                self.checkpoint_files.doom(dropped)
                self.positions.note_drop(f"{kept.topic.number:016x}/{partition}", first_offset)

    def _keep(self, topic: Topic, parts: list[RecoveredLog]) -> None:
        super()._keep(topic, parts)
        self._by_uid[topic.number] = topic.topic

    def _forget_topic(self, topic: Topic, hidden: Path) -> None:
        for log in self._retired.pop(topic.topic).logs:
            log.forget()
        self._by_uid.pop(topic.number, None)
        self.positions.forget_topic(f"{topic.number:016x}")
        self.checkpoint_files.doom_topic(self._directories.partition(topic.topic, 0).parent, hidden)

    def _grow_kept(self, topic: Topic, parts: list[RecoveredLog]) -> None:
        kept = self._kept[topic.topic]
        for number, part in enumerate(parts, len(kept.logs)):
            kept.logs.append(LocalLog(topic.topic, number, self._shared, kept.health, part))
        self._kept[topic.topic] = kept._replace(topic=topic)
        self._topics[topic.topic] = topic

    async def retire(self, topic: str) -> None:
        """Take a topic out of what is served; returns when nothing of it is being written."""
        kept = self._retired[topic] = self._kept.pop(topic)
        del self._topics[topic]
        for log in kept.logs:
            log.refuse(UnknownTopic(topic))
        for log in kept.logs:
            await log.wait_until_idle()

    # Applying what another broker has committed

    def log_of(self, uid: int, partition: int) -> LocalLog | None:
        """Return a log by the unique id of its topic."""
        kept = self._kept.get(self._by_uid.get(uid, ""))
        return kept.logs[partition] if kept is not None and partition < len(kept.logs) else None

    def stage(self, stage_id: str) -> LocalStage | None:
        """Return a stage."""
        return self._stages.known.get(stage_id)

    async def replay_changes(self, body: bytes, position: int) -> None:
        """Apply a record of changes; nothing of the metadata may be under way. Raises BadRecord."""
        work, finished = self._metadata.replay(body)
        for topic in cell_changes(work.changes, self._topics, self._stages.known).removed:
            await self.retire(topic.topic)
        self.apply(work, finished, position)

    # Checkpoints

    def capture(self, metadata: MetadataEnd) -> CapturedEnds:
        """Return where everything ends; called as the result of LookAtMetadata, so that it is one point in time."""
        topics = self._topics | {name: kept.topic for name, kept in self._retired.items()}
        logs = [(self._directories.partition(log.topic, log.partition), log) for _, log in self._held_logs()]
        return self.checkpoint_files.capture(metadata, topics, logs, self._stages.known.values())

    def _held_logs(self) -> Iterator[tuple[Topic, LocalLog]]:
        """Yield all logs of this copy, also of topics whose deletion is not committed: if it never is, they stay."""
        yield from self._logs()
        for kept in self._retired.values():
            for log in kept.logs:
                yield kept.topic, log

    def segments(self) -> list[tuple[Segment, int]]:
        """Return every segment of every log, and how far it goes."""
        return [(segment, segment.size) for _, log in self._held_logs() for segment in log.segments]

    @property
    def metadata_log(self) -> MetadataLog:
        return self._metadata_log

    @property
    def data_dir(self) -> Path:
        return Path(self._settings.data_dir)

    # Snapshots

    def snapshot(self, trim: ChainPoint) -> tuple[TrimHead, Entries]:
        """Return what a reader must know that begins at a point, and the metadata, to be encoded."""
        ranges: dict[str, list[tuple[int, int, int, int]]] = {}
        for topic, log in self._held_logs():
            if found := [(each.producer_id, each.first_number, each.first_offset, each.count) for each in log.ranges()]:
                ranges[f"{topic.number:016x}/{log.partition}"] = found
        return TrimHead(trim=trim, applied=self.applied, ranges=ranges), self._metadata.entries()

    def trim_point(self, end: int) -> ChainPoint | None:
        """Return up to where the journal is not needed any more; nothing behind `end` is known."""
        with_messages = [(topic, log) for topic, log in self._held_logs() if log.durable_offset > log.first_offset]
        firsts = {f"{topic.number:016x}/{log.partition}": log.first_offset for topic, log in with_messages}
        return self.positions.trim_point(self.positions.needed(firsts, end))

    # Owning: every change is a record of the journal first, and applied when that is committed

    async def confirm_current(self) -> None:
        """Commit a record: it is refused if another broker had taken over before. What is acked meanwhile shares it."""
        await self._metadata.write_record()

    async def _create(self, topic: Topic) -> Topic:
        if topic.topic in self._kept:
            raise TopicExists(topic.topic)
        created_ms, uid = topic.created_ms or self._clock(), f"{secrets.randbits(64):016x}"
        topic = msgspec.structs.replace(topic, created_ms=created_ms, uid=uid)
        await self.metadata.put_all({TOPIC + topic.topic: topic, key_of(topic.topic): (0, 0)})
        return topic

    async def _grow(self, topic: str, partitions: int) -> Topic:
        known = self._topics.get(topic)
        if known is None:
            raise UnknownTopic(topic)
        grown = msgspec.structs.replace(known, partitions=max(known.partitions, partitions))
        await self.metadata.put(TOPIC + topic, grown)
        return grown

    async def _delete(self, topic: str) -> None:
        if topic not in self._kept:
            raise UnknownTopic(topic)
        await self.retire(topic)
        await self.metadata.delete(*self._keys(topic))

    async def begin_stage(self, transaction: str, number: int | None) -> LocalStage:
        stage_id = new_stage_id()
        with trio.CancelScope(shield=True):
            await self.metadata.put(NOTED + stage_id, NotedStage(transaction, number))
        return self._stages.known[stage_id]

    async def delete_stages(self, stages: Iterable[str]) -> None:
        with trio.CancelScope(shield=True):
            ended = await self._stages.end(stages)
            if ended:
                await self.metadata.delete(*[NOTED + stage.stage_id for stage in ended])

    async def _drop(self, log: LocalLog, count: int) -> None:
        await self.metadata.put(key_of(log.topic, log.partition), (log.first_after(count), 0))

    # Running

    async def run(self) -> None:
        """Write what the owner's broker gives, until cancelled; then finish all of it. The cell runs beneath."""
        settings = self._settings
        try:
            async with trio.open_nursery() as keepers:
                keepers.start_soon(keep_running, "metadata", self._metadata.run)
                keepers.start_soon(keep_running, "commits that lag", self._commit_steps.run)
                limits = settings.retention_hours, settings.retention_bytes, settings.retention_interval
                drop = partial(background.drop_forever, self._logs, self._clock, *limits, self._drop)
                keepers.start_soon(keep_running, "retention", drop)
        finally:
            with trio.CancelScope(shield=True):
                await self._finish()

    async def _finish(self) -> None:
        """Have all that was taken committed. What cannot be is not answered: its outcome is unknown."""
        with trio.move_on_after(FINISH_WITHIN) as limit:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_when_lost, nursery.cancel_scope)
                self._commit_steps.commit_what_lags()
                await self.committer.settle()
                await self._metadata.finish()
                nursery.cancel_scope.cancel()
        if limit.cancelled_caught:
            self.committer.lose(JournalError(f"what was taken was not committed within {FINISH_WITHIN:.0f} s"))
        if not self.committer.lost.is_set():
            self.abandon()

    def abandon(self) -> None:
        """Give all that wait an error that says nothing; no peer may hear of it."""
        self._abandon(ShuttingDown("this broker does not own the cell any more"))

    async def _end_when_lost(self, scope: trio.CancelScope) -> None:
        await self.committer.lost.wait()
        scope.cancel()

    async def keep_copy(self) -> None:
        """Run the threads of the copy until cancelled."""
        self._writers.start()
        self._appliers.start()
        try:
            async with trio.open_nursery() as keepers:
                keepers.start_soon(keep_running, "writers", self._writers.deliver_forever)
                keepers.start_soon(keep_running, "applier", self._appliers.deliver_forever)
                keepers.start_soon(self._watch_lock)
                keepers.start_soon(background.prove, self._logs)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._stop_copy)

    async def _watch_lock(self) -> None:
        while True:
            await trio.sleep(INTERVAL)
            try:
                await trio.to_thread.run_sync(self._lock.check)
            except DirectoryLost as lost:
                self.queue.end(lost)
                return
            except OSError:
                continue

    def _stop_copy(self) -> None:
        self._writers.stop(patience=1.0)
        self._appliers.stop(patience=1.0)

    def write_indexes(self) -> None:
        """Leave whole indexes, as an end in good order does. Blocks."""
        for _, log in self._held_logs():
            log.write_indexes()

    def close(self) -> None:
        """Nothing: the copy outlives a tenure, and ends with its cell."""

    def close_copy(self) -> None:
        """Release files and the lock."""
        self._appliers.close()
        super().close()
