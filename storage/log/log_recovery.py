"""What a start finds in the directory of one partition.

Closed segments get a cheap check; the newest one is walked, and a torn tail is cut off it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from qb.core.wire.errors import LogDamaged
from qb.core.wire.frames import HEAD
from qb.storage.clean_stop import NAME, LogEnd
from qb.storage.files import NO_ROOM, OpenFiles, SyncFailed, datasync, forget_cached
from qb.storage.log.log_extents import UNKNOWN, LogExtent, dropped_segments
from qb.storage.log.producer_ranges import ProducerRanges
from qb.storage.log.sealed_batches import DATA, SEAL, SEAL_HEAD, BadBatch, find_seal, walk
from qb.storage.log.segment import Segment, add_to_index, reader
from qb.storage.log.segment_identity import SegmentMark, check_identity, mark_of
from qb.storage.log.segment_index import ENTRY, IndexEntries

NOTHING_MARKED: Mapping[int, SegmentMark] = {}


class RecoveredLog(msgspec.Struct):
    """One partition, ready for use unless it is damaged."""

    segments: list[Segment] = []
    producer_ranges: ProducerRanges = msgspec.field(default_factory=ProducerRanges)
    cut_from: str = ""  # the file whose torn tail was cut
    cut_bytes: int = 0
    rebuilt_indexes: list[str] = []
    missing: str | None = None  # the sentence about a last batch that is not there
    damage: LogDamaged | None = None
    first_offset: int = 0  # what lies before it was dropped, though its segment may be there
    marks: list[SegmentMark] = []  # of segments that do not say whose they are


def recover(
    files: OpenFiles,
    directory: Path,
    end: LogEnd | None = None,
    extent: LogExtent = UNKNOWN,
    marks: Mapping[int, SegmentMark] = NOTHING_MARKED,
) -> RecoveredLog:
    """Open a partition: prove its newest segment, cut a torn tail, mend indexes. Blocks. Raises OSError.

    `end` is where a clean stop left the log: then nothing of it can be torn. `extent` is what it has at least. `marks`
    are those of segments that do not say whose they are.
    """
    found = RecoveredLog()
    try:
        bases = base_offsets(directory)
        every = [Segment(files, directory, base) for base in bases]
        dropped = every[: dropped_segments(bases, extent.first)]
        found.segments = every[len(dropped) :]
        found.first_offset = extent.first if extent.first < UNKNOWN.first else 0
        if not found.segments:
            raise LogDamaged(str(directory), 0, "the partition has no log")
        extent.check_first(str(directory), found.segments[0].base_offset)
        unfinished = _take_unfinished(found, extent)
        for segment, following in pairwise(found.segments):
            _open_closed(found, segment, following.base_offset, marks)
        must_end = unfinished.base_offset if unfinished else None
        newest = found.segments[-1]
        _open_newest(found, newest, must_end, end, extent, marks)
        found.missing = extent.missing_text(newest.log_path, newest.next_offset)
        for segment in (*dropped, *([unfinished] if unfinished else [])):
            segment.delete()
        _drop_orphans(directory)
    except LogDamaged as damage:
        found.damage = damage
    return found


def prove_again(files: OpenFiles, newest: Segment, extent: LogExtent) -> RecoveredLog:
    """Open a partition again whose newest segment could not be synced, without what was written behind its end.

    The file is read from the disk, not from the system's memory, which may hold what the disk has not. Blocks. Raises
    OSError.
    """
    newest.cut(newest.size)
    with newest.open() as fd:
        datasync(fd)
        forget_cached(fd)
    files.forget(newest.log_path, newest.index_path)
    return recover(files, newest.directory, LogEnd(newest.size, newest.next_offset), extent)


def notes_on(parts: Mapping[str, Sequence[RecoveredLog]]) -> list[str]:
    """Return a sentence for each thing that an operator should know of the topics' partitions."""
    found = [(topic, part) for topic, its in parts.items() for part in its]
    notes = [f"topic {topic!r} is not served: {part.damage}" for topic, part in found if part.damage]
    for _, part in found:
        if part.cut_bytes:
            size = "1 byte" if part.cut_bytes == 1 else f"{part.cut_bytes} bytes"
            what = "the last batch was half written, or damaged later; if it was acked, it is lost"
            notes.append(f"cut {size} off the end of {part.cut_from}: {what}")
        elif part.missing:
            notes.append(part.missing)
    rebuilt = [path for _, part in found for path in part.rebuilt_indexes]
    if rebuilt:  # one sentence for all: after a kill, many may be behind
        others = f" and {len(rebuilt) - 1} more" if len(rebuilt) > 1 else ""
        notes.append(f"rebuilt {rebuilt[0]}{others} from the log: after a kill an index may be behind; nothing is lost")
    return notes


def base_offsets(directory: Path) -> list[int]:
    """Return where the segments of a partition begin, in order."""
    if not directory.is_dir():
        return []
    names = [name for name in os.listdir(directory) if name.endswith(".log")]
    return sorted(int(name[:20]) for name in names if len(name) == 24 and name[:20].isdigit())


def _drop_orphans(directory: Path) -> None:
    """Delete indexes whose log is gone: a segment's log is dropped first."""
    names = set(os.listdir(directory))
    for name in names:
        if name.endswith(".idx") and f"{name[:-4]}.log" not in names:
            (directory / name).unlink()


def _take_unfinished(found: RecoveredLog, extent: LogExtent) -> Segment | None:
    """Take out the newest segment if its first batch was never finished: then nothing was ever acked from it."""
    newest = found.segments[-1]
    if len(found.segments) == 1 or newest.base_offset < extent.next or _is_begun(newest):
        return None
    with newest.open() as fd:
        written = len(reader(fd)(0, os.fstat(fd).st_size).rstrip(b"\0"))
    found.cut_from, found.cut_bytes = newest.log_path, written
    return found.segments.pop()


