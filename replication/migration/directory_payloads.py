"""A data directory as payloads of a journal: its metadata, then every log and stage as it lies there.

Everything here blocks and raises OSError, and CannotOpen for a directory that cannot be proved.
"""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from qb.core.wire.errors import LogDamaged
from qb.replication.engine.checkpoint import read_checkpoint
from qb.replication.engine.payloads import encode_batch, encode_metadata, encode_stage
from qb.replication.engine.replicated_cell import MIGRATION
from qb.storage.clean_stop import BadProof, LogEnd, read_proof
from qb.storage.cut_back import CHECKPOINT, cut_back
from qb.storage.data_directory import VERSION, check_format, check_metadata
from qb.storage.directory_lock import DirectoryLock
from qb.storage.engine import Topic
from qb.storage.files import CannotOpen
from qb.storage.log.log_extents import KEY as EXTENT
from qb.storage.log.log_extents import UNKNOWN, dropped_segments, key_of
from qb.storage.log.log_recovery import base_offsets
from qb.storage.log.recent_batches import StoredBatch
from qb.storage.log.sealed_batches import BadBatch, SealedBatch, walk
from qb.storage.log.segment import reader, segment_name
from qb.storage.metadata.metadata_files import DIRECTORY, read_newest
from qb.storage.metadata.metadata_records import Entries, StoredValue, encode_changes
from qb.storage.metadata.metadata_recovery import checked
from qb.storage.stages.stage_file import StagePiece
from qb.storage.stages.stage_file import walk as walk_stage
from qb.storage.stages.stage_store import NOTED
from qb.storage.topic_directories import TopicDirectories

TOPIC = "topic/"
NOTHING: Mapping[str, int] = MappingProxyType({})
AT_ONCE = 1_000_000  # bytes that go into one payload, about


class _Log(NamedTuple):
    """One partition with the segments that retention has left."""

    topic: Topic
    partition: int
    first_offset: int
    bases: list[int]
    directory: Path


class StoppedDirectory:
    """A data directory whose broker was stopped cleanly, locked as long as this is open. It is only read.

    The copy of a journal that a broker of a cell keeps will do as well: it holds all up to its checkpoint.

    Example:
        >>> directory = StoppedDirectory(Path("storage/data"))
        >>> for payload in directory.payloads():
        ...     journal.append(payload, committed)
        >>> directory.close()
    """

    def __init__(self, data_dir: Path) -> None:
        """Lock it and read its metadata. Raises CannotOpen if it is in use, damaged, or was not stopped."""
        self._root = data_dir
        self._lock = DirectoryLock(data_dir)
        try:
            self._entries = _metadata(data_dir)
            self._logs = list(self._find_logs())
        except BaseException:
            self._lock.close()
            raise
        self.messages = 0  # in the payloads that were taken

    def close(self) -> None:
        """Give the directory back."""
        self._lock.close()

    @property
    def topics(self) -> int:
        """How many topics there are."""
        return len({log.topic.topic for log in self._logs})

    @property
    def stages(self) -> list[str]:
        """The stages that were begun and not ended."""
        return sorted(key.removeprefix(NOTED) for key in self._entries if key.startswith(NOTED))

    def payloads(self, staged: Mapping[str, int] = NOTHING) -> Iterator[bytes]:
        """Yield everything that the directory holds, in an order in which a follower can apply it.

        `staged`: so many messages of a stage are there already.
        """
        yield from self._metadata_payloads()
        for log in self._logs:
            yield from self._log_payloads(log)
        for stage_id in self.stages:
            yield from self._stage_payloads(stage_id, staged.get(stage_id, 0))

    # Metadata

    def _metadata_payloads(self) -> Iterator[bytes]:
        """Topics come with where their logs begin, so that a follower makes them at once; then all else."""
        entries: Entries = {}
        for log in self._logs:
            topic = log.topic
            stored = self._entries[TOPIC + topic.topic]
            entries[TOPIC + topic.topic] = StoredValue(msgspec.json.encode(topic), stored.version)
            entries[key_of(topic.topic)] = StoredValue(b"[0,0]", 1)
            if log.first_offset:
                first = msgspec.json.encode((log.first_offset, 0))
                entries[key_of(topic.topic, log.partition)] = StoredValue(first, 1)
        made_here = (TOPIC, EXTENT)
        entries |= {key: value for key, value in self._entries.items() if not key.startswith(made_here)}
        if MIGRATION in entries:
            raise CannotOpen(f"{self._root} is the copy of a journal whose migration was not finished")
        part: Entries = {}
        size = 0
        for key, value in entries.items():
            part[key] = value
            size += len(key) + len(value.data)
            if size >= AT_ONCE:
                yield encode_metadata(encode_changes(part.items()))
                part, size = {}, 0
        if part:
            yield encode_metadata(encode_changes(part.items()))

    # Logs

    def _find_logs(self) -> Iterator[_Log]:
        directories = TopicDirectories(self._root / "topics")
        for key, value in sorted(self._entries.items()):
            if not key.startswith(TOPIC):
                continue
            topic = msgspec.json.decode(value.data, type=Topic)
            topic = msgspec.structs.replace(topic, uid=f"{secrets.randbits(64):016x}")
            for partition in range(topic.partitions):
                directory = directories.partition(topic.topic, partition)
                noted = self._entries.get(key_of(topic.topic, partition)) or self._entries.get(key_of(topic.topic))
                first = msgspec.json.decode(noted.data)[0] if noted else UNKNOWN.first
                bases = base_offsets(directory)
                bases = bases[dropped_segments(bases, first) :]
                if not bases:
                    raise CannotOpen(f"{directory} has no log; see: qb verify {self._root}")
                begins = bases[0] if first >= UNKNOWN.first else max(first, bases[0])
                yield _Log(topic, partition, begins, bases, directory)

    def _log_payloads(self, log: _Log) -> Iterator[bytes]:
        """Yield the batches of a log; the empty one that begins its first segment says what came before."""
        expected = log.bases[0]
        for base in log.bases:
            if base != expected:
                raise CannotOpen(f"{log.directory} lacks the messages from {expected} to {base}")
            for batch in _batches(log.directory, base):
                expected = batch.next_offset
                if batch.positions or (base == log.bases[0] and base > 0):
                    stored = StoredBatch(batch.first_offset, batch.append_ms, (bytes(batch.raw),), _positions(batch))
                    self.messages += len(batch.positions)
                    yield encode_batch(log.topic.number, log.partition, stored, batch.ranges)

    # Stages

    def _stage_payloads(self, stage_id: str, staged: int) -> Iterator[bytes]:
        path = self._root / "staged" / f"{stage_id}.log"
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pieces: list[StagePiece] = []
            first = size = 0
            for record in walk_stage(reader(fd), 0, os.fstat(fd).st_size):
                if not record.count or record.first < staged:
                    continue  # the first one says whose stage it is, as the metadata does
                if not pieces:
                    first = record.first
                pieces.append(StagePiece(bytes(record.frame), record.where, record.count))
                size += len(record.frame)
                if size >= AT_ONCE:
                    yield encode_stage(stage_id, first, 0, pieces)
                    pieces, size = [], 0
            if pieces:
                yield encode_stage(stage_id, first, 0, pieces)
        except BadBatch as bad:
            raise CannotOpen(f"{path}: byte {bad.position}: {bad.what}") from bad
        finally:
            os.close(fd)


