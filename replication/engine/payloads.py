"""What a cell writes into its journal: batches, changes of the metadata, frames of stages, snapshots.

The layout stands in docs/CLUSTER.md. A payload has no checksum of its own: its record has one.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from qb.replication.journal.journal_records import Data
from qb.replication.journal.journal_store import JournalError
from qb.storage.engine import ProducerRange
from qb.storage.log.recent_batches import StoredBatch
from qb.storage.log.record_positions import words
from qb.storage.log.sealed_batches import RANGE, SEAL_HEAD
from qb.storage.stages.stage_file import StagePiece, StageRecord

VERSION = 1
BATCH, CHANGES, STAGE, SNAPSHOT = 1, 2, 3, 4
_KIND = struct.Struct(">BB")  # kind, version
_BATCH = struct.Struct(">BBHQIIII")  # kind, version, 0, topic id, partition, where the seal begins, count, step
_STAGE = struct.Struct(">BBHQQQI")  # kind, version, 0, stage, messages before, append time in ms, frames
_PIECE = struct.Struct(">II")  # length of the frame, messages in it
_SNAPSHOT = struct.Struct(">BBHI")  # kind, version, 0, length of the head


class UnknownPayload(JournalError):
    """A payload that this version does not know: a newer broker has written it, or a foreign program."""


class BatchPayload(NamedTuple):
    """A sealed batch of one log."""

    uid: int  # of the topic
    partition: int
    batch: StoredBatch
    ranges: Sequence[ProducerRange]


class ChangesPayload(NamedTuple):
    """Changes of the metadata, as its log has them."""

    body: bytes


class StagePayload(NamedTuple):
    """Frames of one stage."""

    stage_id: str
    first: int  # how many messages the stage held before
    append_ms: int
    pieces: Sequence[StagePiece]


class SnapshotPayload(NamedTuple):
    """All metadata, and what a reader must know that begins behind a trim."""

    head: bytes  # JSON
    body: bytes  # as of changes


Payload = BatchPayload | ChangesPayload | StagePayload | SnapshotPayload


def encode_batch(uid: int, partition: int, batch: StoredBatch, ranges: Sequence[ProducerRange]) -> bytes:
    """Return a batch as a payload. Where its frames start goes with it, so that no reader follows them one by one."""
    positions, count = batch.positions, len(batch.positions)
    step = positions.step if isinstance(positions, range) and not positions.start else 0
    packed = b"" if step else words(positions)
    seal_at = batch.size - SEAL_HEAD.size - RANGE.size * len(ranges)
    return b"".join((_BATCH.pack(BATCH, VERSION, 0, uid, partition, seal_at, count, step), packed, *batch.parts))


def encode_metadata(body: bytes) -> bytes:
    """Return changes of the metadata as a payload."""
    return _KIND.pack(CHANGES, VERSION) + body


def encode_stage(stage_id: str, first: int, append_ms: int, pieces: Sequence[StagePiece]) -> bytes:
    """Return frames of a stage as a payload; for whom they are stands in the frames."""
    parts = [_STAGE.pack(STAGE, VERSION, 0, int(stage_id, 16), first, append_ms, len(pieces))]
    for frame, _, count in pieces:
        parts += (_PIECE.pack(len(frame), count), frame)
    return b"".join(parts)


def encode_snapshot_payload(head: bytes, body: bytes) -> bytes:
    """Return a snapshot as a payload."""
    return b"".join((_SNAPSHOT.pack(SNAPSHOT, VERSION, 0, len(head)), head, body))


def decode_payload(*pieces: Data) -> Payload:
    """Return what a payload says that came in these pieces. Raises UnknownPayload."""
    head = pieces[0]
    kind, version = _KIND.unpack_from(head) if len(head) >= _KIND.size else (0, 0)
    if version == VERSION:
        if kind == BATCH:
            return _decode_batch(pieces)
        data = b"".join(pieces)
        if kind == CHANGES:
            return ChangesPayload(data[_KIND.size :])
        if kind == STAGE:
            return _decode_stage(data)
        if kind == SNAPSHOT:
            at = _SNAPSHOT.size + _SNAPSHOT.unpack_from(data)[3]
            return SnapshotPayload(data[_SNAPSHOT.size : at], data[at:])
    raise UnknownPayload(f"kind {kind} of version {version} is unknown here: the broker that wrote it is newer")


def _decode_batch(pieces: Sequence[Data]) -> BatchPayload:
    if len(pieces[0]) < _BATCH.size:
        pieces = (b"".join(pieces),)
    _, _, _, uid, partition, seal_at, count, step = _BATCH.unpack_from(pieces[0])
    at = _BATCH.size + (0 if step else 4 * count)
    if at > len(pieces[0]) or at + seal_at < sum(map(len, pieces[:-1])):
        pieces = (b"".join(pieces),)  # else nothing is copied: a follower only writes it
    positions: Sequence[int] = range(0, count * step, step) if step else _numbers(bytes(pieces[0][_BATCH.size : at]))
    seal = memoryview(pieces[-1])[at + seal_at - sum(map(len, pieces[:-1])) :]
    _, _, first_offset, append_ms, *_ = SEAL_HEAD.unpack_from(seal)
    ranges = [ProducerRange(*one) for one in RANGE.iter_unpack(seal[SEAL_HEAD.size :])]
    parts = (memoryview(pieces[0])[at:], *pieces[1:])
    return BatchPayload(uid, partition, StoredBatch(first_offset, append_ms, parts, positions), ranges)


def _numbers(packed: bytes) -> array[int]:
    numbers = array("I", packed)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def _decode_stage(data: bytes) -> StagePayload:
    _, _, _, stage, first, append_ms, count = _STAGE.unpack_from(data)
    return StagePayload(f"{stage:016x}", first, append_ms, list(_pieces(data, count)))


def _pieces(data: bytes, count: int) -> Iterable[StagePiece]:
    at = _STAGE.size
    for _ in range(count):
        length, messages = _PIECE.unpack_from(data, at)
        at += _PIECE.size + length
        frame = data[at - length : at]
        yield StagePiece(frame, StageRecord(0, messages, memoryview(frame), 0).where, messages)
