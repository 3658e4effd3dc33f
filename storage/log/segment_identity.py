"""Which log a segment belongs to: the first range of its first seal says so.

It is a range of a producer that there is not. A segment of a broker that wrote none says nothing, and is believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from qb.core.wire.errors import LogDamaged
from qb.storage.engine import ProducerRange
from qb.storage.log.sealed_batches import RANGE, SEAL, SEAL_HEAD, Read

IDENTITY = 2**64 - 1  # as the id of a producer


def identity_of(directory: Path) -> ProducerRange:
    """Return what the segments of the partition in this directory say: a hash of the topic's name, and its number."""
    topic = blake2b(directory.parent.name.encode(), digest_size=8).digest()
    partition = int(directory.name) if directory.name.isdigit() else 0
    return ProducerRange(IDENTITY, int.from_bytes(topic), partition, 0)


def without_identity(ranges: Iterable[ProducerRange]) -> list[ProducerRange]:
    """Return what the first seal of a segment says of producers, for a log of another name."""
    return [each for each in ranges if each.producer_id != IDENTITY]


def check_identity(read: Read, log: str, directory: Path) -> None:
    """Raises LogDamaged if a segment says that it belongs to another log; its seal is proved elsewhere."""
    data = read(0, SEAL_HEAD.size + RANGE.size)
    if len(data) < SEAL_HEAD.size + RANGE.size or SEAL_HEAD.unpack_from(data)[1] != SEAL:
        return
    said = ProducerRange(*RANGE.unpack_from(data, SEAL_HEAD.size))
    if said.producer_id == IDENTITY and said != identity_of(directory):
        raise LogDamaged(log, 0, "it is a segment of another partition, or of a topic of another name")
