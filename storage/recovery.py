"""storage.recovery: what a start finds in the directory of one partition.

May import: core.errors, core.frames, storage.batches, storage.files, msgspec, storage.index, storage.remembered,
    storage.segment, the standard library.
Never: trio, other partitions.

Closed segments get a cheap check; the newest one is walked, and a torn tail is cut off it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from core.errors import LogDamaged
from core.frames import HEAD
from storage.batches import DATA, SEAL, SEAL_HEAD, BadBatch, find_seal, walk
from storage.files import OpenFiles
from storage.index import ENTRY
from storage.remembered import Remembered
from storage.segment import Segment, index_entries, reader


class Recovered(msgspec.Struct):
    """One partition, ready for use unless it is damaged."""

    segments: list[Segment] = []
    remembered: Remembered = msgspec.field(default_factory=Remembered)
    cut_bytes: int = 0
    rebuilt_indexes: int = 0
    damage: LogDamaged | None = None


def recover(files: OpenFiles, directory: Path) -> Recovered:
    """Open a partition: prove its newest segment, cut a torn tail, mend indexes. Blocks. Raises OSError."""
    found = Recovered()
    try:
        found.segments = [Segment(files, directory, base) for base in base_offsets(directory)]
        if not found.segments:
            raise LogDamaged(str(directory), 0, "the partition has no log")
        _drop_unborn(found)
        for segment, following in zip(found.segments, found.segments[1:], strict=False):
            _open_closed(found, segment, following.base_offset)
        _open_newest(found, found.segments[-1])
    except LogDamaged as damage:
        found.damage = damage
    return found


def base_offsets(directory: Path) -> list[int]:
    """Return where the segments of a partition begin, in order."""
    if not directory.is_dir():
        return []
    names = [entry.name for entry in os.scandir(directory) if entry.name.endswith(".log")]
    return sorted(int(name[:20]) for name in names if len(name) == 24 and name[:20].isdigit())


def _drop_unborn(found: Recovered) -> None:
    """Delete the newest segment if its first batch was never finished: then nothing was ever acked from it."""
    *older, newest = found.segments
    if not older or _is_born(newest):
        return
    newest.delete()
    found.segments = older


def _is_born(segment: Segment) -> bool:
    with segment.open() as fd:
        end = os.fstat(fd).st_size
        try:
            return next(walk(reader(fd), 0, end, segment.base_offset), None) is not None
        except BadBatch as bad:
            return find_seal(reader(fd)(0, end), bad.offset) is not None


def _open_newest(found: Recovered, segment: Segment) -> None:
    entries: list[bytes] = []
    with segment.open() as fd:
        end = os.fstat(fd).st_size
        try:
            for batch in walk(reader(fd), 0, end, segment.base_offset):
                segment.extend(batch.end, batch.next_offset, batch.append_ms)
                segment.created_ms = segment.created_ms or batch.append_ms
                found.remembered.add(batch.ranges)
                entries.append(index_entries(batch))
        except BadBatch as bad:
            _cut_tear(segment, fd, end, bad)
            found.cut_bytes += end - bad.position
        if not segment.size:
            raise LogDamaged(segment.log_path, 0, "the segment is empty")
    _mend_index(found, segment, b"".join(entries))


def _cut_tear(segment: Segment, fd: int, end: int, bad: BadBatch) -> None:
    """Cut what was never acked. Raises LogDamaged if it must have been."""
    if not bad.position or find_seal(reader(fd)(bad.position, end - bad.position), bad.offset) is not None:
        raise LogDamaged(segment.log_path, bad.position, bad.what)
    os.ftruncate(fd, bad.position)
    os.fsync(fd)


def _open_closed(found: Recovered, segment: Segment, next_base: int) -> None:
    """Open a segment that ends where the next one begins; walk it only if its index does not lead to its end."""
    with segment.open() as fd:
        if _ends_well(segment, fd, next_base):
            return
        entries: list[bytes] = []
        try:
            for batch in walk(reader(fd), 0, os.fstat(fd).st_size, segment.base_offset):
                segment.extend(batch.end, batch.next_offset, batch.append_ms)
                entries.append(index_entries(batch))
        except BadBatch as bad:
            raise LogDamaged(segment.log_path, bad.position, bad.what) from bad
    if segment.next_offset != next_base:
        what = f"it ends before offset {segment.next_offset}, but the next segment begins with {next_base}"
        raise LogDamaged(segment.log_path, segment.size, what)
    _mend_index(found, segment, b"".join(entries))


def _ends_well(segment: Segment, fd: int, next_base: int) -> bool:
    """Follow the last index entry to the last frame and on to the seal that must end the file."""
    read, end, count = reader(fd), os.fstat(fd).st_size, next_base - segment.base_offset
    if not Path(segment.index_path).exists() or os.path.getsize(segment.index_path) != count * ENTRY.size:
        return False
    position, _ = segment.index.entry(count - 1)
    head = read(position, HEAD.size)
    if len(head) < HEAD.size:
        return False
    length, kind, sequence, _, _ = HEAD.unpack(head)
    last = read(position + length, SEAL_HEAD.size)
    if kind != DATA or sequence != next_base - 1 or len(last) < SEAL_HEAD.size:
        return False
    total, kind, first_offset, append_ms, _, _, _, sealed, _ = SEAL_HEAD.unpack(last)
    if kind != SEAL or first_offset + sealed != next_base or position + length + total != end:
        return False
    segment.extend(end, next_base, append_ms)
    segment.index.trust(count)
    return True


def _mend_index(found: Recovered, segment: Segment, entries: bytes) -> None:
    if segment.index.matches(entries):
        segment.index.trust(segment.count)
    else:
        segment.index.replace(entries)
        found.rebuilt_indexes += 1
