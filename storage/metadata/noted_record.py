"""Which record of the metadata was the last, written at once and not synced: what a kill must leave.

A kill takes nothing that was written to a file, synced or not; a power cut may take the last half a minute of this one,
and then less is proved, and nothing wrong. So both files of the metadata cannot be replaced by older ones unnoticed.
"""

from __future__ import annotations

import logging
import struct
from pathlib import Path

from isal.isal_zlib import crc32

from qb.core.wire.errors import LogDamaged
from qb.storage.files import OpenFiles, write_all
from qb.storage.metadata.metadata_files import MetadataContents

logger = logging.getLogger(__name__)
NAME = "metadata-end"
_NUMBER, _NOTE = struct.Struct(">Q"), struct.Struct(">QI")  # number of the record; and crc32 of that


class BadNote(Exception):
    """The note is not what was written; nothing is lost by that."""


def read_noted(data_dir: Path) -> int:
    """Return the number of the last record that was noted; 0 if none was. Blocks. Raises BadNote, OSError."""
    path = data_dir / NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    if len(data) != _NOTE.size or _NOTE.unpack(data)[1] != crc32(data[: _NUMBER.size]):
        raise BadNote(f"{path} is not what was written: nothing is lost, and the next change writes it anew")
    return int(_NOTE.unpack(data)[0])


def missing_text(contents: MetadataContents, noted: int) -> str | None:
    """Return the sentence for the operator about a last change that is missing to the last byte.

    Raises LogDamaged if more than the last one is missing: no kill takes that.
    """
    if contents.end.number >= noted:
        return None
    what = f"the records end with number {contents.end.number}, but number {noted} was stored"
    if contents.end.number < noted - 1:
        aside = f"to go on with this older state all the same, remove {NAME}"
        raise LogDamaged(str(contents.path), contents.size, f"{what}: this is an older state of the metadata; {aside}")
    return f"{contents.path}: {what}: the last change is missing; if it was acked, it is lost"


class NotedRecord:
    """Notes the last record. Any thread may call, one call at a time."""

    def __init__(self, files: OpenFiles, data_dir: Path) -> None:
        self._files, self._path = files, str(data_dir / NAME)
        self._fails = False

    def note(self, number: int) -> None:
        """Note the number of the record that was stored last: one short write. Raises nothing."""
        data = _NUMBER.pack(number)
        try:
            with self._files.use(self._path, create=True) as fd:
                write_all(fd, _NOTE.pack(number, crc32(data)), 0)
            self._fails = False
        except OSError as error:
            if not self._fails:
                logger.warning("%s cannot be written now: %s", self._path, error.strerror)
            self._fails = True
