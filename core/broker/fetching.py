"""Pulling messages out of a log, and waiting for more."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import repeat
from operator import sub
from typing import NamedTuple

import trio

from qb.core.wire.errors import BadRequest, OffsetOutOfRange
from qb.core.wire.frames import Frame, decode_frame
from qb.storage.engine import PartitionLog, StoredChunk
from qb.storage.log.record_positions import words

Turn = Callable[[], AbstractAsyncContextManager[None]]  # entered to read, left when the messages are the caller's

EARLIEST = -2  # as in Kafka
LATEST = -1


class FetchLimits(NamedTuple):
    """How much a fetch returns, and how long it waits for it."""

    max_messages: int = 500
    max_bytes: int = 1 << 20
    max_wait: float = 0.0
    min_bytes: int = 1
    whole: bool = False  # whole batches, from the one on that holds the offset; max_messages does not count then
    consistent: bool = False  # with everything that was acked before it was asked for, whatever clocks do


def resolve(log: PartitionLog, offset: int) -> int:
    """Return the offset that is meant. Raises OffsetOutOfRange before the first kept one, BadRequest below -2."""
    if offset == EARLIEST:
        return log.first_offset
    if offset == LATEST:
        return log.end_offset
    if offset < 0:
        raise BadRequest(f"offset {offset} is not one: use a number from 0 on, -2 for the earliest, -1 for the end")
    if offset < log.first_offset:
        raise OffsetOutOfRange(log.topic, log.partition, offset, log.first_offset, log.end_offset)
    return offset


async def fetch(log: PartitionLog, offset: int, limits: FetchLimits, turn: Turn = nullcontext) -> StoredChunk:
    """Return messages from `offset` on; waits up to max_wait for min_bytes of them, then returns what there is.

    Messages are read inside `turn()` only: by it a caller with many fetches at once bounds what is held in memory.
    Raises OffsetOutOfRange, BadRequest, LogDamaged.
    """
    offset = resolve(log, offset)
    with trio.move_on_after(limits.max_wait):
        await _wait_for(log, offset, limits, turn)
    async with turn():
        if offset >= log.end_offset:
            await log.read(log.end_offset, 1)  # raises if the log is damaged: then its end means nothing
            return StoredChunk(offset, b"", ())
        if limits.whole:
            return await log.read_whole(offset, limits.max_bytes)
        return (await log.read(offset, limits.max_bytes)).first(limits.max_messages)


async def _wait_for(log: PartitionLog, offset: int, limits: FetchLimits, turn: Turn) -> None:
    """Return when there is enough to return."""
    while True:
        moved = trio.Event()
        stop = log.watch(moved.set)
        try:
            if log.end_offset > offset and (limits.min_bytes <= 1 or await _is_enough(log, offset, limits, turn)):
                return
            await moved.wait()
        finally:
            stop()


async def _is_enough(log: PartitionLog, offset: int, limits: FetchLimits, turn: Turn) -> bool:
    """Is there so much that waiting longer would not bring more in one answer, or as much as was asked for?"""
    async with turn():
        chunk = await log.read(offset, limits.max_bytes)
    return chunk.size >= limits.min_bytes or chunk.next_offset < log.end_offset


def index_of(chunk: StoredChunk) -> bytes:
    """Return where each message starts in the chunk's frames, as big-endian u32."""
    start = chunk.positions[0] if chunk.positions else 0
    index = array("I", map(sub, chunk.positions, repeat(start)) if start else chunk.positions)
    if sys.byteorder == "little":
        index.byteswap()
    return index.tobytes()


def marks_of(chunk: StoredChunk) -> bytes:
    """Return the same counted from elsewhere, modulo 2^32: the reader subtracts the first, and here is less to do."""
    return words(chunk.positions)


def messages(chunk: StoredChunk) -> list[Frame]:
    """Return a chunk's messages as frames, for doors that handle them one by one."""
    return [decode_frame(chunk.data, position) for position in chunk.positions]
