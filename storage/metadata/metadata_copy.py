"""The copy of the metadata log: the same bytes in a second file, read where the log is damaged.

It is written when a record is durable in the log, before its writers are answered, and synced only with a new file and
at a stop. So a kill leaves it whole, and a power cut may take the last half a minute of it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from qb.storage.files import OpenFiles, datasync, make_directory, read_all, sync_directory, write_all
from qb.storage.metadata.metadata_files import copy_of

logger = logging.getLogger(__name__)


class MetadataCopy:
    """The copy of one file of the log. Any thread may call, one call at a time. Everything blocks and raises nothing.

    What the disk refuses is tried again with the next record: no writer is refused for it.
    """

    def __init__(self, files: OpenFiles, log: Path, copied: int = 0) -> None:
        """`copied`: so many bytes of it are those of the log."""
        self._files = files
        self._log, self._path = str(log), copy_of(log)
        self._size = copied
        self._fails = False

    def follow(self, record: bytes, size: int) -> None:
        """Bring it up to the log, which has `size` bytes and ends with this record."""
        try:
            self._write(record, size)
        except OSError as error:
            self._failed(error)
        else:
            self._fails = False

    def finish(self, size: int) -> None:
        """Make it what the log is, which has `size` bytes, durably."""
        try:
            make_directory(self._path.parent)
            self._write(b"", size)
            with self._files.use(str(self._path), create=True) as fd:
                os.ftruncate(fd, size)
                datasync(fd)
            sync_directory(self._path.parent)
        except OSError as error:
            self._failed(error)

    def _write(self, record: bytes, size: int) -> None:
        if self._size + len(record) != size:
            with self._files.use(self._log) as fd:
                record = read_all(fd, size - self._size, self._size)
        with self._files.use(str(self._path), create=True) as fd:
            write_all(fd, record, self._size)
        self._size = size

    def _failed(self, error: OSError) -> None:
        if not self._fails:
            logger.warning("%s is behind the metadata, since it cannot be written now: %s", self._path, error.strerror)
        self._fails = True

    def forget(self) -> None:
        """Give back its descriptor."""
        self._files.forget(str(self._path))
