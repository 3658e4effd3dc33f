"""The files of the metadata log: what stands in them, proved, without writing.

Every record stands in two files, the log and its copy, at the same place. Where one is damaged, the other is read;
where both are, at different bytes of one record, they are put together.
"""

from __future__ import annotations

import os
from io import BytesIO
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
    combined,
    decode_changes,
    decode_record,
    holds_later_record,
    length_of,
    possible_lengths,
)

DIRECTORY = "metadata"


class MetadataContents(NamedTuple):
    """What a file of the metadata log and its copy hold."""

    path: Path
    entries: Entries
    end: ChainEnd
    size: int  # up to here it is proved
    snapshot_size: int
    torn_bytes: int  # behind that, without the zeros of room that was kept ready
    damages: list[LogDamaged]  # where in the log records were read from the copy instead
    copied: int  # so many bytes of the copy are those of the log
    copy_size: int | None  # None: there is no copy
    was_stopped: bool = False  # has a clean stop left both files whole?

    @property
    def log_end(self) -> LogEnd:
        return LogEnd(self.size, self.end.crc)

    @property
    def copy_note(self) -> str | None:
        """What an operator should know of the copy; that it is a little behind after a kill goes without saying."""
        path, more = copy_of(self.path), "nothing is lost, and the next start writes it anew"
        if self.copy_size is None:
            return f"{path} is missing: {more}"
        least = self.size if self.was_stopped else self.snapshot_size
        if self.copied < least or self.copy_size > self.copied:
            return f"{path} differs from the log from byte {self.copied} on: {more}"
        return None


def log_path(directory: Path, number: int) -> Path:
    """Return the file that begins with the snapshot of everything up to a record."""
    return directory / f"{number:020}.log"


def copy_of(path: Path) -> Path:
    """Return where the copy of a file of the log is kept: in a directory of its own."""
    return path.parent.with_name(f"{path.parent.name}-copy") / path.name


def log_paths(directory: Path) -> list[Path]:
    """Return the files of a metadata log, also those of which only the copy is there; the newest last."""
    both = [each for each in (directory, copy_of(directory / "any").parent) if each.is_dir()]
    names = {name for each in both for name in os.listdir(each)}
    return sorted(directory / name for name in names if len(name) == 24 and name[:20].isdigit() and name[20:] == ".log")


def read_newest(directory: Path) -> MetadataContents:
    """Prove the newest file of a log that has some, which alone counts. Blocks. Raises LogDamaged, OSError."""
    misnamed: list[LogDamaged] = []
    for path in reversed(log_paths(directory)):
        if not _is_misnamed(path):
            contents = read_log(path)
            return contents._replace(damages=[*misnamed, *contents.damages])
        misnamed.append(LogDamaged(str(path), 0, "this is another file of the metadata, under a wrong name"))
    raise misnamed[0]


def _is_misnamed(path: Path) -> bool:
    """Say whether the log or its copy stands there alone and is, as its first record says, another file."""
    found = [each for each in (path, copy_of(path)) if each.is_file()]
    with Records(found[0]) as file:
        try:
            return len(found) == 1 and file.record(0).number != int(path.name[:20])
        except BadRecord:
            return False


def read_log(path: Path) -> MetadataContents:
    """Prove every record and return the state. Blocks. Raises LogDamaged, OSError.

    A record that the log does not have at its place is read from the copy: it was durable in the log before it was
    written there.
    """
    with Records(path) as log, Records(copy_of(path)) as copy:
        entries: Entries = {}
        before: MetadataRecord | None = None
        position = snapshot_size = copied = 0
        damages: list[LogDamaged] = []
        was_whole = True
        while True:
            try:
                record, bad = log.follower(position, before, path), None
            except BadRecord as error:
                record, bad = None, error
            try:
                record = record or _from_copy(log, copy, position, before, path)
                apply_changes(entries, list(decode_changes(record.body)))
            except BadRecord as error:
                torn_bytes = _torn_tail(log, copy, path, position, before, bad or error)
                break
            if bad and was_whole:
                damages.append(LogDamaged(str(path), position, str(bad)))
            was_whole = bad is None
            end = position + HEAD.size + len(record.body)
            if copied == position and (bad or log.read(position, end) == copy.read(position, end)):
                copied = end
            position, before = end, record
            if record.kind == RecordKind.SNAPSHOT:
                snapshot_size = position
        copy_size = copy.size if copy.exists else None
    if before is None or not snapshot_size:
        raise LogDamaged(str(path), position, "the snapshot that begins the file is not whole")
    proved = position, snapshot_size, torn_bytes, damages, copied, copy_size
    return MetadataContents(path, entries, before.end, *proved)


def record_at(log: Records, copy: Records, position: int, before: MetadataRecord | None, path: Path) -> MetadataRecord:
    """Return the record that stands there in the log, in its copy, or in both together. Raises BadRecord."""
    try:
        return log.follower(position, before, path)
    except BadRecord:
        return _from_copy(log, copy, position, before, path)


def _from_copy(log: Records, copy: Records, position: int, before: MetadataRecord | None, path: Path) -> MetadataRecord:
    """Return the record that the log does not have there. Raises BadRecord."""
    try:
        return copy.follower(position, before, path)
    except BadRecord as bad:
        if position + HEAD.size <= min(log.size, copy.size):
            for length in possible_lengths(*(each.read(position, position + 4) for each in (log, copy))):
                ends = position, min(position + length, log.size, copy.size)
                if record := combined(log.read(*ends), copy.read(*ends)):
                    check_order(before, record, int(path.name[:20]))
                    return record
        raise bad


class Records:
    """A file of records; one that is missing has none."""

    def __init__(self, path: Path) -> None:
        self.exists = path.is_file()
        self._file: BinaryIO = path.open("rb", buffering=1024 * 1024) if self.exists else BytesIO()
        self.size = path.stat().st_size if self.exists else 0

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        return self._file.read(max(0, min(end, self.size) - start))

    def tail(self, start: int) -> bytes:
        """Return what stands behind `start`, without the zeros of room that was kept ready."""
        return self.read(start, self.size).rstrip(b"\0")

    def record(self, position: int) -> MetadataRecord:
        """Return the record that begins there. Raises BadRecord."""
        if position >= self.size:
            raise BadRecord("the file ends here" if self.exists else "the file is missing")
        head = self.read(position, position + HEAD.size)
        return decode_record(self.read(position, position + length_of(head)))

    def follower(self, position: int, before: MetadataRecord | None, path: Path) -> MetadataRecord:
        """Return the record that stands there and follows the one before. Raises BadRecord."""
        record = self.record(position)
        check_order(before, record, int(path.name[:20]))
        return record


def _torn_tail(
    log: Records, copy: Records, path: Path, position: int, before: MetadataRecord | None, bad: BadRecord
) -> int:
    """Return how many bytes of a half-written record stand at the end. Raises LogDamaged if it is no tear."""
    tail = log.tail(position)
    if before is None or any(holds_later_record(each, before.number) for each in (tail, copy.tail(position))):
        raise LogDamaged(str(path), position, f"{bad}; and its copy is missing or damaged there too")
    return len(tail)
