"""Prove a data directory whole, without a broker and without writing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec

from qb.core.wire.errors import LogDamaged
from qb.core.wire.frames import HEAD, LENGTH, OVERHEAD
from qb.storage.clean_stop import NAME as CLEAN_STOP
from qb.storage.clean_stop import BadProof, LogEnd, read_proof
from qb.storage.data_directory import VERSION, check_format, check_metadata, read_metadata, without_format
from qb.storage.files import CannotOpen
from qb.storage.log.log_ends import NAME as LOG_ENDS
from qb.storage.log.log_ends import NotedEnd, ends_notes, identity_of, read_ends
from qb.storage.log.log_extents import MARKS, UNKNOWN, LogExtent, dropped_segments, key_of, marks_in
from qb.storage.log.log_recovery import base_offsets, check_stop
from qb.storage.log.sealed_batches import BadBatch, SealedBatch, find_seal, walk
from qb.storage.log.segment import add_to_index, reader, segment_name
from qb.storage.log.segment_identity import SegmentMark, check_identity
from qb.storage.log.segment_index import ENTRY, IndexEntries
from qb.storage.metadata.metadata_files import DIRECTORY as METADATA
from qb.storage.metadata.metadata_files import copy_of, read_newest
from qb.storage.metadata.metadata_records import Entries
from qb.storage.metadata.metadata_recovery import READ_FROM_COPY, checked, notes_on_end, torn_text
from qb.storage.metadata.noted_record import NAME as METADATA_END
from qb.storage.metadata.sqlite_migration import DATABASE
from qb.storage.stages.stage_file import other_stage
from qb.storage.stages.stage_file import walk as walk_stage
from qb.storage.stages.stage_store import NOTED, end_text, missing_stages, proof_key
from qb.storage.topic_directories import TopicDirectories


class Finding(msgspec.Struct, frozen=True):
    """Something that could not be proved, or that an operator may want to know."""

    file: str
    position: int
    what: str

    def __str__(self) -> str:
        return self.what if self.what.startswith(self.file) else f"{self.file}: byte {self.position}: {self.what}"


class VerifyReport(msgspec.Struct):
    """What verify() has seen. The directory is whole if there are no findings; notes are no fault."""

    findings: list[Finding] = []
    notes: list[Finding] = []
    topics: int = 0
    partitions: int = 0
    segments: int = 0
    batches: int = 0
    messages: int = 0
    stages: int = 0
    bytes: int = 0


def verify(data_dir: str | Path) -> VerifyReport:
    """Walk every segment and prove every seal, frame, offset and index entry. Blocks. Raises CannotOpen."""
    root = Path(data_dir)
    report = VerifyReport()
    if not (root / "format").is_file():
        raise CannotOpen(without_format(root))
    version = check_format(root / "format")
    directories = TopicDirectories(root / "topics")
    found = {topic: directories.count_partitions(topic) for topic in directories.names()}
    ends = _last_ends(root, report)
    entries = _entries(root, version, ends, report)
    known = {key.partition("/")[2]: entry for key, entry in entries.items() if key.startswith("topic/")}
    made = {topic: msgspec.json.decode(entry.data) for topic, entry in known.items()}
    partitions = {topic: value["partitions"] for topic, value in made.items()}
    created_ms = {topic: value.get("created_ms", 0) for topic, value in made.items()}
    found_ends = read_ends(root)
    report.notes += [Finding(str(root / LOG_ENDS), 0, note) for note in ends_notes(root, found_ends)]
    for path, _ in directories.unfinished():
        report.notes.append(Finding(str(path), 0, "an unfinished creation or deletion; the next start clears it"))
    for topic in sorted(found.keys() | known.keys()):
        if topic not in known:
            report.notes.append(Finding(str(root / "topics"), 0, f"topic {topic!r} is not in the metadata"))
        report.topics += 1
        for partition in range(max(found.get(topic, 0), partitions.get(topic, 0))):
            directory = directories.partition(topic, partition)
            stopped = (ends or {}).get(directory.relative_to(root).as_posix())
            extent = entries.get(key_of(topic, partition)) or entries.get(key_of(topic))
            noted = LogExtent(*msgspec.json.decode(extent.data)) if extent else UNKNOWN
            identity = identity_of(topic, partition, created_ms.get(topic, 0))
            at_once = found_ends.ends.get(identity, NotedEnd())
            marked = entries.get(key_of(topic, f"{partition}{MARKS}"))
            marks = marks_in(msgspec.json.decode(marked.data)) if marked else {}
            _Partition(report, directory, stopped, noted.up_to(at_once), marks).prove()
    begun = {key.removeprefix(NOTED) for key in entries if key.startswith(NOTED)}
    for path in sorted((root / "staged").glob("*.log")):
        _prove_stage(report, path, path.stem in begun, (ends or {}).get(proof_key(path)))
    left = {root / "staged" / f"{stage_id}.log" for stage_id in begun}
    for path in sorted({path for path in left if not path.exists()}.union(missing_stages(root / "staged", ends or {}))):
        report.findings.append(Finding(str(path), 0, "the stage is missing"))
    return report


def _last_ends(root: Path, report: VerifyReport) -> Mapping[str, LogEnd] | None:
    """Return where the logs ended at the last stop; None if that was no clean one, or its proof is damaged."""
    try:
        return read_proof(root)
    except BadProof as bad:
        report.findings.append(Finding(str(root / CLEAN_STOP), 0, str(bad)))
        return None


def _entries(root: Path, version: int, ends: Mapping[str, LogEnd] | None, report: VerifyReport) -> Entries:
    """Prove the metadata and return it; without anything if it cannot be proved."""
    try:
        return _prove_metadata(root, ends, report) if version == VERSION else _read_unproved(root, report)
    except LogDamaged as damage:
        aside = f"a start is refused; to see what it costs to go on without: qb repair {root}"
        report.findings.append(Finding(damage.file, damage.position, f"{damage.what}; {aside}"))
    except CannotOpen as error:
        report.findings.append(Finding(str(root), 0, str(error)))
    return {}


def _prove_metadata(root: Path, ends: Mapping[str, LogEnd] | None, report: VerifyReport) -> Entries:
    """Prove the newest file of the metadata, also against the last clean stop. Raises what it finds."""
    check_metadata(root)
    contents = read_newest(root / METADATA)
    report.bytes += sum(path.stat().st_size for path in (contents.path, copy_of(contents.path)) if path.exists())
    if ends is not None:
        contents = checked(contents, ends)
    else:
        report.notes += [Finding(str(root / METADATA_END), 0, note) for note in notes_on_end(root, contents)]
    for damage in contents.damages:
        report.findings.append(Finding(damage.file, damage.position, f"{damage.what}; {READ_FROM_COPY}"))
    if contents.torn_bytes:
        report.notes.append(Finding(str(contents.path), contents.size, f"the next start will {torn_text(contents)}"))
    if contents.copy_note:
        report.notes.append(Finding(str(copy_of(contents.path)), contents.copied, contents.copy_note))
    return contents.entries


def _read_unproved(root: Path, report: VerifyReport) -> Entries:
    what = "the metadata is of format 1 and has no checksums; the next start migrates it"
    report.notes.append(Finding(str(root / DATABASE), 0, what))
    return read_metadata(root)


def _prove_stage(report: VerifyReport, path: Path, begun: bool, stopped: LogEnd | None) -> None:
    """Prove every seal of a stage, whose messages cannot be read before they are committed.

    `begun`: has the metadata noted that its beginning was durable?
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        report.stages += 1
        report.bytes += size
        found = LogEnd(0, 0)
        try:
            for record in walk_stage(reader(fd), 0, size):
                if not found.size and (other := other_stage(record, path)):
                    report.findings.append(Finding(str(path), 0, other))
                found = LogEnd(record.end, record.first + record.count)
        except BadBatch as bad:
            rest = reader(fd)(bad.position, size - bad.position)
            if find_seal(rest, bad.offset) is not None:
                report.findings.append(Finding(str(path), bad.position, bad.what))
            else:
                what = f"a torn tail of {len(rest)} bytes; if it was answered, it is lost"
                report.notes.append(Finding(str(path), bad.position, what))
        if begun and not found.size:
            report.findings.append(Finding(str(path), 0, "the head of the stage is missing"))
        if stopped is not None and found != stopped:
            report.findings.append(Finding(str(path), found.size, end_text(stopped)))
    finally:
        os.close(fd)


