"""The stored bytes of chosen messages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable
from contextlib import suppress
from itertools import chain, takewhile

from qb.core.wire.columns import FEW, np
from qb.core.wire.frames import HEAD, frame_length
from qb.storage.engine import PartitionLog, StoredChunk

READ_BYTES = 1_048_576
KEYS_REMEMBERED = 10_000  # of a subscription
PARTITIONS_REMEMBERED = 16  # of a subscription, with the keys that were asked for last


Frames = bytes | memoryview  # a memoryview keeps the whole batch in memory: send it, or copy it to keep it


def cut(chunk: StoredChunk, run: range) -> Frames:
    """Return the frames of the run, all of which are in the chunk; seals that follow them may come along."""
    data, positions = chunk.data, chunk.positions
    first, last = run.start - chunk.first_offset, run[-1] - chunk.first_offset
    end = positions[last] + frame_length(data, positions[last])
    return memoryview(data)[positions[first] : end] if run.step == 1 else _cut_many(chunk, [run])


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
    left = list(runs)
    while left:
        if chunk is None or not chunk.first_offset <= left[0].start < chunk.next_offset:
            chunk = yield left[0].start
        first, end = chunk.first_offset, chunk.next_offset
        if first <= min([run.start for run in left]) and max([run.stop for run in left]) <= end:
            whole = left
        else:
            whole = list(takewhile(lambda run: first <= run.start and run[-1] < end, left))  # noqa: B023
        if len(whole) > 1:
            parts.append(_cut_many(chunk, whole))
            left = left[len(whole) :]
        else:
            run = left[0]
            here = len(range(run.start, min(run.stop, end), run.step))
            parts.append(cut(chunk, run[:here]))
            left[:1] = [rest] if (rest := run[here:]) else []
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _cut_many(chunk: StoredChunk, runs: list[range]) -> bytes:
    """Return the frames of runs, all of which are in the chunk; neighbours cost one slice."""
    if sum(map(len, runs)) < FEW:
        return b"".join([bytes(cut(chunk, range(offset, offset + 1))) for run in runs for offset in run])
    data, offsets = chunk.data, np.fromiter(chain.from_iterable(runs), np.int64)
    first = int(offsets.min())
    positions = chunk.positions[first - chunk.first_offset : int(offsets.max()) - chunk.first_offset + 2]
    # A frame reaches to the next one, or to a seal before it.
    borders = np.concatenate([np.asarray(positions, np.int64), (chunk.end,)])
    cuts = np.flatnonzero(np.diff(offsets) != 1)
    starts = borders[offsets[np.concatenate([(0,), cuts + 1])] - first].tolist()
    ends = borders[offsets[np.concatenate([cuts, (-1,)])] - first + 1].tolist()
    return b"".join([data[start:end] for start, end in zip(starts, ends, strict=True)])


class KnownKeys:
    """The keys of messages, which are asked for again and again: by offset, and by their encoded properties."""

    def __init__(self) -> None:
        self._keys: dict[bytes, str | None] = {}
        self._asked: OrderedDict[int, tuple[int, list[str | None]]] = OrderedDict()  # by partition: the first offset

    def of(self, partition: int, chunk: StoredChunk, count: int) -> list[str | None]:
        """Return the keys of the first `count` messages; offsets ascend, so those before them are forgotten."""
        first, keys = self._asked.pop(partition, (0, []))
        known = keys[chunk.first_offset - first :][:count] if chunk.first_offset >= first else []
        if len(known) < count:
            known += self._read(chunk, len(known), count)
        self._asked[partition] = chunk.first_offset, known
        if len(self._asked) > PARTITIONS_REMEMBERED:
            self._asked.popitem(last=False)
        return known

    def _read(self, chunk: StoredChunk, start: int, end: int) -> list[str | None]:
        data, known = chunk.data, self._keys
        if end - start < FEW:
            return [self._key(data, at + HEAD.size) for at in chunk.positions[start:end]]
        starts = np.asarray(chunk.positions[start:end], np.int64) + HEAD.size
        frames = np.frombuffer(data, np.uint8)
        lengths = sum(frames[starts - byte].astype(np.int64) << 8 * (byte - 1) for byte in (1, 2, 3, 4))
        encoded = [data[at:end] for at, end in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]
        with suppress(KeyError):
            return list(map(known.__getitem__, encoded))
        if len(known) > KEYS_REMEMBERED:
            known.clear()
        if unknown := list({*encoded}.difference(known)):
            known.update(zip(unknown, _keys_in(unknown), strict=True))
        return list(map(known.__getitem__, encoded))

    def _key(self, data: bytes, at: int) -> str | None:
        """Return the key in the properties at this position."""
        encoded = data[at : at + int.from_bytes(data[at - 4 : at], "big")]
        if encoded not in self._keys:
            if len(self._keys) > KEYS_REMEMBERED:
                self._keys.clear()
            self._keys[encoded] = _key_in(encoded)
        return self._keys[encoded]


def _keys_in(encoded: list[bytes]) -> list[str | None]:
    """Return the key of each of these properties; all in one go if nothing but the keys differs."""
    before, found, _ = (b"\0" + encoded[0]).partition(b"\0key=")
    begin = b"\0" + before + found
    if found:
        joined = b"\0" + b"\0".join([b"", *encoded])[:-1]  # what is between two of them stands nowhere in one
        keys = joined.decode().split(begin.decode())
        if len(keys) == len(encoded) + 1 and joined.count(b"\0") == begin.count(b"\0") * len(encoded) and not keys[0]:
            return list[str | None](keys[1:])
    return [_key_in(each) for each in encoded]


def _key_in(encoded: bytes) -> str | None:
    """Return the first property named `key` of encoded properties, without decoding the others."""
    _, found, value = (b"\0" + encoded).partition(b"\0key=")
    return value[: value.index(b"\0")].decode() if found else None
