"""The segments of one partition, as their files are found.

Only the end of the newest segment is looked at here; what the segments hold is proved when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from pyspark_qb.arrow.decoding import FrameChunk
from pyspark_qb.read.logs import Slice
from pyspark_qb.read.query_offsets import OffsetRange
from pyspark_qb.read.segment_reader import SegmentFiles, opened
from qb.core.wire.errors import LogDamaged
from qb.storage.log.log_recovery import base_offsets
from qb.storage.log.segment import segment_name
from qb.storage.log.segment_index import ENTRY


class FileSlice(Slice):
    """A range that lies in one segment."""

    def __init__(self, range: OffsetRange, files: SegmentFiles) -> None:
        super().__init__(range)
        self._files = files

    def chunks(self) -> Iterator[FrameChunk]:
        with opened(self._files) as segment:
            yield from segment.chunks(self.range.start, self.range.end)


def segments_of(directory: Path) -> list[SegmentFiles]:
    """Return the segments of a partition, without the torn tail of the newest. Raises LogDamaged."""
    bases = base_offsets(directory)
    if not bases:
        raise LogDamaged(str(directory), 0, "the partition has no log")
    closed = [_closed(directory, base, following) for base, following in pairwise(bases)]
    newest = _newest(directory, bases[-1])
    if newest is None and not closed:
        raise LogDamaged(segment_name(directory, bases[-1])[0], 0, "the segment is empty")
    return closed if newest is None else [*closed, newest]


def cut(whole: OffsetRange, segments: list[SegmentFiles]) -> list[FileSlice]:
    """Return a range as slices of the segments that it lies in."""
    pieces = [
        (OffsetRange(whole.partition, max(whole.start, each.base_offset), min(whole.end, each.next_offset)), each)
        for each in segments
    ]
    return [FileSlice(range, files) for range, files in pieces if range.rows > 0]


def _closed(directory: Path, base: int, following: int) -> SegmentFiles:
    """Return a segment that ends where the next one begins; an index of another length is not used."""
    log, index = segment_name(directory, base)
    size, is_indexed = Path(log).stat().st_size, _entries(index) == following - base
    known = (following, size) if is_indexed else (base, 0)
    return SegmentFiles(log, index, base, following, size, *known)


def _newest(directory: Path, base: int) -> SegmentFiles | None:
    """Return the newest segment, or None if it was never finished: then nothing is in it. Raises LogDamaged."""
    log, index = segment_name(directory, base)
    size, indexed = Path(log).stat().st_size, base + _entries(index)
    with opened(SegmentFiles(log, index, base, indexed, size, indexed, size)) as segment:
        return segment.without_tear()


def _entries(index: str) -> int:
    """Return how many entries an index has; none if it is missing."""
    path = Path(index)
    return path.stat().st_size // ENTRY.size if path.exists() else 0
