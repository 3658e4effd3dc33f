"""What can be proved of a metadata log that no start would take: each record that is whole in one file or from both.

For `qb repair` alone. A start never skips a record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from qb.core.wire.errors import LogDamaged
from qb.storage.clean_stop import LogEnd
from qb.storage.metadata.metadata_files import Records, copy_of, log_paths, record_at
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
    whole_records,
)


class SalvagedMetadata(NamedTuple):
    """What is left, and what it cannot be trusted in."""

    path: Path
    entries: Entries
    end: LogEnd
    last_number: int
    doubtful: frozenset[str]  # keys that no record behind the last damage has set or removed
    damages: list[LogDamaged]
    legible: list[str]  # keys that can still be read in damaged bytes; they prove nothing


class _Salvage:
    """The state as far as it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: Entries = {}
        self.doubtful: set[str] = set()
        self.damages: list[LogDamaged] = []
        self.legible: dict[str, None] = {}
        self.before: MetadataRecord | None = None
        self.position = 0
        self._taken: set[int] = set()  # the checksums of records

    def take(self, record: MetadataRecord, position: int) -> None:
        """Apply a record that stands there."""
        changes = list(decode_changes(record.body))
        apply_changes(self.entries, changes)
        self.doubtful.difference_update([key for key, _ in changes])
        self._taken.add(record.crc)
        self.before, self.position = record, position + HEAD.size + len(record.body)

    def may_take(self, record: MetadataRecord) -> bool:
        """May it come after the last one that was taken, though not at once?"""
        if self.before is None:
            return record.number >= int(self.path.name[:20])
        if record.number == self.before.number:  # another part of the same snapshot
            return self.before.kind == RecordKind.SNAPSHOT_PART and record.crc not in self._taken
        return record.number > self.before.number

    def is_followed_by(self, record: MetadataRecord) -> bool:
        """Does it come at once after the last one that was taken, so that nothing is missing between the two?"""
        try:
            check_order(self.before, record, int(self.path.name[:20]))
        except BadRecord:
            return False
        return True

    def lose(self, damaged: tuple[bytes, ...], why: BadRecord | str) -> None:
        """Note that something is lost where the last record ended: in the bytes that stand there in either file."""
        self.doubtful.update(self.entries)
        self.damages.append(LogDamaged(str(self.path), self.position, str(why)))
        for each in damaged:
            self.legible.update(dict.fromkeys(_legible_keys(each)))

    def end(self) -> SalvagedMetadata:
        last = self.before.end if self.before else ChainEnd()
        left = frozenset(self.doubtful & self.entries.keys())
        end = LogEnd(self.position, last.crc)
        return SalvagedMetadata(self.path, self.entries, end, last.number, left, self.damages, [*self.legible])


def salvage(directory: Path) -> SalvagedMetadata:
    """Read whatever is whole of the newest file of a log and its copy. Blocks. Raises OSError."""
    paths = log_paths(directory)
    if not paths:
        gone = _Salvage(directory)
        gone.lose((), "there is no metadata")
        return gone.end()
    found = _Salvage(paths[-1])
    with Records(found.path) as log, Records(copy_of(found.path)) as copy:
        whole: list[tuple[int, MetadataRecord]] | None = None
        while True:
            at = found.position
            try:
                found.take(record_at(log, copy, at, found.before, found.path), at)
                continue
            except BadRecord as bad:
                why = bad
            if whole is None:
                whole = [each for file in (log, copy) for each in whole_records(file.read(0, file.size))]
            position, record = _first_later(whole, found) or (max(log.size, copy.size), None)
            damaged = log.read(at, max(at, position)).rstrip(b"\0"), copy.read(at, max(at, position)).rstrip(b"\0")
            if found.before is None or (not found.is_followed_by(record) if record else any(damaged)):
                found.lose(damaged, why)
            if record is None:
                return found.end()
            found.take(record, position)


def _first_later(whole: Sequence[tuple[int, MetadataRecord]], found: _Salvage) -> tuple[int, MetadataRecord] | None:
    """Return the first record that comes after those that were taken, wherever it stands."""
    later = [(position, record) for position, record in whole if found.may_take(record)]
    return min(later, key=lambda each: (each[1].number, each[0]), default=None)


def _legible_keys(damaged: bytes) -> Iterator[str]:
    """Yield the keys that can be read in a record whose checksum does not hold, up to the first that makes no sense."""
    with suppress(BadRecord):
        for key, _ in decode_changes(damaged[HEAD.size :]):
            if "/" not in key or not key.isprintable():
                return
            yield key
