"""The byte layout of a log, as docs/STORAGE.md gives it.

A batch is DATA frames and then one SEAL. Nothing here trusts a byte that a seal has not proved.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from isal.isal_zlib import crc32  # the one of zlib, many times as fast

from qb.core.wire.frames import OVERHEAD, MessageType
from qb.storage.engine import ProducerRange

DATA, SEAL = int(MessageType.DATA), int(MessageType.SEAL)
# total_length, type, first offset, append time, properties_length (0), body_length, then crc32, count, data_length
SEAL_HEAD = struct.Struct(">IIQQIIIII")
RANGE = struct.Struct(">QQQI")
_FRAME_START = struct.Struct(">IIQ")  # total_length, type, sequence_number
_SEAL_FRAME = struct.Struct(">IIQQII")  # the head of a seal in three parts, as seal() makes it
_CRC = struct.Struct(">I")
_COUNTS = struct.Struct(">II")
_SEAL_TYPE = struct.pack(">I", SEAL)
WINDOW = 8 * 1024 * 1024  # how much of a file is walked at a time

Read = Callable[[int, int], bytes]  # position, length -> bytes


class SealedBatch(NamedTuple):
    """A batch whose seal proves it."""

    position: int  # in the log
    first_offset: int
    append_ms: int
    positions: Sequence[int]  # where each frame starts, from the batch's start
    ranges: Sequence[ProducerRange]
    raw: memoryview  # the frames and the seal

    @property
    def next_offset(self) -> int:
        return self.first_offset + len(self.positions)

    @property
    def end(self) -> int:
        return self.position + len(self.raw)


class BadBatch(Exception):
    """What begins at `position` is not a sealed batch that starts with `offset`."""

    def __init__(self, position: int, offset: int, what: str) -> None:
        super().__init__(f"byte {position}: {what}")
        self.position, self.offset, self.what = position, offset, what


class IncompleteBatch(Exception):
    """The buffer ends before the batch does; `starts` says how far its frames have been followed."""

    def __init__(self, starts: FrameStarts) -> None:
        super().__init__("the batch goes on")
        self.starts = starts


class FrameStarts:
    """Where the frames of a batch start, as far as they are known."""

    __slots__ = ("at", "kind", "positions")

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.at = 0  # where the row of them ends, as far as it has been followed
        self.kind = 0  # the type of the frame that ends the row


class _Unsealed(Exception):
    """Why the bytes are no batch."""


def seal(
    datas: Iterable[bytes | bytearray | memoryview],
    first_offset: int,
    count: int,
    append_ms: int,
    ranges: Iterable[ProducerRange] = (),
) -> bytes:
    """Return the SEAL frame that goes behind these bytes of DATA frames."""
    crc = data_length = 0
    for data in datas:
        crc = crc32(data, crc)
        data_length += len(data)
    tail = b"".join([RANGE.pack(*one) for one in ranges])
    total = SEAL_HEAD.size + len(tail)
    head = _SEAL_FRAME.pack(total, SEAL, first_offset, append_ms, 0, total - OVERHEAD)
    tail = _COUNTS.pack(count, data_length) + tail
    return head + _CRC.pack(crc32(tail, crc32(head, crc))) + tail


def next_batch(view: memoryview, position: int, first_offset: int, known: FrameStarts | None = None) -> SealedBatch:
    """Return the batch at the front of `view`, which lies at `position` in its log.

    Raises Incomplete when it may go on behind the view, else BadBatch.
    """
    starts = _follow(view, first_offset, known or FrameStarts())
    try:
        append_ms, end = _check_seal(view, starts.at, starts.kind, first_offset, len(starts.positions))
    except IncompleteBatch:
        raise IncompleteBatch(starts) from None
    except _Unsealed as bad:
        raise BadBatch(position, first_offset, f"the batch that begins here is not whole: {bad}") from None
    ranges_at = starts.at + SEAL_HEAD.size
    ranges = [ProducerRange(*one) for one in RANGE.iter_unpack(view[ranges_at:end])] if ranges_at < end else ()
    return SealedBatch(position, first_offset, append_ms, starts.positions, ranges, view[:end])


def prove(view: memoryview, positions: Sequence[int], first_offset: int) -> tuple[int, int]:
    """Prove the batches whose records start at these positions in the log; the view begins with the first of them.

    The last record's seal names the batch that ends there, and so on back to the first: no frame is looked at but the
    last of each batch. Returns the last one's append time, and where in the view it ends. Raises BadBatch.
    """
    base, count, last_one = positions[0], len(positions), (0, 0)
    while count:
        last = positions[count - 1] - base
        try:
            seal_at = last + _FRAME_START.unpack_from(view, last)[0]
            _, kind, sealed_offset, _, _, _, _, _, _ = SEAL_HEAD.unpack_from(view, seal_at)
            number = sealed_offset - first_offset
            if not 0 <= number < count:
                raise BadBatch(base + seal_at, first_offset + count, "the index does not lead to a seal")
            start = positions[number] - base
            append_ms, end = _check_seal(view[start:], seal_at - start, kind, sealed_offset, count - number)
        except _Unsealed as bad:
            raise BadBatch(base + start, sealed_offset, f"the batch that begins here is not whole: {bad}") from None
        except (struct.error, IncompleteBatch):
            raise BadBatch(base + last, first_offset + count - 1, "the index points behind the log") from None
        last_one = last_one if last_one[1] else (append_ms, start + end)
        count = number
    return last_one


def around(view: memoryview, offset: int) -> tuple[int, int]:
    """Return how far before the view's start the batch begins that holds the frame there, and its first offset.

    It is what the batch's seal says, not yet proved. Raises Incomplete, BadBatch.
    """
    starts = _follow(view, offset, FrameStarts())
    positions, seal_at = starts.positions, starts.at
    if len(view) < seal_at + SEAL_HEAD.size:
        raise IncompleteBatch(starts)
    _, kind, first_offset, _, _, _, _, count, data_length = SEAL_HEAD.unpack_from(view, seal_at)
    if kind != SEAL or first_offset + count != offset + len(positions) or data_length < seal_at:
        raise BadBatch(seal_at, offset, "the record's batch has no seal")
    return data_length - seal_at, first_offset


def walk(read: Read, position: int, end: int, offset: int, window: int = WINDOW) -> Iterator[SealedBatch]:
    """Yield every batch from `position` up to `end`; the first one starts with `offset`.

    Raises BadBatch at the first byte that does not belong to one.
    """
    base, view, known = position, memoryview(b""), None
    while position < end:
        try:
            batch = next_batch(view[position - base :], position, offset, known)
        except IncompleteBatch as incomplete:
            have = base + len(view)
            if have >= end:
                raise BadBatch(position, offset, "the batch that begins here ends before its seal") from None
            more = read(have, min(max(window, have - position), end - have))
            if not more:
                raise BadBatch(position, offset, f"the file ends at byte {have}, not at {end}") from None
            base, view = position, memoryview(bytes(view[position - base :]) + more)
            known = incomplete.starts
            continue
        yield batch
        position, offset, known = batch.end, batch.next_offset, None


def find_seal(data: bytes, offset: int) -> int | None:
    """Return where in `data` a valid seal of a batch that holds `offset` or later ones stands, if any does.

    What lies behind a tear was never written, so a valid seal there means damage.
    """
    view = memoryview(data)
    hit = data.find(_SEAL_TYPE)
    while hit >= 0:
        if hit >= 4 and _is_seal(view, hit - 4, offset):
            return hit - 4
        hit = data.find(_SEAL_TYPE, hit + 1)
    return None


def _follow(view: memoryview, first_offset: int, starts: FrameStarts) -> FrameStarts:
    """Follow the DATA frames of a batch to where their row ends. Raises Incomplete."""
    positions, at = starts.positions, starts.at
    unpack, keep, offset = _FRAME_START.unpack_from, positions.append, first_offset + len(positions)
    try:
        length, kind, sequence = unpack(view, at)
        while kind == DATA and sequence == offset:
            keep(at)
            at += length
            offset += 1
            length, kind, sequence = unpack(view, at)
    except struct.error:
        starts.at = at
        raise IncompleteBatch(starts) from None
    starts.at, starts.kind = at, kind
    return starts


def _check_seal(view: memoryview, at: int, kind: int, first_offset: int, count: int) -> tuple[int, int]:
    """Return the append time and where the seal ends that stands at `at`. Raises Incomplete, _Unsealed."""
    if kind != SEAL:
        raise _Unsealed(f"{at} bytes on stands neither message {first_offset + count} nor a seal")
    if len(view) < at + SEAL_HEAD.size:
        raise IncompleteBatch(FrameStarts())
    total, _, sealed_offset, append_ms, no_properties, body_length, crc, sealed_count, data_length = (
        SEAL_HEAD.unpack_from(view, at)
    )
    if no_properties or body_length != total - OVERHEAD or (total - SEAL_HEAD.size) % RANGE.size:
        raise _Unsealed(f"the seal {at} bytes on is malformed")
    if sealed_offset != first_offset or sealed_count != count or data_length != at:
        raise _Unsealed(f"the seal {at} bytes on is for other messages")
    if len(view) < at + total:
        raise IncompleteBatch(FrameStarts())
    if crc != _crc(view, at, at + total):
        raise _Unsealed("the checksum does not match")
    return append_ms, at + total


def _is_seal(view: memoryview, at: int, offset: int) -> bool:
    """Say whether a valid seal stands at `at`, of a batch that holds `offset` or later ones."""
    if len(view) < at + SEAL_HEAD.size:
        return False
    total, _, first_offset, _, no_properties, body_length, crc, count, data_length = SEAL_HEAD.unpack_from(view, at)
    if no_properties or body_length != total - OVERHEAD or total < SEAL_HEAD.size or data_length > at:
        return False
    if not count or first_offset < offset or len(view) < at + total:
        return False
    return bool(crc == _crc(view[at - data_length :], data_length, data_length + total))


def _crc(view: memoryview, seal_at: int, end: int) -> int:
    """Return the checksum of a batch: everything but the four bytes that hold it."""
    crc_at = seal_at + OVERHEAD
    return crc32(view[crc_at + _CRC.size : end], crc32(view[:crc_at]))
