"""The partitions of a data directory, read from its files without a broker.

The directory must be a copy, or its broker must be stopped. Every executor must see it under the same path.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection
from functools import cached_property
from pathlib import Path

import msgspec

from pyspark_qb.options.spark_errors import BadOption, DirectoryInUse
from pyspark_qb.options.spark_options import SourceOptions
from pyspark_qb.read.logs import Slice, chosen
from pyspark_qb.read.query_offsets import OffsetRange, TopicPartition
from pyspark_qb.read.segment_reader import SegmentFiles, opened
from pyspark_qb.read.segment_slices import cut, segments_of
from qb.clients.protocol.fetch_requests import PartitionExtent
from qb.storage.data_directory import check_format, read_metadata
from qb.storage.files import CannotOpen
from qb.storage.stages.transaction_records import KEY, TransactionRecord
from qb.storage.topic_directories import TopicDirectories


class DirectoryLogs:
    """What a data directory holds of the topics that are read."""

    def __init__(self, options: SourceOptions) -> None:
        """Raises BadOption if it is no data directory, DirectoryInUse while a broker runs in it."""
        assert options.path is not None
        self._options, self._root = options, Path(options.path)
        _check(self._root)
        self._directories = TopicDirectories(self._root / "topics")

    def extents(self) -> dict[TopicPartition, PartitionExtent]:
        """Return what each partition holds: what readers of its broker saw. Raises LogDamaged."""
        visible = _visible_ends(self._root)
        found = {}
        for partition, segments in self._segments.items():
            end = min(segments[-1].next_offset, visible.get(partition, segments[-1].next_offset))
            found[partition] = PartitionExtent(segments[0].base_offset, end)
        return found

    def at_time(self, partition: TopicPartition, time_ms: int) -> int:
        """Return the first offset that was appended at a time or later, or the end."""
        for files in self._segments[partition]:
            with opened(files) as segment:
                offset = segment.first_at(time_ms)
            if offset < files.next_offset:
                return offset
        return self._segments[partition][-1].next_offset

    def slices(self, ranges: Collection[OffsetRange]) -> list[Slice]:
        """Return the ranges cut where one segment ends and the next begins."""
        return [piece for each in ranges for piece in cut(each, self._segments[each.partition])]

    def close(self) -> None:
        """Nothing stays open."""

    @cached_property
    def _segments(self) -> dict[TopicPartition, list[SegmentFiles]]:
        """Return the segments of each partition that is read. Raises LogDamaged, BadOption."""
        known = self._directories.names()
        topics = chosen(self._options.topics, self._options.pattern, known)
        for missing in set(self._options.topics) - set(topics):
            raise BadOption(f"{self._root} has no topic {missing!r}; it has: {', '.join(known) or 'none'}")
        return {
            TopicPartition(topic, number): segments_of(self._directories.partition(topic, number))
            for topic in topics
            for number in range(self._directories.count_partitions(topic))
        }


def _check(root: Path) -> None:
    """Raises unless this is a data directory of a format that is known here, and no broker has it open."""
    if not (root / "format").is_file():
        raise BadOption(f"option path: {root} is no data directory: it has no file named 'format'")
    try:
        check_format(root / "format")
    except CannotOpen as error:
        raise BadOption(f"option path: {error}") from None
    if _is_locked(root) or ((root / "lock").exists() and _is_locked(root / "lock")):
        raise DirectoryInUse(
            f"a broker is running in {root}: what it is about to write is not safe to read from the files. "
            "Read through it with option servers, or stop it, or read a copy"
        )


def _is_locked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)  # which gives the lock back
    return False


def _visible_ends(root: Path) -> dict[TopicPartition, int]:
    """Return where readers had to stop when the broker was stopped, in partitions where that is not the end.

    A transaction that is decided and not yet copied as a whole is not visible; the next start finishes it.
    """
    ends: dict[TopicPartition, int] = {}
    for decision in _decisions(root):
        for held in decision.partitions if decision.receipt is None else ():
            where = TopicPartition(held.topic, held.partition)
            ends[where] = min(held.end_offset, ends.get(where, held.end_offset))
    return ends


def _decisions(root: Path) -> list[TransactionRecord]:
    """Return every transaction of the metadata. Raises LogDamaged, BadOption."""
    try:
        entries = read_metadata(root)
    except CannotOpen as error:
        raise BadOption(f"option path: {error}") from None
    values = [msgspec.json.decode(each.data) for key, each in entries.items() if key.startswith(KEY)]
    return [TransactionRecord.decode(value) for value in values]
