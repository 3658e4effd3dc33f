"""clients.fetching: what a FETCH asks for, and the messages in its answer.

May import: core.errors, core.frames, clients.conversation, clients.message, the standard library.
Never: sockets, threads, trio.
"""

from __future__ import annotations

import sys
from array import array
from datetime import datetime
from typing import NamedTuple

from clients.conversation import check_success
from clients.message import IndexedSource, Message, Source
from core.errors import PeerMisbehaved
from core.frames import Frame

EARLIEST, LATEST = -2, -1  # offsets with a meaning of their own, as in Kafka


class Wanted(NamedTuple):
    """Messages of one partition from an offset on, how much of them, and how long to wait for the first."""

    topic: str
    partition: int
    offset: int
    max_messages: int = 500
    max_bytes: int = 1 << 20
    max_wait: float = 0.0
    min_bytes: int = 1

    def properties(self) -> dict[str, str]:
        """Return the properties of the FETCH frame, which asks for an index too."""
        return {name: str(value) for name, value in self._asdict().items()} | {"index": "1"}


class Fetched(list[Message]):
    """Messages with consecutive offsets; `next_offset` is where to fetch what follows them."""

    def __init__(self, messages: list[Message], next_offset: int) -> None:
        super().__init__(messages)
        self.next_offset = next_offset


class Extent(NamedTuple):
    """What a partition holds: offsets from `first` up to, not including, `next`."""

    first: int
    next: int


def milliseconds(time: datetime | int) -> int:
    """Return a time as ms since 1970; a datetime without a zone is local time."""
    return int(time.timestamp() * 1000) if isinstance(time, datetime) else time


class Portion(NamedTuple):
    """The answer to a FETCH, its messages not read yet."""

    source: Source
    offset: int  # of the first
    count: int  # type: ignore[assignment]  # nobody counts occurrences in a portion

    @property
    def next_offset(self) -> int:
        return self.offset + self.count


def portion_in(answer: Frame, wanted: Wanted) -> Portion:
    """Return what a FETCH was answered with. Raises RequestRefused, or PeerMisbehaved."""
    raw = raw_fetched(answer)
    starts = array("I", bytes(raw.starts))
    if sys.byteorder == "little":
        starts.byteswap()
    source = IndexedSource(bytes(raw.frames), wanted.topic, wanted.partition, starts, raw.offset)
    return Portion(source, raw.offset, raw.count)


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
    starts: memoryview  # where each DATA frame starts in them: big-endian u32
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


def fetched(portion: Portion) -> Fetched:
    """Return the messages that a FETCH was answered with. Raises PeerMisbehaved."""
    return Fetched(portion.source.read(sys.maxsize), portion.next_offset)
