"""The files of the metadata log: what stands in them, proved, without writing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

from qb.core.wire.errors import LogDamaged
from qb.storage.clean_stop import LogEnd
from qb.storage.metadata.metadata_records import (
    HEAD,
    BadRecord,
    ChainEnd,
    Entries,
    MetadataRecord,
    RecordKind,
    apply_changes,
    check_order,
    decode_changes,
    decode_record,
    holds_later_record,
    length_of,
)

DIRECTORY = "metadata"


class MetadataContents(NamedTuple):
    """What a file of the metadata log holds."""

    path: Path
    entries: Entries
    end: ChainEnd
    size: int  # up to here it is proved
    snapshot_size: int
    torn_bytes: int  # behind that, without the zeros of room that was kept ready

    @property
    def log_end(self) -> LogEnd:
        return LogEnd(self.size, self.end.crc)


def log_path(directory: Path, number: int) -> Path:
    """Return the file that begins with the snapshot of everything up to a record."""
    return directory / f"{number:020}.log"


def log_paths(directory: Path) -> list[Path]:
    """Return the files of a metadata log, the newest last: that one alone counts."""
    names = os.listdir(directory) if directory.is_dir() else []
    return sorted(directory / name for name in names if len(name) == 24 and name[:20].isdigit() and name[20:] == ".log")


def read_log(path: Path) -> MetadataContents:
    """Prove every record and return the state. Blocks. Raises LogDamaged, OSError."""
    with path.open("rb", buffering=1024 * 1024) as file:
        file_size = os.fstat(file.fileno()).st_size
        entries: Entries = {}
        before: MetadataRecord | None = None
        position = snapshot_size = torn_bytes = 0
        while position < file_size:
            try:
                record = _next_record(file, file_size - position)
                check_order(before, record, int(path.name[:20]))
                apply_changes(entries, list(decode_changes(record.body)))
            except BadRecord as bad:
                torn_bytes = _torn_tail(file, path, position, before, bad)
                break
            position += HEAD.size + len(record.body)
            before = record
            if record.kind == RecordKind.SNAPSHOT:
                snapshot_size = position
    if before is None or not snapshot_size:
        raise LogDamaged(str(path), position, "the snapshot that begins the file is not whole")
    return MetadataContents(path, entries, before.end, position, snapshot_size, torn_bytes)


def _next_record(file: BinaryIO, left: int) -> MetadataRecord:
    """Read the record that begins here; no more than `left` bytes of the file follow. Raises BadRecord."""
    head = file.read(HEAD.size)
    length = length_of(head)
    if length > left:
        raise BadRecord("the file ends within a record")
    return decode_record(head + file.read(length - HEAD.size))


def _torn_tail(file: BinaryIO, path: Path, position: int, before: MetadataRecord | None, bad: BadRecord) -> int:
    """Return how many bytes of a half-written record stand at the end. Raises LogDamaged if it is no tear."""
    if before is None:
        raise LogDamaged(str(path), position, str(bad))
    file.seek(position)
    tail = file.read().rstrip(b"\0")
    if holds_later_record(tail, before.number):
        raise LogDamaged(str(path), position, str(bad))
    return len(tail)
