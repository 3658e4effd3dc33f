"""The files of a copy, cut back to where they were on stable storage.

A copy of a journal writes without syncing: the journal has everything. From time to time all files are synced, and
where each of them ended is noted (`CopyEnds`). After a kill or a power cut nothing behind that is believed: a start
cuts it off, and the journal brings it again. What was removed meanwhile is only hidden until the next note.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from qb.storage.clean_stop import LogEnd
from qb.storage.files import CannotOpen, sync_directory
from qb.storage.log.log_recovery import base_offsets
from qb.storage.log.segment import segment_name
from qb.storage.metadata.metadata_files import DIRECTORY, copy_of
from qb.storage.topic_directories import TopicDirectories

CHECKPOINT = "checkpoint"  # the file in a data directory that makes it a copy
ANEW = "stop the broker, move the directory away and start it again: it takes a new copy from the journal"


class SegmentEnd(NamedTuple):
    """Where the newest segment of a partition begins and ends."""

    base_offset: int
    size: int
    next_offset: int

    @property
    def log_end(self) -> LogEnd:
        return LogEnd(self.size, self.next_offset)


class CopyEnds(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything that a copy consists of ends; paths are those in the data directory."""

    metadata: str
    metadata_end: LogEnd
    topics: dict[str, str]  # the unique id of each
    partitions: dict[str, SegmentEnd]
    stages: dict[str, LogEnd]

    def log_ends(self) -> dict[str, LogEnd]:
        """Return the same as a clean stop proves it."""
        logs = {path: end.log_end for path, end in self.partitions.items()}
        return {self.metadata: self.metadata_end, **logs, **self.stages}


def cut_back(data_dir: Path, ends: CopyEnds) -> None:
    """Leave exactly what `ends` says. Blocks. Raises CannotOpen if that is not all there, OSError."""
    _cut_metadata(data_dir, ends)
    _bring_topics_back(data_dir, ends)
    for path in _partitions(data_dir):
        end = ends.partitions.get(path.relative_to(data_dir).as_posix())
        if end is None:
            shutil.rmtree(path)
        else:
            _cut_partition(path, end)
    for path in sorted((data_dir / "staged").glob("*")):
        stage = ends.stages.get(path.relative_to(data_dir).as_posix())
        if stage is None:
            path.unlink()
        else:
            _cut(path, stage.size)


def wipe(data_dir: Path) -> None:
    """Remove everything that a copy consists of: it begins anew. Blocks. Raises OSError."""
    for name in ("topics", "staged", DIRECTORY, f"{DIRECTORY}-copy"):
        if (data_dir / name).is_dir():
            shutil.rmtree(data_dir / name)
    (data_dir / "format").unlink(missing_ok=True)
    sync_directory(data_dir)


def _cut_metadata(data_dir: Path, ends: CopyEnds) -> None:
    path = data_dir / ends.metadata
    for each in (path, copy_of(path)):
        for other in each.parent.glob("*") if each.parent.is_dir() else ():
            if other.name != each.name:
                other.unlink()
    _cut(path, ends.metadata_end.size)
    if copy_of(path).exists() and copy_of(path).stat().st_size > ends.metadata_end.size:
        _cut(copy_of(path), ends.metadata_end.size)


def _bring_topics_back(data_dir: Path, ends: CopyEnds) -> None:
    """Give topics their directories again that were deleted since, and remove those that were made since."""
    directories = TopicDirectories(data_dir / "topics")
    for topic, uid in ends.topics.items():
        directories.bring_back(topic, uid)
    for name in directories.names():
        if name not in ends.topics:
            directories.remove(directories.hide(name))
    for path, _ in list(directories.unfinished()):
        shutil.rmtree(path)


def _partitions(data_dir: Path) -> Iterator[Path]:
    for topic in sorted((data_dir / "topics").iterdir()):
        yield from sorted(path for path in topic.iterdir() if path.is_dir())


def _cut_partition(directory: Path, end: SegmentEnd) -> None:
    for base in base_offsets(directory):
        if base > end.base_offset:
            for path in segment_name(directory, base):
                Path(path).unlink(missing_ok=True)
    _cut(Path(segment_name(directory, end.base_offset)[0]), end.size)


def _cut(path: Path, size: int) -> None:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CannotOpen(f"{path} is missing, and the copy had it: {ANEW}") from None
    try:
        found = os.fstat(fd).st_size
        if found < size:
            raise CannotOpen(f"{path} has {found} bytes, and {size} were on stable storage: {ANEW}")
        if found > size:
            os.ftruncate(fd, size)
    finally:
        os.close(fd)
