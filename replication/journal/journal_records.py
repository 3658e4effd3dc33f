"""How a record of the journal is laid out, and how a large payload becomes several records."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from isal.isal_zlib import crc32

_HEAD = struct.Struct(">2sBBQQQ")  # magic, version, kind, epoch, writer, previous; crc32 and payload follow
_CRC = struct.Struct(">I")
_FENCE = struct.Struct(">HHH")  # index in the fence, number of its records, window of the new owner; its name follows
_MAGIC, _VERSION = b"QJ", 1

HEAD_BYTES = _HEAD.size + _CRC.size
MOST_RECORD_BYTES = 512 * 1024  # larger payloads are cut
MOST_WINDOW = 255  # appends in flight; a fence of one more record is one atomic batch


class JournalRecordKind(IntEnum):
    """What the payload of a record is."""

    FENCE = 1
    WHOLE = 2
    PART = 3  # a piece of a payload; more follow
    LAST = 4  # its last piece: now the payload exists
    UNKNOWN = 255  # of a later version: only what stands before the payload can be read


_KINDS = frozenset(JournalRecordKind)
Data = bytes | memoryview


class JournalRecord(NamedTuple):
    """One record."""

    kind: JournalRecordKind
    epoch: int
    writer: int  # a random number that its owner drew for this epoch
    previous: int  # position of the valid record before it
    payload: Data


class FenceRecord(NamedTuple):
    """The payload of one record of a fence."""

    index: int  # type: ignore[assignment]  # tuple.index() is not needed here
    count: int  # type: ignore[assignment]
    window: int  # how many appends its owner will have in flight at most
    owner: str


class Fragment(NamedTuple):
    """A payload, or a piece of one, that fits into a record."""

    kind: JournalRecordKind
    data: bytes


def encode(record: JournalRecord) -> bytes:
    """Return the record as it is stored."""
    head = _HEAD.pack(_MAGIC, _VERSION, record.kind, record.epoch, record.writer, record.previous)
    return b"".join((head, _CRC.pack(crc32(record.payload, crc32(head))), record.payload))


def decode(data: Data) -> JournalRecord | None:
    """Return what was stored, or None if it is no record of a journal or is damaged.

    The head is the same in every version. Of a record of a later one no more than that is understood: its kind is
    UNKNOWN.
    """
    if len(data) < HEAD_BYTES or data[:2] != _MAGIC:
        return None
    (crc,) = _CRC.unpack_from(data, _HEAD.size)
    payload = data[HEAD_BYTES:]
    if crc != crc32(payload, crc32(data[: _HEAD.size])):
        return None
    _, version, number, epoch, writer, previous = _HEAD.unpack_from(data)
    kind = JournalRecordKind(number if version == _VERSION and number in _KINDS else JournalRecordKind.UNKNOWN)
    return JournalRecord(kind, epoch, writer, previous, payload)


def encode_fence(fence: FenceRecord) -> bytes:
    """Return the payload of a record of a fence."""
    return _FENCE.pack(fence.index, fence.count, fence.window) + fence.owner.encode()


def decode_fence(payload: Data) -> FenceRecord | None:
    """Return what a record of a fence says, or None if that makes no sense."""
    if len(payload) < _FENCE.size:
        return None
    index, count, window = _FENCE.unpack_from(payload)
    if not (index < count <= MOST_WINDOW + 1 and 0 < window <= MOST_WINDOW):
        return None
    return FenceRecord(index, count, window, bytes(payload[_FENCE.size :]).decode(errors="replace"))


def fragments(payload: bytes, most_record_bytes: int) -> Iterator[Fragment]:
    """Cut a payload so that each piece fits into a record of at most so many bytes."""
    most = most_record_bytes - HEAD_BYTES
    if len(payload) <= most:
        yield Fragment(JournalRecordKind.WHOLE, payload)
        return
    for start in range(0, len(payload), most):
        end = start + most
        yield Fragment(JournalRecordKind.PART if end < len(payload) else JournalRecordKind.LAST, payload[start:end])


class PayloadAssembly:
    """Puts pieces together again. A fence drops the pieces before it: their owner sends all of them again."""

    def __init__(self) -> None:
        self._pieces: list[Data] = []

    def take(self, record: JournalRecord) -> tuple[Data, ...] | None:
        """Take the next valid record; returns the pieces of the payload that is now whole, if there is one."""
        if record.kind is JournalRecordKind.FENCE:
            self._pieces.clear()
            return None
        self._pieces.append(record.payload)
        if record.kind is JournalRecordKind.PART:
            return None
        pieces = tuple(self._pieces)
        self._pieces.clear()
        return pieces
