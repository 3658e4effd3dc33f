"""What a checkpoint has to sync, where each file ended, and what may be deleted behind it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from qb.replication.engine.checkpoint import Checkpoint, write_checkpoint
from qb.storage.clean_stop import LogEnd
from qb.storage.cut_back import CopyEnds, SegmentEnd
from qb.storage.engine import Topic
from qb.storage.files import datasync
from qb.storage.log.partition_log import LocalLog
from qb.storage.log.segment import Segment, segment_name
from qb.storage.metadata.metadata_files import copy_of
from qb.storage.metadata.metadata_log import MetadataLog
from qb.storage.stages.stage_store import LocalStage, proof_key

logger = logging.getLogger(__name__)


class MetadataEnd(NamedTuple):
    """Which file of the metadata is the newest, and where it ends."""

    path: Path
    end: LogEnd


class LookAtMetadata(NamedTuple):
    """A work that only looks; done behind all works before it."""

    log: MetadataLog

    def carry_out(self) -> MetadataEnd:
        """Return where the metadata ends now."""
        end = self.log.end
        if end is None:
            raise OSError(f"{self.log.path} could not be written")
        return MetadataEnd(self.log.path, end)


class DoomedFiles(NamedTuple):
    """What no checkpoint names any more, once the one that was under way is written."""

    log: MetadataLog
    metadata: Path  # older files of the metadata than this one
    files: list[Path]
    directories: list[Path]

    def carry_out(self) -> None:
        """Delete them. Blocks; what cannot be deleted goes with the next start."""
        self.log.remove_before(self.metadata)
        for path in self.files:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for path in self.directories:
            shutil.rmtree(path, ignore_errors=True)


class CapturedEnds(NamedTuple):
    """The ends of all files at one point of the journal, and which of them are to be synced."""

    ends: CopyEnds
    to_sync: list[Path]

    def store(self, data_dir: Path, checkpoint: Checkpoint) -> None:
        """Sync them, then write the checkpoint. Blocks. Raises OSError, SyncFailed."""
        for path in self.to_sync:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                datasync(fd)
            finally:
                os.close(fd)
        write_checkpoint(data_dir, checkpoint)


class CheckpointFiles:
    """The files of a copy between two checkpoints. Belongs to the event loop."""

    def __init__(self, data_dir: Path, ends: CopyEnds) -> None:
        """`ends`: as the last checkpoint names them."""
        self._data_dir = data_dir
        self._ends = ends
        self._unsynced: dict[Path, None] = {}  # captured, but not in a checkpoint yet
        self._doomed: list[Path] = []
        self._doomed_directories: list[Path] = []

    # What is removed, and deleted behind the next checkpoint

    def doom(self, segments: Iterable[Segment]) -> None:
        """These segments are dropped."""
        for segment in segments:
            self._doomed += [Path(segment.log_path), Path(segment.index_path)]

    def doom_stage(self, stage_id: str) -> None:
        """This stage has ended."""
        self._doomed.append(self._data_dir / "staged" / f"{stage_id}.log")

    def doom_topic(self, directory: Path, hidden: Path) -> None:
        """A topic is deleted: what stood in its directory stands in a hidden one now."""
        self._doomed_directories.append(hidden)
        self._doomed = [path for path in self._doomed if directory not in path.parents]
        for path in [path for path in self._unsynced if directory in path.parents]:
            del self._unsynced[path]

    # The checkpoint

    def capture(
        self,
        metadata: MetadataEnd,
        topics: Mapping[str, Topic],
        logs: Iterable[tuple[Path, LocalLog]],
        stages: Iterable[LocalStage],
    ) -> CapturedEnds:
        """Return where everything ends now."""
        partitions = {self._key(path): _end_of(log.newest_segment) for path, log in logs}
        stage_ends = {Path(each.file.path): LogEnd(each.size, each.messages) for each in stages}
        ends = CopyEnds(
            metadata=self._key(metadata.path),
            metadata_end=metadata.end,
            topics={name: f"{topic.number:016x}" for name, topic in topics.items()},
            partitions=partitions,
            stages={proof_key(path): end for path, end in stage_ends.items()},
        )
        self._note_unsynced(ends, metadata.path)
        self._ends = ends
        return CapturedEnds(ends, list(self._unsynced))

    def _note_unsynced(self, ends: CopyEnds, metadata: Path) -> None:
        before = self._ends
        if (ends.metadata, ends.metadata_end) != (before.metadata, before.metadata_end):
            self._unsynced.update(dict.fromkeys((metadata, copy_of(metadata))))
        for key, end in ends.partitions.items():
            if before.partitions.get(key) != end:
                self._unsynced[Path(segment_name(self._data_dir / key, end.base_offset)[0])] = None
        for key, stage_end in ends.stages.items():
            if before.stages.get(key) != stage_end:
                self._unsynced[self._data_dir / key] = None

    def doomed(self, log: MetadataLog) -> DoomedFiles:
        """Return what may be deleted when the checkpoint is written whose ends were captured just before."""
        doomed = DoomedFiles(
            log, self._data_dir / self._ends.metadata, list(self._doomed), list(self._doomed_directories)
        )
        return doomed

    def stored(self, captured: CapturedEnds, doomed: DoomedFiles) -> DoomedFiles:
        """The checkpoint is written; returns what of the doomed files may be deleted now."""
        for path in captured.to_sync:
            self._unsynced.pop(path, None)
        still = set(self._doomed)  # a file of a topic that was deleted meanwhile has gone with its directory
        files = [path for path in doomed.files if path in still]
        self._doomed = [path for path in self._doomed if path not in set(files)]
        gone = set(doomed.directories)
        self._doomed_directories = [path for path in self._doomed_directories if path not in gone]
        return doomed._replace(files=files)

    def _key(self, path: Path) -> str:
        return path.relative_to(self._data_dir).as_posix()


def _end_of(segment: Segment) -> SegmentEnd:
    return SegmentEnd(segment.base_offset, segment.size, segment.next_offset)
