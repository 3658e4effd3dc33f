"""What a FETCH asks for, and the messages in its answer."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple, overload

from qb.clients.protocol.conversation import check_success
from qb.clients.protocol.message import IndexedFrameSource, Message
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import Frame

EARLIEST, LATEST = -2, -1  # offsets with a meaning of their own, as in Kafka


class FetchRequest(NamedTuple):
    """Messages of one partition from an offset on, how much of them, and how long to wait for the first."""

    topic: str
    partition: int
    offset: int
    max_messages: int = 500
    max_bytes: int = 1 << 20
    max_wait: float = 0.0
    min_bytes: int = 1
    consistent: bool = False

    def properties(self) -> dict[str, str]:
        """Return the properties of the FETCH frame, which asks for an index too."""
        given = self._asdict()
        flags = {"consistent": "1"} if given.pop("consistent") else {}
        return {name: str(value) for name, value in given.items()} | {"index": "1"} | flags


class BulkFetchRequest(NamedTuple):
    """Whole batches of one partition from the one on that holds an offset, until they have so many bytes."""

    topic: str
    partition: int
    offset: int
    max_bytes: int

    def properties(self) -> dict[str, str]:
        """Return the properties of the FETCH frame."""
        return {name: str(value) for name, value in self._asdict().items()} | {"bulk": "1"}


def consistently(wanted: bool) -> dict[str, bool]:
    """Return the argument of a request that is to be answered consistently; a broker that does not know it refuses."""
    return {"consistent": True} if wanted else {}


class Fetched(Sequence[Message]):
    """Messages with consecutive offsets, made as they are asked for: a loop over them has one in memory at a time.

    Args:
        source: The stored frames.
        next_offset: Where to fetch what follows them; kept as the attribute `next_offset`.
    """

    def __init__(self, source: IndexedFrameSource, next_offset: int) -> None:
        self._source = source
        self.next_offset = next_offset

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._source)

    @overload
    def __getitem__(self, place: int) -> Message: ...
    @overload
    def __getitem__(self, place: slice) -> list[Message]: ...
    def __getitem__(self, place: int | slice) -> Message | list[Message]:
        return list(self)[place] if isinstance(place, slice) else self._source.message(range(len(self))[place])

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[Message]) -> list[Message]:
        return [*self, *other]

    def __radd__(self, other: Iterable[Message]) -> list[Message]:
        return [*other, *self]

    def __repr__(self) -> str:
        return f"<{len(self)} messages, the next one is {self.next_offset}>"


class PartitionExtent(NamedTuple):
    """What a partition holds: offsets from `first` up to, not including, `next`."""

    first: int
    next: int


def milliseconds(time: datetime | int) -> int:
    """Return a time as ms since 1970; a datetime without a zone is local time."""
    return int(time.timestamp() * 1000) if isinstance(time, datetime) else time


class FetchAnswer(NamedTuple):
    """The answer to a FETCH, its messages not read yet."""

    source: IndexedFrameSource
    offset: int  # of the first
    count: int  # type: ignore[assignment]  # hides tuple.count(), which is of no use here

    @property
    def next_offset(self) -> int:
        return self.offset + self.count


def portion_in(answer: Frame, wanted: FetchRequest) -> FetchAnswer:
    """Return what a FETCH was answered with. Raises RequestRefused, or PeerMisbehaved."""
    raw = raw_fetched(answer)
    if wanted.consistent and "consistent" not in answer.properties:
        raise PeerMisbehaved("this broker does not know consistent reads: it is older than its client")
    starts = array("I", bytes(raw.starts))
    if sys.byteorder == "little":
        starts.byteswap()
    source = IndexedFrameSource(bytes(raw.frames), wanted.topic, wanted.partition, starts, raw.offset)
    source.check()
    return FetchAnswer(source, raw.offset, raw.count)


def _offset_and_count(answer: Frame) -> tuple[int, int]:
    check_success(answer)
    try:
        return int(answer.properties["offset"]), int(answer.properties["count"])
    except (KeyError, ValueError) as error:
        raise PeerMisbehaved(f"the answer to a FETCH is without a proper {error}") from None


def count_in(answer: Frame) -> int:
    """Return how many messages a FETCH was answered with, 0 also for a refusal."""
    count = answer.properties.get("count", "")
    return int(count) if count.isdigit() else 0


class RawFetched(NamedTuple):
    """The answer to a FETCH with an index, as bytes, for those who read many messages at once."""

    frames: memoryview  # stored DATA frames; SEAL frames may lie between them
    starts: memoryview  # where each DATA frame starts in them: big-endian u32, less the first of these, modulo 2^32
    offset: int  # of the first
    count: int  # type: ignore[assignment]

    @property
    def next_offset(self) -> int:
        return self.offset + self.count


def raw_fetched(answer: Frame) -> RawFetched:
    """Return what a FETCH with an index was answered with. Raises RequestRefused, or PeerMisbehaved."""
    offset, count = _offset_and_count(answer)
    body = memoryview(answer.body)
    if len(body) < 4 * count:
        raise PeerMisbehaved("the answer to a FETCH is shorter than its index")
    return RawFetched(body[4 * count :], body[: 4 * count], offset, count)


def fetched(portion: FetchAnswer) -> Fetched:
    """Return the messages that a FETCH was answered with."""
    return Fetched(portion.source, portion.next_offset)
