"""What the broker promised about stored messages."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, overload


class Receipt(NamedTuple):
    """Where one published message is. Always true in a boolean test: a publish that was not stored raises instead.

    Attributes:
        topic: The topic.
        partition: The partition.
        offset: The offset in it.
        timestamp: The broker's append time, in milliseconds since 1970.
        durability: "replicated": on a quorum of servers; "fsynced": on stable storage; "written": with the operating
            system only; "none": sent by a producer with acks="none", so that it is not known to be stored, and the
            offset is -1.
        duplicate: It was a retry of what was stored already; `offset` is where that is.
        unverified: It was a retry of a number that is stored already, and the broker could not compare the messages,
            since retention has taken the stored one, or its topic was deleted.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int  # the broker's append time, ms since 1970
    durability: str
    duplicate: bool = False  # a retry of what was stored already; `offset` is where it is
    unverified: bool = False  # that could not be compared: what is stored is gone

    @property
    def time(self) -> datetime:
        """The append time in UTC."""
        return datetime.fromtimestamp(self.timestamp / 1000, UTC)


class StoredRun(NamedTuple):
    """Bodies of one publish_many() that follow each other in one partition.

    Attributes:
        start: The number of the first body.
        size: How many bodies there are.
        partition: The partition.
        offset: The offset of the first; the others follow.
    """

    start: int
    size: int
    partition: int
    offset: int


class Offsets(Sequence[int]):
    """The offsets of published bodies, in the order of the bodies; as small as the runs that they form.

    A sequence, equal to any sequence of the same numbers.

    Args:
        runs: Sorted by start, without overlap; kept as the attribute `runs`.

    Example:
        >>> offsets = client.publish_many("orders", [b"a", b"b"])
        >>> list(zip(offsets.partitions, offsets))
    """

    __slots__ = ("_starts", "runs")

    def __init__(self, runs: Sequence[StoredRun] = ()) -> None:
        """`runs` must be sorted by start and must not overlap."""
        self.runs = tuple(_joined(runs))
        self._starts = [0]
        for run in self.runs:
            self._starts.append(self._starts[-1] + run.size)

    @property
    def partitions(self) -> Sequence[int]:
        """The partition of each body."""
        return [run.partition for run in self.runs for _ in range(run.size)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[int]:
        for run in self.runs:
            yield from range(run.offset, run.offset + run.size)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        at = bisect_right(self._starts, position) - 1
        return self.runs[at].offset + position - self._starts[at]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(f"{run.partition}: {run.offset}–{run.offset + run.size - 1}" for run in self.runs[:4])
        return f"<{len(self)} offsets in {len(self.runs)} runs: {shown}{' …' if len(self.runs) > 4 else ''}>"


class SpreadRun(NamedTuple):
    """Bodies of one publish_many, at `offset` and following in one partition; `indexes` says which bodies."""

    indexes: Sequence[int]
    partition: int
    offset: int


class SpreadOffsets(Offsets):
    """The offsets of bodies that went to several partitions in turn.

    They are put in order when the first of them is asked for, and take twelve bytes a body then.
    """

    __slots__ = ("_ordered", "_pieces")

    def __init__(self, pieces: Sequence[SpreadRun]) -> None:
        """No body may be in two pieces."""
        self._pieces: Sequence[SpreadRun] | None = pieces  # until they are in order
        self._ordered: _Ordered | None = None

    def _order(self) -> _Ordered:
        pieces, ordered = self._pieces, self._ordered
        if ordered is None:
            assert pieces is not None
            ordered = self._ordered = _order(pieces)
            self._pieces = None
        return ordered

    def __reduce__(self) -> tuple[type[SpreadOffsets], tuple[list[SpreadRun]]]:
        return SpreadOffsets, ([SpreadRun([run.start], run.partition, run.offset) for run in self._each()],)

    def _each(self) -> list[StoredRun]:
        return [StoredRun(index, 1, partition, offset) for index, partition, offset in zip(*self._order(), strict=True)]

    @property
    def runs(self) -> tuple[StoredRun, ...]:  # type: ignore[override]
        """The runs that neighbours form; mostly of one body each."""
        return tuple(_joined(self._each()))

    @property
    def partitions(self) -> Sequence[int]:
        """The partition of each body."""
        return self._order().partitions

    def __len__(self) -> int:
        pieces = self._pieces
        return len(self._order().offsets) if pieces is None else sum([len(piece.indexes) for piece in pieces])

    def __iter__(self) -> Iterator[int]:
        return iter(self._order().offsets)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        offsets = self._order().offsets
        return list(offsets[index]) if isinstance(index, slice) else offsets[index]

    def __repr__(self) -> str:
        return f"<{len(self)} offsets in {len(set(self.partitions))} partitions>"


class _Ordered(NamedTuple):
    """What is stored, in the order of the bodies."""

    indexes: Sequence[int]
    partitions: array[int]
    offsets: array[int]


def _order(pieces: Sequence[SpreadRun]) -> _Ordered:
    size = max((piece.indexes[-1] + 1 for piece in pieces), default=0)
    offsets, partitions = array("q", [-1]) * size, array("i", [0]) * size
    for indexes, partition, offset in pieces:
        found = array("q", range(offset, offset + len(indexes)))
        if isinstance(indexes, range):
            where = slice(indexes.start, indexes[-1] + 1, indexes.step)
            offsets[where], partitions[where] = found, array("i", [partition]) * len(indexes)
            continue
        for index, each in zip(indexes, found, strict=True):
            offsets[index], partitions[index] = each, partition
    if -1 not in offsets:
        return _Ordered(range(size), partitions, offsets)
    stored = [index for index, offset in enumerate(offsets) if offset >= 0]
    return _Ordered(
        stored, array("i", [partitions[index] for index in stored]), array("q", [offsets[index] for index in stored])
    )


def _joined(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Return `runs` with neighbours made one where nothing lies between them."""
    joined: list[StoredRun] = []
    for run in runs:
        if joined and _follows(joined[-1], run):
            joined[-1] = joined[-1]._replace(size=joined[-1].size + run.size)
        else:
            joined.append(run)
    return joined


def _follows(one: StoredRun, two: StoredRun) -> bool:
    return (one.start + one.size, one.partition, one.offset + one.size) == (two.start, two.partition, two.offset)
