"""The stored bytes of chosen messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from functools import partial
from itertools import islice, takewhile

from qb.core.wire.frames import HEAD, frame_length
from qb.storage.engine import PartitionLog, StoredChunk

READ_BYTES = 1_048_576


Frames = bytes | memoryview  # a memoryview keeps the whole batch in memory: send it, or copy it to keep it


def cut(chunk: StoredChunk, run: range) -> Frames:
    """Return the frames of the run, all of which are in the chunk; seals that follow them may come along."""
    data, positions = chunk.data, chunk.positions
    first, last = run.start - chunk.first_offset, run[-1] - chunk.first_offset
    end = positions[last] + frame_length(data, positions[last])
    if run.step == 1:
        return memoryview(data)[positions[first] : end]
    starts = positions[first : last + 1 : run.step]
    ends = [*positions[first + 1 : last + 1 : run.step], end]  # a frame reaches to the next one, or to a seal before it
    return b"".join([data[start:end] for start, end in zip(starts, ends, strict=True)])


def collect_recent(log: PartitionLog, runs: Iterable[range], chunk: StoredChunk | None) -> Frames | None:
    """Return the frames of these messages if the chunk or memory has them, else None."""
    collecting = _collecting(runs, chunk)
    try:
        offset = next(collecting)
        while (recent := log.read_recent(offset, READ_BYTES)) is not None:
            offset = collecting.send(recent)
    except StopIteration as done:
        frames: Frames = done.value
        return frames
    return None


async def collect(log: PartitionLog, runs: Iterable[range], chunk: StoredChunk | None) -> Frames:
    """Return the frames of these messages, from the chunk if it has them, else from the log.

    Raises OffsetOutOfRange, LogDamaged.
    """
    collecting = _collecting(runs, chunk)
    try:
        offset = next(collecting)
        while True:
            offset = collecting.send(log.read_recent(offset, READ_BYTES) or await log.read(offset, READ_BYTES))
    except StopIteration as done:
        frames: Frames = done.value
        return frames


def _collecting(runs: Iterable[range], chunk: StoredChunk | None) -> Generator[int, StoredChunk, Frames]:
    """Yield each offset from which more has to be read, to be sent the chunk; returns the frames."""
    parts: list[Frames] = []
    left = deque(runs)
    while left:
        if chunk is None or not chunk.first_offset <= left[0].start < chunk.next_offset:
            chunk = yield left[0].start
        whole = list(takewhile(partial(_has_neighbours, chunk), left))
        if len(whole) > 1:
            parts.append(_cut_many(chunk, whole))
            for _ in whole:
                left.popleft()
        else:
            run = left.popleft()
            here = len(range(run.start, min(run.stop, chunk.next_offset), run.step))
            parts.append(cut(chunk, run[:here]))
            if rest := run[here:]:
                left.appendleft(rest)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _has_neighbours(chunk: StoredChunk, run: range) -> bool:
    """Return whether the chunk has all of a run of neighbours."""
    return run.step == 1 and chunk.first_offset <= run.start and run.stop <= chunk.next_offset


def _cut_many(chunk: StoredChunk, runs: list[range]) -> bytes:
    """Return the frames of runs of neighbours, all of which are in the chunk; a short run costs one slice."""
    first, end = min(run.start for run in runs), max(run.stop for run in runs)
    positions = chunk.positions[first - chunk.first_offset : end - chunk.first_offset + 1]
    borders = [*positions, chunk.end]  # a frame reaches to the next one, or to a seal before it
    return b"".join([chunk.data[borders[run.start - first] : borders[run.stop - first]] for run in runs])


def keys_of(chunk: StoredChunk, count: int) -> list[str | None]:
    """Return the keys of the first `count` messages."""
    data, known = chunk.data, dict[bytes, str | None]()
    keys: list[str | None] = []
    for at in islice(chunk.positions, count):
        start = at + HEAD.size
        encoded = data[start : start + int.from_bytes(data[start - 4 : start], "big")]
        if encoded not in known:
            known[encoded] = _key_in(encoded)
        keys.append(known[encoded])
    return keys


def _key_in(encoded: bytes) -> str | None:
    """Return the first property named `key` of encoded properties, without decoding the others."""
    _, found, value = (b"\0" + encoded).partition(b"\0key=")
    return value[: value.index(b"\0")].decode() if found else None
