"""Which partition each row goes to, and the runs of frames for each.

The rule is the clients': the partition that the row names, else `crc32(key) % partitions`, else the next in turn.
A turn is a block of rows here, not a single row: long runs are what makes a broker fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa

from pyspark_qb.arrow.rows import Rows
from qb.clients.protocol.client_errors import refusal
from qb.clients.protocol.staged_messages import STAGE_BYTES
from qb.core.wire.errors import Code
from qb.core.wire.errors import UnknownPartition as Refusal

BLOCK = 256 * 1024  # bytes of rows without a key that go to one partition before it is the next one's turn
RUN = STAGE_BYTES  # what is not longer is sent as it is
HELD = 16 * 1024 * 1024  # bytes that wait at most, of all partitions together, to become long runs

_SHIFT = 32  # a target is a number: the topic's index above, the partition below


class FrameRun(NamedTuple):
    """Whole frames, back to back, for one partition."""

    topic: str
    partition: int
    frames: bytearray | memoryview
    rows: int


class Router:
    """Spreads rows over partitions; remembers whose turn it is."""

    def __init__(self, partitions_of: Callable[[str], int], turn: int = 0) -> None:
        """`partitions_of` asks the broker, and is asked once a topic; `turn` is whose turn it is first."""
        self._partitions_of = cache(partitions_of)
        self._turn = turn

    def partitions(self, rows: Rows) -> np.ndarray:
        """Return the partition of each row. Raises UnknownPartition, and what `partitions_of` raises."""
        counts = np.array([self._partitions_of(topic) for topic in rows.topics])
        counts_of = counts[0] if rows.topic_of is None else counts[rows.topic_of]
        chosen: np.ndarray = self._in_turn(len(rows), rows.bodies.nbytes, int(counts.max())) % counts_of
        if rows.keys is not None:
            chosen = np.where(rows.keys.is_valid(), _checksums(rows.keys) % counts_of, chosen)
        if rows.partitions is not None:
            _check_partitions(rows, counts)
            chosen = np.where(rows.partitions.mask, chosen, rows.partitions.data)
        return chosen

    def _in_turn(self, rows: int, size: int, partitions: int) -> np.ndarray:
        """Return the turn of each row: blocks of equal numbers of rows, one after another."""
        blocks = max(1, min(partitions, size // BLOCK, rows))
        turns = self._turn + np.arange(rows) * blocks // rows
        self._turn += blocks
        return turns


def runs_of(rows: Rows, partitions: np.ndarray, frames: pa.LargeBinaryArray) -> Iterator[FrameRun]:
    """Yield the frames in runs; the order within a partition is that of the rows."""
    targets = partitions if rows.topic_of is None else partitions + (rows.topic_of.astype(np.int64) << _SHIFT)
    borders = np.flatnonzero(np.diff(targets))
    if len(borders) and not _in_blocks(rows):
        order = np.argsort(targets, kind="stable")
        targets, frames = targets[order], frames.take(pa.array(order))
        borders = np.flatnonzero(np.diff(targets))
    ends = np.frombuffer(frames.buffers()[1], np.int64)[: len(frames) + 1]
    data = memoryview(frames.buffers()[2])
    for first, last in pairwise([0, *(borders + 1).tolist(), len(targets)]):
        topic, partition = divmod(int(targets[first]), 1 << _SHIFT)
        for start, stop in _cuts(ends, first, last):
            yield FrameRun(rows.topics[topic], partition, data[ends[start] : ends[stop]], stop - start)


def _in_blocks(rows: Rows) -> bool:
    """True if nothing but turns decides where the rows go: then those for the same target are neighbours."""
    return rows.keys is None and rows.partitions is None and rows.topic_of is None


def _checksums(keys: pa.LargeBinaryArray) -> np.ndarray:
    """Return the crc32 of each key; any number for null."""
    coded = keys.dictionary_encode()
    of_unique = np.array([crc32(key) for key in coded.dictionary.to_pylist()] or [0], np.int64)
    checksums: np.ndarray = of_unique[coded.indices.fill_null(0).to_numpy()]
    return checksums


def _check_partitions(rows: Rows, counts: np.ndarray) -> None:
    """Raise UnknownPartition, in the broker's words, if a row names one that there is not."""
    assert rows.partitions is not None
    topic_of = np.zeros(len(rows), np.int64) if rows.topic_of is None else rows.topic_of
    wrong = ~rows.partitions.mask & ((rows.partitions.data < 0) | (rows.partitions.data >= counts[topic_of]))
    if wrong.any():
        row = int(wrong.argmax())
        named = rows.topics[topic_of[row]], int(rows.partitions.data[row]), int(counts[topic_of[row]])
        raise refusal(Code.UNKNOWN_PARTITION, str(Refusal(*named)))


def _cuts(ends: np.ndarray, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the borders of runs of about equal size, none over RUN bytes unless it is a single frame."""
    while first < last:
        left = int(ends[last] - ends[first])
        enough = ends[first] + left // -(-left // RUN)
        stop = max(int(np.searchsorted(ends, enough, "right")) - 1, first + 1)
        yield first, stop
        first = stop


class Gatherer:
    """Joins short runs for the same partition to longer ones, in order."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], tuple[bytearray, int]] = {}
        self._held = 0

    def add(self, run: FrameRun) -> Iterator[FrameRun]:
        """Yield what is long enough now, or cannot wait."""
        target, size = (run.topic, run.partition), len(run.frames)
        frames, count = self._waiting.pop(target, (bytearray(), 0))
        if count and len(frames) + size > RUN:
            yield self._let_go(target, frames, count)
            frames, count = bytearray(), 0
        if not count and 2 * size > RUN:
            yield run
            return
        frames += run.frames
        self._waiting[target] = frames, count + run.rows
        self._held += size
        if self._held > HELD:
            yield from self.rest()

    def rest(self) -> Iterator[FrameRun]:
        """Yield all that still waits."""
        while self._waiting:
            target, (frames, count) = self._waiting.popitem()
            yield self._let_go(target, frames, count)

    def _let_go(self, target: tuple[str, int], frames: bytearray, count: int) -> FrameRun:
        self._held -= len(frames)
        return FrameRun(*target, frames, count)