class _Partition:
    """One partition under proof."""

    def __init__(
        self,
        report: VerifyReport,
        directory: Path,
        stopped: LogEnd | None,
        extent: LogExtent,
        marks: Mapping[int, SegmentMark],
    ) -> None:
        self._report = report
        self._extent = extent  # what it has at least
        self._marks = marks  # of segments that do not say whose they are
        self._stopped = stopped  # where the last clean stop left it
        self._directory = directory
        self._first_base = 0
        self._last_ms = 0

    def prove(self) -> None:
        self._report.partitions += 1
        every = base_offsets(self._directory)
        bases = every[dropped_segments(every, self._extent.first) :]
        if not bases:
            self._find(str(self._directory), 0, "the partition has no log")
            return
        for left in every[: len(every) - len(bases)]:
            what = "retention has dropped this segment; the next start deletes it"
            self._report.notes.append(Finding(segment_name(self._directory, left)[0], 0, what))
        self._first_base = bases[0]
        self._check(partial(self._extent.check_first, str(self._directory), bases[0]))
        for base, following in pairwise([*bases, None]):
            assert base is not None
            self._prove_segment(base, following)

    def _find(self, file: str, position: int, what: str) -> None:
        self._report.findings.append(Finding(file, position, what))

    def _prove_segment(self, base: int, following: int | None) -> None:
        """Prove one segment; `following` is where the next one begins, None for the newest."""
        log, index = segment_name(self._directory, base)
        fd = os.open(log, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            self._check(partial(check_identity, reader(fd), log, self._directory, self._marks))
            entries, end = self._prove_log(fd, log, size, base, following)
        finally:
            os.close(fd)
        self._report.segments += 1
        self._report.bytes += size
        if following is not None and end != following:
            self._find(log, size, f"it ends before offset {end}, but the next segment begins with {following}")
        self._prove_index(index, entries, newest=following is None)

    def _prove_log(self, fd: int, log: str, size: int, base: int, following: int | None) -> tuple[bytes, int]:
        """Return the index entries that the log asks for, and the offset that comes after it."""
        entries = IndexEntries()
        offset, position, written = base, 0, 0
        try:
            for batch in walk(reader(fd), 0, size, base):
                self._prove_batch(log, batch)
                add_to_index(entries, batch)
                offset, position = batch.next_offset, batch.end
        except BadBatch as bad:
            rest = reader(fd)(bad.position, size - bad.position)
            may_tear = following is None and (position > 0 or base > self._first_base)
            written = len(rest.rstrip(b"\0"))  # what follows is room that was kept ready
            torn = may_tear and find_seal(rest, bad.offset) is None and not (self._stopped and written)
            if torn and written:
                what = f"a torn tail of {written} bytes, which the next start cuts; if it was acked, it is lost"
                self._report.notes.append(Finding(log, bad.position, what))
            elif not torn:
                self._find(log, bad.position, bad.what)
                return entries.encode(), offset
        if following is None:
            self._check(partial(self._extent.check_next, log, position, offset))
            missing = self._extent.missing_text(log, offset)
            if missing and not written:
                self._report.notes.append(Finding(log, position, missing))
        if following is None and self._stopped is not None:
            self._check(partial(check_stop, log, LogEnd(position, offset), self._stopped))
        return entries.encode(), offset

    def _check(self, check: Callable[[], object]) -> None:
        """Report what a check that raises LogDamaged finds."""
        try:
            check()
        except LogDamaged as damage:
            self._find(damage.file, damage.position, damage.what)

    def _prove_batch(self, log: str, batch: SealedBatch) -> None:
        """Check what the walk does not: times, and the inner lengths of every frame."""
        self._report.batches += 1
        self._report.messages += len(batch.positions)
        if bool(batch.position) != bool(batch.positions):
            self._find(log, batch.position, "the first batch of a segment, and only that, must be empty")
        if batch.append_ms < self._last_ms:
            self._find(log, batch.position, f"append time {batch.append_ms} is before {self._last_ms}")
        self._last_ms = max(self._last_ms, batch.append_ms)
        for position in batch.positions:
            if not _adds_up(batch.raw, position):
                self._find(log, batch.position + position, "the lengths in this frame do not add up")

    def _prove_index(self, index: str, entries: bytes, *, newest: bool) -> None:
        """Compare the index with what the log says; a crash may leave the newest one short, or not made yet."""
        if not Path(index).exists():
            unused = newest and not entries
            where = self._report.notes if unused else self._report.findings
            where.append(Finding(index, 0, "the index is missing; the next start rebuilds it"))
            return
        stored = Path(index).read_bytes()
        if stored == entries:
            return
        if newest and entries.startswith(stored):
            what = f"the index is {len(entries) - len(stored)} bytes short; the next start rebuilds it"
            self._report.notes.append(Finding(index, len(stored), what))
            return
        wrong = _first_difference(stored, entries)
        self._find(index, wrong, "the index does not match the log from here on; the next start rebuilds it")


def _first_difference(stored: bytes, entries: bytes) -> int:
    """Return where the first index entry stands that is not as it should be."""
    starts = range(0, max(len(stored), len(entries)), ENTRY.size)
    return next(at for at in starts if stored[at : at + ENTRY.size] != entries[at : at + ENTRY.size])


def _adds_up(raw: memoryview, position: int) -> bool:
    total, _, _, _, properties_length = HEAD.unpack_from(raw, position)
    if total < OVERHEAD + properties_length:
        return False
    (body_length,) = LENGTH.unpack_from(raw, position + HEAD.size + properties_length)
    return bool(total == OVERHEAD + properties_length + body_length)