def was_stopped(data_dir: Path) -> bool:
    """Say whether a directory can be read as it is: stopped cleanly, of our format; or the copy of a journal.

    Blocks. Raises CannotOpen.
    """
    if not (data_dir / "format").is_file():
        raise CannotOpen(f"{data_dir} is no data directory: it has no file named 'format'")
    if (data_dir / CHECKPOINT).exists():
        return True
    try:
        return check_format(data_dir / "format") == VERSION and read_proof(data_dir) is not None
    except BadProof:
        return False


def _metadata(data_dir: Path) -> Entries:
    """Return the metadata of a directory that was stopped, or of a copy, which is cut back to its checkpoint."""
    if not was_stopped(data_dir):
        raise CannotOpen(f"{data_dir} was not stopped cleanly")
    check_metadata(data_dir)
    try:
        return checked(read_newest(data_dir / DIRECTORY), _proof(data_dir)).entries
    except (LogDamaged, BadProof) as damage:
        raise CannotOpen(f"{damage}; see: qb verify {data_dir}") from damage


def _proof(data_dir: Path) -> Mapping[str, LogEnd]:
    checkpoint = read_checkpoint(data_dir)
    if checkpoint is None:
        return read_proof(data_dir) or {}
    if checkpoint.ends is None:
        raise CannotOpen(f"{data_dir} is a copy that has not begun: it holds nothing")
    cut_back(data_dir, checkpoint.ends)
    return checkpoint.ends.log_ends()


def _batches(directory: Path, base: int) -> Iterator[SealedBatch]:
    path = segment_name(directory, base)[0]
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield from walk(reader(fd), 0, os.fstat(fd).st_size, base)
    except BadBatch as bad:
        raise CannotOpen(f"{path}: byte {bad.position}: {bad.what}") from bad
    finally:
        os.close(fd)


def _positions(batch: SealedBatch) -> array[int] | range:
    """Return where the frames begin, as steps where they are all as long."""
    positions = batch.positions
    step = positions[1] - positions[0] if len(positions) > 1 else 0
    if step and all(each == number * step for number, each in enumerate(positions)):
        return range(0, len(positions) * step, step)
    return array("I", positions)
