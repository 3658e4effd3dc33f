"""Publishes that were sent again, compared with what is stored under their numbers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from itertools import groupby

from qb.core.pacing import spend
from qb.core.wire.errors import OffsetOutOfRange, UnknownTopic
from qb.core.wire.frames import frame_length
from qb.storage.engine import AppendRun, PartitionLog

_TIMESTAMP = struct.Struct(">Q")
_TIMESTAMP_AT = 16  # in a frame


class Found(Enum):
    """What a log has where a publish was stored before."""

    SAME = "the same message"
    OTHER = "another message"
    GONE = "nothing any more"  # retention has taken it, or the topic was deleted


async def compare(run: AppendRun, log: PartitionLog) -> list[tuple[Found, int]]:
    """Say of each message of a run what the log has at its offset, and of how many in a row.

    A run has at most qb.core.pacing.AT_ONCE messages, as NumberedPublishes plans it: they are compared in one step. The
    frames are as they would be stored, but without a timestamp where the publisher gave none. Everything at these
    offsets must be durable, or have been. Raises LogDamaged, Internal.
    """
    found: list[Found] = []
    while len(found) < len(run.positions):
        found += await _compare_some(run, len(found), log)
    return [(each, len(list(row))) for each, row in groupby(found)]


async def _compare_some(run: AppendRun, at: int, log: PartitionLog) -> Sequence[Found]:
    """Compare the messages from number `at` of the run on: one at least."""
    offset, left = run.first_offset + at, len(run.positions) - at
    try:
        chunk = await log.read_durable(offset, len(run.data))
    except UnknownTopic:
        return [Found.GONE] * left
    except OffsetOutOfRange:
        if offset >= log.first_offset:
            raise
        return [Found.GONE] * min(left, log.first_offset - offset)
    pairs = zip(run.positions[at:], chunk.positions, strict=False)
    spend(left)
    return [_compare_frames(_frame(run.data, sent), _frame(chunk.data, stored)) for sent, stored in pairs]


def _frame(data: bytes | bytearray, at: int) -> bytes | bytearray:
    return data[at : at + frame_length(data, at)]


def _compare_frames(sent: bytes | bytearray, stored: bytes | bytearray) -> Found:
    if sent == stored:
        return Found.SAME
    (timestamp,) = _TIMESTAMP.unpack_from(sent, _TIMESTAMP_AT)
    behind = _TIMESTAMP_AT + _TIMESTAMP.size
    same = not timestamp and sent[:_TIMESTAMP_AT] == stored[:_TIMESTAMP_AT] and sent[behind:] == stored[behind:]
    return Found.SAME if same else Found.OTHER