def _is_begun(segment: Segment) -> bool:
    with segment.open() as fd:
        end = os.fstat(fd).st_size
        try:
            return next(walk(reader(fd), 0, end, segment.base_offset), None) is not None
        except BadBatch as bad:
            return find_seal(reader(fd)(0, end), bad.offset) is not None


def _open_newest(
    found: RecoveredLog,
    segment: Segment,
    must_end: int | None,
    stopped: LogEnd | None,
    extent: LogExtent,
    marks: Mapping[int, SegmentMark],
) -> None:
    """Walk the newest segment; one that was being followed by another has no tear, since all of it was durable."""
    entries = IndexEntries()
    with segment.open() as fd:
        says_whose = check_identity(reader(fd), segment.log_path, segment.directory, marks)
        end = os.fstat(fd).st_size
        try:
            for batch in walk(reader(fd), 0, end, segment.base_offset):
                segment.extend(batch.end, batch.next_offset, batch.append_ms)
                found.producer_ranges.add(batch.ranges)
                add_to_index(entries, batch)
        except BadBatch as bad:
            if must_end is not None:
                raise LogDamaged(segment.log_path, bad.position, bad.what) from bad
            extent.check_next(segment.log_path, bad.position, bad.offset)
            found.cut_from, found.cut_bytes = segment.log_path, _cut_tail(segment, fd, end, bad, stopped)
        if stopped is not None:
            check_stop(segment.log_path, LogEnd(segment.size, segment.next_offset), stopped)
        _sync(segment, fd)
        if not says_whose:
            base = segment.base_offset
            found.marks.append(mark_of(reader(fd), base, segment.size, marks.get(base)))
    if not segment.size:
        raise LogDamaged(segment.log_path, 0, "the segment is empty")
    if must_end is not None:
        _check_end(segment, must_end)
    extent.check_next(segment.log_path, segment.size, segment.next_offset)
    _mend_index(found, segment, entries.encode())


def _sync(segment: Segment, fd: int) -> None:
    """Make durable what was found: what a killed broker had written but not synced may be read and confirmed now."""
    try:
        datasync(fd)
    except SyncFailed as error:
        raise LogDamaged(segment.log_path, segment.size, f"it cannot be synced: {error.strerror}") from error


def _cut_tail(segment: Segment, fd: int, end: int, bad: BadBatch, stopped: LogEnd | None) -> int:
    """Cut what a kill left half written; returns how many bytes that were. Raises LogDamaged if it is no tear."""
    tail = reader(fd)(bad.position, end - bad.position)
    written = len(tail.rstrip(b"\0"))  # the rest is room that was kept ready
    torn = bad.position and find_seal(tail, bad.offset) is None and not (stopped and written)
    if not torn:
        raise LogDamaged(segment.log_path, bad.position, bad.what)
    os.ftruncate(fd, bad.position)
    os.fsync(fd)
    return written


def check_stop(log: str, found: LogEnd, stopped: LogEnd) -> None:
    """Raises LogDamaged unless a log ends where the last clean stop left it."""
    if found != stopped:
        what = (
            f"it ends with offset {found.last}, but the last clean stop left it with {stopped.last}, as {NAME} proves"
        )
        raise LogDamaged(log, found.size, what)


def _open_closed(found: RecoveredLog, segment: Segment, next_base: int, marks: Mapping[int, SegmentMark]) -> None:
    """Open a segment that ends where the next one begins; walk it only if its index does not lead to its end."""
    with segment.open() as fd:
        if not check_identity(reader(fd), segment.log_path, segment.directory, marks):
            base = segment.base_offset
            found.marks.append(mark_of(reader(fd), base, os.fstat(fd).st_size, marks.get(base)))
        if _ends_well(segment, fd, next_base):
            return
        entries = IndexEntries()
        try:
            for batch in walk(reader(fd), 0, os.fstat(fd).st_size, segment.base_offset):
                segment.extend(batch.end, batch.next_offset, batch.append_ms)
                add_to_index(entries, batch)
        except BadBatch as bad:
            raise LogDamaged(segment.log_path, bad.position, bad.what) from bad
    _check_end(segment, next_base)
    _mend_index(found, segment, entries.encode())


def _check_end(segment: Segment, next_base: int) -> None:
    if segment.next_offset != next_base:
        what = f"it ends before offset {segment.next_offset}, but the next segment begins with {next_base}"
        raise LogDamaged(segment.log_path, segment.size, what)


def _ends_well(segment: Segment, fd: int, next_base: int) -> bool:
    """Follow the last index entry to the last frame and on to the seal that must end the file."""
    read, end, count = reader(fd), os.fstat(fd).st_size, next_base - segment.base_offset
    if not Path(segment.index_path).exists() or os.path.getsize(segment.index_path) != count * ENTRY.size:
        return False
    position, _ = segment.index.entry(count - 1)
    head = read(position, HEAD.size) if position < end else b""
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


def _mend_index(found: RecoveredLog, segment: Segment, entries: bytes) -> None:
    if segment.index.matches(entries):
        segment.index.trust(segment.count)
    else:
        _replace_index(segment, entries)
        found.rebuilt_indexes.append(segment.index_path)
    segment.index.believed = True


def _replace_index(segment: Segment, entries: bytes) -> None:
    """Write the index anew; on a full disk it stays in memory until there is room. Raises OSError."""
    try:
        segment.index.replace(entries)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        segment.index.append(entries)
