"""Background work of an engine: drop old segments, prove closed ones."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial

import trio

from qb.core.wire.errors import BrokerError, LogDamaged
from qb.storage.engine import Topic
from qb.storage.faults import Faults
from qb.storage.files import sync_directory
from qb.storage.log.partition_log import LocalLog
from qb.storage.log.retention import ClosedSegment, droppable
from qb.storage.log.sealed_batches import walk
from qb.storage.log.segment import Segment, add_to_index, reader
from qb.storage.log.segment_index import IndexEntries

logger = logging.getLogger(__name__)
SLICE = 256 * 1024  # proved at a time
PAUSE = 0.01  # between two slices, so that proving stays a small part of what the machine does
REOPEN_AFTER = 30.0  # seconds between two tries to open a poisoned log anew

Logs = Callable[[], Iterable[tuple[Topic, LocalLog]]]
Drop = Callable[[LocalLog, int], Awaitable[None]]  # takes so many of the oldest closed segments out of a log


async def drop_segments(log: LocalLog, count: int) -> None:
    """Take the oldest closed segments out of a log, note that durably, and delete them."""
    dropped = log.drop_first(count)
    if not dropped:
        return
    try:
        await log.note_first()
    except BrokerError as error:
        logger.warning("%s stays until after the next start: %s", dropped[0].log_path, error)
    else:
        await trio.to_thread.run_sync(_delete, dropped)


async def drop_forever(
    logs: Logs, clock: Callable[[], int], hours: float, limit: int, interval: float, drop: Drop = drop_segments
) -> None:
    """Sweep again and again; `drop` takes segments out of a log."""
    faults = Faults()
    while True:
        await sweep(logs, clock(), hours, limit, faults, drop)
        await trio.sleep(interval)


async def sweep(logs: Logs, now_ms: int, hours: float, limit: int, faults: Faults, drop: Drop = drop_segments) -> None:
    """Drop what may be dropped in every log; a topic's own limits override these. A fault of one log is its own."""
    for topic, log in list(logs()):
        own_hours = hours if topic.retention_hours is None else topic.retention_hours
        own_limit = limit if topic.retention_bytes is None else topic.retention_bytes
        with faults.contained(f"retention of {log.topic}/{log.partition}"):
            await drop_expired(log, now_ms, own_hours, own_limit, drop)


async def drop_expired(log: LocalLog, now_ms: int, hours: float, limit: int, drop: Drop = drop_segments) -> None:
    """Drop the closed segments of a log that its retention no longer covers."""
    closed = [ClosedSegment(segment.size, segment.last_ms) for segment in log.closed_segments]
    active_size = log.size - sum([segment.size for segment in closed])
    if count := droppable(closed, active_size, now_ms, hours, limit):
        await drop(log, count)
        logger.info("%s/%d: dropped %d segments before %d", log.topic, log.partition, count, log.first_offset)


async def reopen_forever(logs: Logs) -> None:
    """Open poisoned logs anew, again and again."""
    faults = Faults()
    while True:
        await trio.sleep(REOPEN_AFTER)
        for _, log in list(logs()):
            if log.may_reopen:
                with faults.contained(f"opening of {log.topic}/{log.partition}"):
                    await log.reopen()


def _delete(segments: list[Segment]) -> None:
    """Delete oldest first, so that a crash leaves no gap. A file that will not go stays until after the next start."""
    try:
        for segment in segments:
            segment.delete()
        sync_directory(segments[0].directory)
    except OSError as error:
        logger.warning("%s could not be dropped: %s", segments[0].log_path, error)


async def prove(logs: Logs) -> None:
    """Check every seal of the segments that were closed before this start; what is wrong stops its topic."""
    faults = Faults()
    for _, log in list(logs()):
        with faults.contained(f"proving of {log.topic}/{log.partition}"), suppress(LogDamaged):
            # Damage was reported when it was found, and nothing else of the topic is served now.
            for segment in log.closed_segments:
                await _prove_segment(log, segment)


async def _prove_segment(log: LocalLog, segment: Segment) -> None:
    """Walk a segment, a slice at a time, until its end or until the log explains why not. Raises LogDamaged."""
    position, offset, agrees = 0, segment.base_offset, True
    try:
        while position < segment.size:
            prove = partial(_prove_slice, segment, position, offset)
            position, offset, same = await log.look(segment, offset, prove)
            agrees = agrees and same
            await trio.sleep(PAUSE)
        segment.index.believed = segment.index.believed or agrees
    except LogDamaged:
        raise
    except BrokerError as error:
        logger.info("%s was not proved to its end: %s", segment.log_path, error)


def _prove_slice(segment: Segment, position: int, offset: int) -> tuple[int, int, bool]:
    """Prove the batches from `position` on, a slice or at least one of them.

    Returns where to go on, and whether the index agrees.
    """
    entries, number = IndexEntries(), offset - segment.base_offset
    with segment.open() as fd:
        start = position
        for batch in walk(reader(fd), position, segment.size, offset, window=SLICE):
            position, offset = batch.end, batch.next_offset
            add_to_index(entries, batch)
            if position - start >= SLICE:
                break
    return position, offset, segment.index.holds(number, entries.encode())
