"""Which log a segment belongs to: the first range of its first seal says so.

It is a range of a producer that there is not. A segment of a broker that wrote none says nothing: the first start that
finds it has the metadata note how it begins, and from then on no other segment can take its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from qb.core.wire.errors import LogDamaged
from qb.storage.engine import ProducerRange
from qb.storage.log.sealed_batches import RANGE, SEAL, SEAL_HEAD, BadBatch, Read, walk

IDENTITY = 2**64 - 1  # as the id of a producer
MARKED = 4096  # bytes of a segment that its mark covers, at most


def identity_of(directory: Path) -> ProducerRange:
    """Return what the segments of the partition in this directory say: a hash of the topic's name, and its number."""
    topic = blake2b(directory.parent.name.encode(), digest_size=8).digest()
    partition = int(directory.name) if directory.name.isdigit() else 0
    return ProducerRange(IDENTITY, int.from_bytes(topic), partition, 0)


def without_identity(ranges: Iterable[ProducerRange]) -> list[ProducerRange]:
    """Return what the first seal of a segment says of producers, for a log of another name."""
    return [each for each in ranges if each.producer_id != IDENTITY]


class SegmentMark(NamedTuple):
    """How a segment begins that does not say whose it is."""

    base: int
    length: int  # bytes that were proved
    crc: int  # of them


def mark_of(read: Read, base: int, size: int, noted: SegmentMark | None) -> SegmentMark:
    """Return the mark of a segment: the one that is noted, if that has its full length, else of what can be proved."""
    if noted and noted.length == MARKED:
        return noted
    proved = 0
    with suppress(BadBatch):
        for batch in walk(read, 0, size, base):
            proved = batch.end
            if proved >= MARKED:
                break
    data = read(0, min(MARKED, proved))
    return SegmentMark(base, len(data), crc32(data))


def check_identity(read: Read, log: str, directory: Path, marks: Mapping[int, SegmentMark]) -> bool:
    """Return whether a segment says itself whose it is. `marks`: those of others, by the offset that they begin with.

    Raises LogDamaged if it is of another log; its seal is proved elsewhere.
    """
    data = read(0, SEAL_HEAD.size + RANGE.size)
    if len(data) >= SEAL_HEAD.size + RANGE.size and SEAL_HEAD.unpack_from(data)[1] == SEAL:
        said = ProducerRange(*RANGE.unpack_from(data, SEAL_HEAD.size))
        if said == identity_of(directory):
            return True
        if said.producer_id == IDENTITY:
            raise LogDamaged(log, 0, "it is a segment of another partition, or of a topic of another name")
    noted = marks.get(int(Path(log).name[:20]))
    if noted and crc32(read(0, noted.length)) != noted.crc:
        raise LogDamaged(log, 0, "it does not begin as when it was marked: it is damaged, or a segment of another log")
    return False
