"""The byte layout of the metadata log, as docs/STORAGE.md gives it; nothing here does I/O."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import IntEnum
from itertools import pairwise, product
from typing import NamedTuple

import msgspec
from isal.isal_zlib import crc32

HEAD = struct.Struct(">IIQII")  # length of the record, kind, number, crc32 of the record before, crc32 of this one
_CHANGE = struct.Struct(">IIQ")  # length of the key, length of the value, version
_CRC_AT = HEAD.size - 4
_REMOVED = 2**32 - 1  # as the length of a value
_KIND_STARTS = b"QBM"
MOST_DIFFERENCES = 8  # at which two damaged copies of a record may differ to be put together
NEAR, BLOCK = (
    16,
    4096,
)  # bytes: differences that are nearer count as one if there are too many; what is compared at a time
PART_BYTES = 1024 * 1024  # of a snapshot that go into one record, about


class RecordKind(IntEnum):
    """What the body of a record is."""

    SNAPSHOT_PART = int.from_bytes(_KIND_STARTS + b"p")
    SNAPSHOT = int.from_bytes(_KIND_STARTS + b"s")  # its last part
    CHANGES = int.from_bytes(_KIND_STARTS + b"c")


_KINDS = frozenset(RecordKind)


class StoredValue(msgspec.Struct, frozen=True, gc=False):
    """A value as it is stored: JSON, and how many changes its key has had. There may be millions of them."""

    data: bytes
    version: int


Change = tuple[str, StoredValue | None]  # None: the key is removed
Entries = dict[str, StoredValue]


class ChainEnd(NamedTuple):
    """The last record of a chain: what the next one continues."""

    number: int = 0
    crc: int = 0


class MetadataRecord(NamedTuple):
    """A record whose checksum holds."""

    kind: int
    number: int
    previous: int
    crc: int
    body: memoryview

    @property
    def end(self) -> ChainEnd:
        return ChainEnd(self.number, self.crc)


class BadRecord(Exception):
    """Why bytes are not the record that should stand there."""


# Bodies


def encode_changes(changes: Iterable[Change]) -> bytes:
    """Return the changes as the body of a record."""
    parts: list[bytes] = []
    for key, value in changes:
        name = key.encode()
        if value is None:
            parts += (_CHANGE.pack(len(name), _REMOVED, 0), name)
        else:
            parts += (_CHANGE.pack(len(name), len(value.data), value.version), name, value.data)
    return b"".join(parts)


def decode_changes(body: bytes | memoryview) -> Iterator[Change]:
    """Yield the changes of a body. Raises BadRecord."""
    view, at = memoryview(body), 0
    while at < len(view):
        try:
            key_length, value_length, version = _CHANGE.unpack_from(view, at)
            at += _CHANGE.size + key_length
            key = str(view[at - key_length : at], "utf-8")
        except (struct.error, UnicodeDecodeError) as error:
            raise BadRecord(f"its changes cannot be read: {error}") from None
        length = 0 if value_length == _REMOVED else value_length
        if at + length > len(view):
            raise BadRecord("its changes are longer than the record")
        yield key, None if value_length == _REMOVED else StoredValue(bytes(view[at : at + length]), version)
        at += length


def apply_changes(entries: Entries, changes: Mapping[str, StoredValue | None] | Iterable[Change]) -> None:
    """Make the changes of one record part of the state."""
    for key, value in changes.items() if isinstance(changes, Mapping) else changes:
        if value is None:
            entries.pop(key, None)
        else:
            entries[key] = value


# Records


def encode_record(kind: RecordKind, number: int, previous: int, body: bytes) -> tuple[bytes, ChainEnd]:
    """Return a record behind the one with the checksum `previous`, and the end of the chain that it makes."""
    head = HEAD.pack(HEAD.size + len(body), kind, number, previous, 0)[:_CRC_AT]
    crc = crc32(body, crc32(head))
    return head + crc.to_bytes(4) + body, ChainEnd(number, crc)


def encode_snapshot(entries: Entries, end: ChainEnd) -> Iterator[tuple[bytes, ChainEnd]]:
    """Yield the records of a snapshot of everything up to `end`, each with the end of the chain that it makes."""
    number, previous = end
    part: list[Change] = []
    size = 0
    for key, value in entries.items():
        if size >= PART_BYTES:
            record, (_, previous) = encode_record(RecordKind.SNAPSHOT_PART, number, previous, encode_changes(part))
            yield record, ChainEnd(number, previous)
            part, size = [], 0
        part.append((key, value))
        size += len(key) + len(value.data)
    yield encode_record(RecordKind.SNAPSHOT, number, previous, encode_changes(part))


def length_of(head: bytes) -> int:
    """Return how long the record with this head says it is. Raises BadRecord."""
    if len(head) < HEAD.size:
        raise BadRecord("the file ends within the head of a record")
    length, kind, _, _, _ = HEAD.unpack(head)
    if length < HEAD.size or kind not in _KINDS:
        raise BadRecord("here stands no record")
    return length  # type: ignore[no-any-return]


def decode_record(data: bytes | memoryview) -> MetadataRecord:
    """Return the record that these bytes are, if its checksum holds. Raises BadRecord."""
    view = memoryview(data)
    length, kind, number, previous, crc = HEAD.unpack_from(view)
    if length != len(view):
        raise BadRecord("the file ends within a record")
    if crc != crc32(view[HEAD.size :], crc32(view[:_CRC_AT])):
        raise BadRecord("the checksum of the record does not match")
    return MetadataRecord(kind, number, previous, crc, view[HEAD.size :])


def combined(one: bytes, other: bytes) -> MetadataRecord | None:
    """Return the record of which both are damaged copies, if they are damaged at different bytes; else None.

    Where they differ, one of the two is right: the checksum says which. A few such ranges are tried, since each of them
    doubles what the checksum must reject.
    """
    if len(one) < HEAD.size or one == other:
        return None
    differing = [at for at in _differing_blocks(one, other) if one[at] != other[at]]
    for nearest in (0, 1, NEAR):
        starts = [at for before, at in pairwise([-NEAR - 1, *differing]) if at - before > nearest]
        if len(starts) <= MOST_DIFFERENCES:
            ends = [differing[bisect_left(differing, start) - 1] + 1 for start in starts[1:]] + [differing[-1] + 1]
            for choice in product((False, True), repeat=len(starts)):
                candidate = bytearray(one)
                for start, end, is_other in zip(starts, ends, choice, strict=True):
                    if is_other:
                        candidate[start:end] = other[start:end]
                with suppress(BadRecord):
                    return decode_record(bytes(candidate))
    return None


def possible_lengths(one: bytes, other: bytes) -> set[int]:
    """Return what the first 4 bytes of a record may say if each of them is right in one of two copies."""
    return {int.from_bytes(each) for each in product(*zip(one, other, strict=True))} - {0}


def _differing_blocks(one: bytes, other: bytes) -> Iterator[int]:
    """Yield the positions of blocks that are not the same in both."""
    for start in range(0, len(one), BLOCK):
        if one[start : start + BLOCK] != other[start : start + BLOCK]:
            yield from range(start, min(start + BLOCK, len(one)))


def check_order(before: MetadataRecord | None, record: MetadataRecord, first_number: int) -> None:
    """Raises BadRecord unless the record may follow the one before, or begin the file of that number."""
    if before is None:
        follows = record.kind != RecordKind.CHANGES and record.number == first_number
    elif record.previous != before.crc:
        raise BadRecord("the record does not continue the one before it")
    elif before.kind == RecordKind.SNAPSHOT_PART:
        follows = record.kind != RecordKind.CHANGES and record.number == before.number
    else:
        follows = record.kind == RecordKind.CHANGES and record.number == before.number + 1
    if not follows:
        raise BadRecord(f"record {record.number} does not belong here")


def holds_later_record(tail: bytes, number: int) -> bool:
    """Say whether a whole record after the one of this number stands in the bytes: then they are no torn tail."""
    return any(record.number > number for _, record in whole_records(tail))


def whole_records(tail: bytes) -> Iterator[tuple[int, MetadataRecord]]:
    """Yield where in the bytes whole records stand, whatever lies between them."""
    view, hit = memoryview(tail), tail.find(_KIND_STARTS)
    while hit >= 0:
        start = hit - 4  # the length comes before the kind
        with suppress(BadRecord):
            length = length_of(tail[start : start + HEAD.size]) if start >= 0 else 0
            if length:
                yield start, decode_record(view[start : start + length])
        hit = tail.find(_KIND_STARTS, hit + 1)
