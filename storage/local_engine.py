"""The engine that keeps topics in files on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import trio

from qb.core.wire.clock import now_ms
from qb.core.wire.errors import (
    BrokerError,
    DiskFull,
    Internal,
    LogDamaged,
    LogPoisoned,
    ShuttingDown,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from qb.storage import maintenance as background
from qb.storage.clean_stop import LogEnd, write_proof
from qb.storage.commit.commit_step import CommitSteps
from qb.storage.commit.committer import Committer, LocalCommitter
from qb.storage.commit.completions import Completions
from qb.storage.commit.sync_pace import SyncPace
from qb.storage.commit.writer_threads import WriterThreads
from qb.storage.cut_back import CHECKPOINT
from qb.storage.data_directory import prepare
from qb.storage.directory_lock import INTERVAL, DirectoryLock, DirectoryLost
from qb.storage.engine import CommitStep, Metadata, RecoveryReport, Topic
from qb.storage.faults import keep_running
from qb.storage.files import LOST, NO_ROOM, CannotOpen, OpenFiles, make_directory, note_on_access
from qb.storage.log.log_context import LogContext, LogSettings, TopicHealth
from qb.storage.log.log_ends import LogEnds
from qb.storage.log.log_extents import LogExtents, key_of
from qb.storage.log.log_recovery import RecoveredLog, notes_on, recover
from qb.storage.log.partition_log import LocalLog
from qb.storage.log.recent_batches import LastReads, RecentMemory
from qb.storage.measures import Measures
from qb.storage.metadata.metadata_recovery import RecoveredMetadata, recover_metadata
from qb.storage.metadata.metadata_store import MetadataStore
from qb.storage.stages.stage_store import NOTED, LocalStage, LocalStages, noted_stages
from qb.storage.topic_directories import TopicDirectories

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
WRITERS = 4  # threads, so that logs sync side by side; a log has at most one commit under way
FINISH_WITHIN = 20.0  # how long a disk may take, at the end, to finish what append() was given


class EngineSettings(LogSettings, Protocol):
    """What the engine asks of the settings."""

    @property
    def data_dir(self) -> str: ...
    @property
    def fsync_on_write(self) -> bool: ...
    @property
    def retention_hours(self) -> float: ...
    @property
    def retention_bytes(self) -> int: ...
    @property
    def tail_bytes(self) -> int: ...
    @property
    def retention_interval(self) -> float: ...


class OpenTopic(NamedTuple):
    """A topic and its logs."""

    topic: Topic
    logs: list[LocalLog]
    health: TopicHealth  # of all its logs together


class LocalEngine:
    """Implements qb.storage.engine.Engine; what its methods promise stands there."""

    recovery: RecoveryReport

    def __init__(self, settings: EngineSettings, clock: Callable[[], int], lock: DirectoryLock) -> None:
        """Use open()."""
        data_dir = Path(settings.data_dir)
        self._settings = settings
        self._lock = lock
        self._completions = Completions()
        self._files = OpenFiles()
        self._pace = SyncPace()
        found = self._recover_metadata()
        self._directories = TopicDirectories(data_dir / "topics")
        self._writers = self._new_threads("writer", WRITERS)
        self._committer = self._new_committer()
        memory, reads = RecentMemory(settings.tail_bytes), LastReads(settings.tail_bytes // 4)
        self.measures = Measures()
        self._commit_steps = CommitSteps(self._completions, self._pace, self._writers)
        self._metadata_log, self._notes, self._ends = found.log, found.notes, found.ends
        self._metadata = MetadataStore(
            found.log, found.entries, self._metadata_committer(), self._completions, self._pace, self._commit_steps
        )
        self.metadata: Metadata = self._metadata
        self._extents = self._new_extents()
        in_memory = memory, reads, self.measures, self._commit_steps, self._completions, self._pace, self._extents
        self._shared = LogContext(settings, clock, self._files, self._writers, self._committer, *in_memory)
        self._stages = LocalStages(data_dir / "staged", self._shared)
        self._kept: dict[str, OpenTopic] = {}
        self._topics: dict[str, Topic] = {}  # the same without the logs, at hand for every publish
        self._changing = trio.Lock()  # topics come and go one after another

    @property
    def durability(self) -> str:
        return "fsynced" if self._settings.fsync_on_write else "written"

    def _new_threads(self, name: str, threads: int) -> WriterThreads:
        return WriterThreads(name, threads, self._completions)

    def _recover_metadata(self) -> RecoveredMetadata:
        return recover_metadata(self._files, Path(self._settings.data_dir))

    def _new_committer(self) -> Committer:
        """Return what makes messages durable."""
        return LocalCommitter(self._writers, self._pace, syncs=self._settings.fsync_on_write)

    def _metadata_committer(self) -> Committer:
        """Return what makes metadata durable, whatever the settings say."""
        return LocalCommitter(self._writers, self._pace, syncs=True)

    def _new_extents(self) -> LogExtents:
        ends = LogEnds(self._files, Path(self._settings.data_dir))
        return LogExtents(self._metadata, are_durable=self._settings.fsync_on_write, ends=ends)

    @classmethod
    def open(cls, settings: EngineSettings, clock: Callable[[], int] = now_ms) -> LocalEngine:
        """Lock the data directory and recover all of it. Blocks. Raises CannotOpen."""
        data_dir = Path(settings.data_dir)
        try:
            make_directory(data_dir)
            lock = DirectoryLock(data_dir)
            try:
                if (data_dir / CHECKPOINT).exists():
                    raise CannotOpen(f"{data_dir} is the copy of a journal: only a broker of its cell may open it")
                prepare(data_dir)
                engine = cls(settings, clock, lock)
            except BaseException:
                lock.close()
                raise
            engine._recover_or_close()
        except CannotOpen:
            raise
        except (OSError, msgspec.MsgspecError) as error:
            raise CannotOpen(f"{data_dir} cannot be opened: {error}") from error
        return engine

    # Start

    def _recover_or_close(self) -> None:
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def _recover(self) -> None:
        notes = [*note_on_access(Path(self._settings.data_dir)), *self._notes]
        notes += self._extents.notes(Path(self._settings.data_dir))
        self._clear_unfinished(notes)
        parts: dict[str, list[RecoveredLog]] = {}
        for topic in self._find_topics(notes):
            parts[topic.topic] = self._recover_topic(topic)
            self._keep(topic, parts[topic.topic])
            if not any(part.damage for part in parts[topic.topic]):
                self._extents.adopt(topic.topic, self._kept[topic.topic].logs)
                for partition, part in enumerate(parts[topic.topic]):
                    self._extents.mark(topic.topic, partition, part.marks)
        notes += [*notes_on(parts), *self._recover_stages()]
        self._ends = {}  # from now on logs may be written
        found = [part for its in parts.values() for part in its]
        logs = [log for kept in self._kept.values() for log in kept.logs]
        self.recovery = RecoveryReport(
            topics=len(self._kept),
            messages=sum([log.end_offset - log.first_offset for log in logs]),
            cut_bytes=sum([part.cut_bytes for part in found]),
            rebuilt_indexes=sum([len(part.rebuilt_indexes) for part in found]),
            notes=tuple(notes),
        )

    def _recover_topic(self, topic: Topic) -> list[RecoveredLog]:
        return [self._recover_log(topic.topic, number) for number in range(topic.partitions)]

    def _recover_log(self, topic: str, partition: int) -> RecoveredLog:
        directory = self._directories.partition(topic, partition)
        end = self._ends.get(self._proof_key(directory))
        extent, marks = self._extents.of(topic, partition), self._extents.marks(topic, partition)
        found = recover(self._files, directory, end, extent, marks)
        if found.missing and not found.damage:
            self._extents.mend(topic, partition, found.segments[-1].next_offset)
        return found

    def _recover_stages(self) -> list[str]:
        """Find every stage, and note those that a broker before this has begun; returns notes for the operator."""
        noted = noted_stages({key: entry.value for key, entry in self.metadata.under(NOTED).items()})
        notes = self._stages.recover(noted, self._ends)
        for stage in self._stages.known.values():
            if stage.stage_id not in noted:
                self._metadata.put_soon(NOTED + stage.stage_id, stage.noted)
        return notes

    def _clear_unfinished(self, notes: list[str]) -> None:
        """Finish deletions and take back creations that the last process did not get through."""
        for path, topic in self._directories.unfinished():
            if topic is None:
                notes.append(f"cleared an unfinished creation: {path.name}")
            else:
                notes.append(f"finished the deletion of topic {topic!r}")
                self._directories.clear(path)
                if not self._directories.exists(topic):
                    self._metadata.write_now(dict.fromkeys(self._keys(topic)))
            self._directories.remove(path)

    def _find_topics(self, notes: list[str]) -> list[Topic]:
        """Return the topics of the metadata and, newly entered there, those that only have a directory."""
        known = {key.partition("/")[2]: entry.value for key, entry in self.metadata.under("topic/").items()}
        topics = [msgspec.convert(value, Topic) for value in known.values()]
        for name in self._directories.names():
            if name not in known:
                topic = Topic(topic=name, partitions=self._directories.count_partitions(name), created_ms=self._clock())
                notes.append(f"adopted topic {name!r} with {topic.partitions} partitions: it was not in the metadata")
                self._metadata.write_now({_key(name): msgspec.json.encode(topic)})
                topics.append(topic)
        return topics

    def _keys(self, topic: str) -> list[str]:
        """Return where the metadata keeps what it knows of a topic and its logs."""
        return [_key(topic), *self.metadata.under(key_of(topic))]

    def _clock(self) -> int:
        return self._shared.clock()

    def _keep(self, topic: Topic, parts: list[RecoveredLog]) -> None:
        health = TopicHealth()
        logs = [LocalLog(topic.topic, number, self._shared, health, part) for number, part in enumerate(parts)]
        self._kept[topic.topic] = OpenTopic(topic, logs, health)
        self._topics[topic.topic] = topic

    # Topics

    def topics(self) -> Mapping[str, Topic]:
        return self._topics

    def log(self, topic: str, partition: int) -> LocalLog:
        kept = self._kept.get(topic)
        if kept is None:
            raise UnknownTopic(topic)
        if not 0 <= partition < len(kept.logs):
            raise UnknownPartition(topic, partition, len(kept.logs))
        return kept.logs[partition]

    def commit_step(self, idle: bool) -> AbstractContextManager[CommitStep]:
        return self._commit_steps(idle)

    def before_commits(self, prepare: Callable[[], None]) -> bool:
        return self._commit_steps.before_commits(prepare)

    async def create_topic(self, topic: Topic) -> Topic:
        with trio.CancelScope(shield=True):  # a topic is made as a whole, even if the caller is cancelled
            async with self._changing:
                created = await self._create(topic)
        return created

    async def _create(self, topic: Topic) -> Topic:
        if topic.topic in self._kept:
            raise TopicExists(topic.topic)
        topic = msgspec.structs.replace(topic, created_ms=topic.created_ms or self._clock())
        parts = await self._in_thread(self._create_on_disk, topic)
        self._extents.begin(topic.topic)
        try:
            await self.metadata.put(_key(topic.topic), topic)
        except BrokerError:
            await self._in_thread(self._take_back, topic.topic, parts)
            raise
        self._keep(topic, parts)
        return topic

    def _create_on_disk(self, topic: Topic) -> list[RecoveredLog]:
        self._directories.create(self._files, topic.topic, topic.partitions, topic.created_ms)
        parts = self._recover_topic(topic)
        try:
            _check_made(parts)
        except OSError:
            self._take_back(topic.topic, parts)
            raise
        return parts

    def _take_back(self, topic: str, parts: list[RecoveredLog]) -> None:
        """Delete what _create_on_disk() made; its descriptors go first, or a namesake would write to what is gone."""
        for segment in [segment for part in parts for segment in part.segments]:
            self._files.forget(segment.log_path, segment.index_path)
        self._directories.remove(self._directories.hide(topic))

    async def add_partitions(self, topic: str, partitions: int) -> Topic:
        with trio.CancelScope(shield=True):
            async with self._changing:
                grown = await self._grow(topic, partitions)
        return grown

    async def _grow(self, topic: str, partitions: int) -> Topic:
        kept = self._kept.get(topic)
        if kept is None:
            raise UnknownTopic(topic)
        first = len(kept.logs)
        grown = msgspec.structs.replace(kept.topic, partitions=max(first, partitions))
        parts = await self._in_thread(self._grow_on_disk, topic, first, partitions)
        await self.metadata.put(_key(topic), grown)
        for number, part in enumerate(parts, first):
            kept.logs.append(LocalLog(topic, number, self._shared, kept.health, part))
        self._kept[topic] = kept._replace(topic=grown)
        self._topics[topic] = grown
        return grown

    def _grow_on_disk(self, topic: str, first: int, end: int) -> list[RecoveredLog]:
        self._directories.add(self._files, topic, first, end, self._clock())
        parts = [recover(self._files, self._directories.partition(topic, number)) for number in range(first, end)]
        _check_made(parts)
        return parts

    async def delete_topic(self, topic: str) -> None:
        with trio.CancelScope(shield=True):
            async with self._changing:
                await self._delete(topic)

    async def _delete(self, topic: str) -> None:
        kept = self._kept.pop(topic, None)
        if kept is None:
            raise UnknownTopic(topic)
        del self._topics[topic]
        for log in kept.logs:
            log.refuse(UnknownTopic(topic))
        for log in kept.logs:
            await log.wait_until_idle()
        try:
            hidden = await self._in_thread(self._directories.hide, topic)
        except BrokerError:
            self._keep(kept.topic, await self._in_thread(self._recover_topic, kept.topic))
            raise
        finally:
            for log in kept.logs:
                log.forget()
        await self._in_thread(self._directories.clear, hidden)  # first, so that a full disk has room for the rest
        noted_soon = (key_of(topic, log.partition) for log in kept.logs)  # these may not have been written yet
        await self.metadata.delete(*self._keys(topic), *noted_soon)
        await self._in_thread(self._directories.remove, hidden)

    async def _in_thread(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Run what blocks on the file system in a thread. Raises DiskFull, Internal."""
        try:
            return await trio.to_thread.run_sync(work, *arguments)
        except OSError as error:
            kind = DiskFull if error.errno in NO_ROOM else Internal
            raise kind(f"files could not be changed: {error}") from error

    # Stages

    def stages(self) -> Mapping[str, LocalStage]:
        return self._stages.known

    async def begin_stage(self, transaction: str, number: int | None) -> LocalStage:
        with trio.CancelScope(shield=True):
            stage = await self._in_thread(self._stages.create, transaction, number)
            try:
                await self.metadata.put(NOTED + stage.stage_id, stage.noted)
            except BrokerError:
                await self._in_thread(self._stages.remove, [stage])
                raise
        self._stages.known[stage.stage_id] = stage
        return stage

    async def delete_stages(self, stages: Iterable[str]) -> None:
        with trio.CancelScope(shield=True):
            ended = await self._stages.end(stages)
            for stage in ended:
                self.metadata.put_soon(NOTED + stage.stage_id, None)
            if ended:
                with suppress(BrokerError):  # a full disk needs their space first; the notes are tried again
                    await self.metadata.flush()
                await self._in_thread(self._stages.remove, ended)

    async def confirm_current(self) -> None:
        """Nothing: no other broker can write here."""

    async def free_bytes(self) -> int:
        found = await self._in_thread(os.statvfs, self._settings.data_dir)
        return found.f_bavail * found.f_frsize

    # Running

    async def run(self) -> None:
        settings = self._settings
        self._writers.start()
        try:
            async with trio.open_nursery() as keepers:
                keepers.start_soon(keep_running, "writers", self._writers.deliver_forever)
                keepers.start_soon(keep_running, "metadata", self._metadata.run)
                keepers.start_soon(keep_running, "commits that lag", self._commit_steps.run)
                keepers.start_soon(self._watch_directory)
                keepers.start_soon(keep_running, "extents of logs", self._extents.run)
                keepers.start_soon(background.prove, self._logs)
                keepers.start_soon(keep_running, "poisoned logs", partial(background.reopen_forever, self._logs))
                limits = settings.retention_hours, settings.retention_bytes, settings.retention_interval
                drop = partial(background.drop_forever, self._logs, self._shared.clock, *limits)
                keepers.start_soon(keep_running, "retention", drop)
        finally:
            with trio.CancelScope(shield=True):
                await self._finish()

    async def end(self) -> None:
        """Leave a clean stop without having run: what was recovered is proved. close() comes next."""
        self._writers.start()
        with trio.CancelScope(shield=True):
            await self._finish()

    async def _finish(self) -> None:
        """Finish or refuse whatever was taken: every append() is answered."""
        with trio.move_on_after(FINISH_WITHIN):
            self._commit_steps.commit_what_lags()
            while self._writers.busy:
                await self._writers.deliver()
            await self._metadata.finish()
        self._abandon(ShuttingDown("the broker is about to exit"))
        await trio.to_thread.run_sync(self._stop_threads)

    def _abandon(self, error: BrokerError) -> None:
        """Take no more, and answer for all that was taken."""
        with self._completions:
            for _, log in self._logs():
                log.abandon(error)
            self._stages.abandon(error)
            self._metadata.abandon(error)

    async def _watch_directory(self) -> None:
        """Answer nothing more as stored when the directory, or a file, is not where it was. Raises DirectoryLost."""
        while True:
            await trio.sleep(INTERVAL)
            try:
                await trio.to_thread.run_sync(self._lock.check)
                self._refuse_lost(await trio.to_thread.run_sync(self._files.lost))
            except DirectoryLost as lost:
                self._abandon(LogPoisoned(str(lost)))
                raise
            except OSError:
                continue  # what the disk says when it fails is no proof; logs have their own ways to notice

    def _refuse_lost(self, paths: Sequence[str]) -> None:
        """Answer nothing more as stored in files that are not where they were. Raises DirectoryLost: the metadata."""
        if not paths:
            return
        if (metadata := str(self._metadata_log.path)) in paths:
            raise self._lock.lost(metadata)
        for _, log in self._logs():
            log.refuse_lost(paths)
        for stage in self._stages.known.values():
            if stage.failure is None and stage.file.path in paths:
                stage.abandon(LogDamaged(stage.file.path, 0, LOST))

    def _stop_threads(self) -> None:
        ends: dict[str, LogEnd] = {}
        for _, log in self._logs() if not self._lock.is_lost else ():
            if end := log.tidy():
                ends[self._proof_key(self._directories.partition(log.topic, log.partition))] = end
        ends |= self._stages.ends()
        self._writers.stop(patience=1.0)
        if not self._writers.is_stuck and not self._lock.is_lost:
            self._prove_stop(ends)

    def _prove_stop(self, ends: dict[str, LogEnd]) -> None:
        """Leave the proof of a clean stop; without one, the next start takes it for a kill."""
        try:
            self._metadata_log.tidy()
            if end := self._metadata_log.end:
                ends[self._proof_key(self._metadata_log.path)] = end
                write_proof(Path(self._settings.data_dir), ends)
        except OSError as error:
            logger.warning("the stop could not be proved: %s", error)

    def _proof_key(self, path: Path) -> str:
        return path.relative_to(self._settings.data_dir).as_posix()

    def _logs(self) -> Iterator[tuple[Topic, LocalLog]]:
        for kept in list(self._kept.values()):
            for log in kept.logs:
                yield kept.topic, log

    def close(self) -> None:
        self._files.close()
        self._writers.close()
        self._lock.close()


def _check_made(parts: Iterable[RecoveredLog]) -> None:
    """Raises OSError if one of the logs that were just made cannot be used."""
    for part in parts:
        if part.damage is not None:
            cause = part.damage.__cause__
            raise OSError(cause.errno if isinstance(cause, OSError) else None, str(part.damage))


def _key(topic: str) -> str:
    return f"topic/{topic}"
