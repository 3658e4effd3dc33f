"""The metadata log: records appended durably, one at a time, and a new file when the old one is long."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from qb.storage.clean_stop import LogEnd
from qb.storage.commit.batch_commit import SHORT
from qb.storage.files import (
    OpenFiles,
    SyncFailed,
    create_file,
    datasync,
    make_directory,
    reserve,
    sync_directory,
    write_all,
    write_durably,
)
from qb.storage.metadata.metadata_copy import MetadataCopy
from qb.storage.metadata.metadata_files import MetadataContents, copy_of, log_path, log_paths
from qb.storage.metadata.metadata_records import ChainEnd, Entries, RecordKind, encode_record, encode_snapshot
from qb.storage.metadata.noted_record import NAME as NOTED
from qb.storage.metadata.noted_record import NotedRecord

logger = logging.getLogger(__name__)
SNAPSHOT_FROM = 1024 * 1024  # bytes of changes from which on a snapshot is worth its while
ROOM = 256 * 1024  # bytes that are kept ready behind the log


class MetadataLog:
    """The newest file of a metadata log. Any thread may call, one call at a time. Everything blocks."""

    def __init__(self, files: OpenFiles, contents: MetadataContents, *, syncs: bool = True) -> None:
        """Go on behind what was found; a torn tail is cut off, and a damaged file is replaced. Raises OSError.

        Without `syncs` the records are durable elsewhere, and older files stay until remove_before().
        """
        self._files = files
        self._syncs = syncs
        self._path = contents.path
        self._end, self._size, self._snapshot_size = contents.end, contents.size, contents.snapshot_size
        self._room_end = 0  # up to here the file has room that is zeros until it is written
        self._try_snapshot_at = 0  # not before the file has this size
        self._is_lost = False  # may the file on disk differ from what was durable? Then a new one must begin
        self._copy = MetadataCopy(files, self._path, contents.copied)
        self._noted = NotedRecord(files, self._path.parent.parent)
        if syncs:
            self._noted.note(self._end.number)  # what is missing was reported
        if contents.damages:
            self._replace_damaged(contents.entries)
            return
        with files.use(str(self._path)) as fd:
            if os.fstat(fd).st_size != self._size:
                os.ftruncate(fd, self._size)
            datasync(fd)  # what a killed broker had written but not synced is read now
        if not contents.copied == contents.copy_size == self._size:
            self._copy.finish(self._size)
        self._remove_others()

    def _replace_damaged(self, entries: Entries) -> None:
        """Begin a new file; if the disk has no room for it now, the next commit tries again."""
        self._is_lost = True
        try:
            self._begin_file(entries)
        except OSError as error:
            logger.warning("%s could not be replaced yet: %s", self._path, error)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def end(self) -> LogEnd | None:
        """Where the log ends; None if that is not known."""
        return None if self._is_lost else LogEnd(self._size, self._end.crc)

    def is_short(self, body: bytes) -> bool:
        """Say whether a commit of these changes is one small write and its sync."""
        return len(body) <= SHORT and not self._is_lost and not self._wants_snapshot

    def commit(self, body: bytes, entries: Entries) -> float:
        """Make a record of changes durable; `entries` is the state before them. Returns how many seconds it took.

        Raises OSError, and then nothing of it is kept.
        """
        started = time.perf_counter()
        if self._is_lost:
            self._begin_file(entries)
        elif self._wants_snapshot:
            self._try_snapshot(entries)
        record, end = encode_record(RecordKind.CHANGES, self._end.number + 1, self._end.crc, body)
        with self._files.use(str(self._path)) as fd:
            if self._syncs:
                self._keep_room(fd, len(record))
            try:
                if self._syncs:
                    write_durably(fd, (record,), self._size)
                else:
                    write_all(fd, record, self._size)
            except OSError as error:
                self._take_back(fd, error)
                raise
        self._end, self._size = end, self._size + len(record)
        self._copy.follow(record, self._size)
        if self._syncs:
            self._noted.note(end.number)
        return time.perf_counter() - started

    def tidy(self) -> None:
        """Give back the room behind the log, durably. Raises OSError."""
        with self._files.use(str(self._path)) as fd:
            os.ftruncate(fd, self._size)
            datasync(fd)
        self._copy.finish(self._size)

    @property
    def _wants_snapshot(self) -> bool:
        changes = self._size - self._snapshot_size
        return changes > max(SNAPSHOT_FROM, self._snapshot_size) and self._size >= self._try_snapshot_at

    def _keep_room(self, fd: int, length: int) -> None:
        if self._size + length > self._room_end:
            self._room_end = self._size + length + ROOM
            reserve(fd, self._size, self._room_end - self._size)

    def _take_back(self, fd: int, failure: OSError) -> None:
        """Cut off what may have been written. After a failed sync that proves nothing: a new file must begin."""
        self._is_lost = isinstance(failure, SyncFailed)
        self._room_end = 0
        try:
            os.ftruncate(fd, self._size)
        except OSError:
            self._is_lost = True

    def _try_snapshot(self, entries: Entries) -> None:
        try:
            self._begin_file(entries)
        except OSError as error:
            if self._is_lost:
                raise
            self._try_snapshot_at = self._size + SNAPSHOT_FROM
            logger.warning("%s goes on without a snapshot, which could not be written: %s", self._path, error)

    def _begin_file(self, entries: Entries) -> None:
        """Begin a new file with a snapshot. Raises OSError; if the new one may have its name then, the log is lost."""
        draft, path = self._path.with_suffix(".new"), log_path(self._path.parent, self._end.number)
        try:
            make_directory(path.parent)
            size, end = write_snapshot(draft, entries, self._end)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise
        self._is_lost = True
        self._files.forget(str(self._path), str(path))
        os.replace(draft, path)
        sync_directory(path.parent)
        self._path, self._end, self._size, self._snapshot_size = path, end, size, size
        self._room_end, self._try_snapshot_at, self._is_lost = 0, 0, False
        self._copy.forget()
        self._copy = MetadataCopy(self._files, path)
        self._copy.finish(size)
        if self._syncs:
            self._remove_others()

    def remove_before(self, path: Path) -> None:
        """Remove the files that are older than this one."""
        with suppress(OSError):
            for each in log_paths(path.parent):
                if each.name < path.name:
                    each.unlink(missing_ok=True)
                    copy_of(each).unlink(missing_ok=True)

    def _remove_others(self) -> None:
        """Remove older files and what interrupted snapshots left. A file that will not go waits for the next time."""
        with suppress(OSError):
            drafts = self._path.parent.glob("*.new")
            others = [each for each in log_paths(self._path.parent) if each != self._path]
            for path in [*drafts, *others, *map(copy_of, others)]:
                path.unlink(missing_ok=True)


def write_snapshot(path: Path, entries: Entries, end: ChainEnd) -> tuple[int, ChainEnd]:
    """Write and sync a file that begins with the state up to `end`; returns its size and its end. Raises OSError."""
    fd = create_file(path)
    try:
        size, last = 0, end
        for record, its_end in encode_snapshot(entries, end):
            write_all(fd, record, size)
            size, last = size + len(record), its_end
        datasync(fd)
    finally:
        os.close(fd)
    return size, last


def create_log(directory: Path, entries: Entries) -> None:
    """Make the first file of a metadata log and its copy durably, in place of what an interrupted attempt left.

    Raises OSError.
    """
    path = log_path(directory, 0)
    draft = path.with_suffix(".new")
    if (directory.parent / NOTED).exists():
        (directory.parent / NOTED).unlink()  # it is of another log
    size, _ = write_snapshot(draft, entries, ChainEnd())
    os.replace(draft, path)
    sync_directory(directory)
    files = OpenFiles()
    MetadataCopy(files, path).finish(size)
    files.close()
