"""clients.fetching: what a FETCH asks for, and the messages in its answer.

May import: core.errors, core.frames, clients.conversation, clients.message, the standard library.
Never: sockets, threads, trio.
"""

from __future__ import annotations

import sys
from datetime import datetime
from typing import NamedTuple

from clients.conversation import check_success
from clients.message import Message, Source
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
        """Return the properties of the FETCH frame."""
        return {name: str(value) for name, value in self._asdict().items()}


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
    check_success(answer)
    try:
        offset, count = int(answer.properties["offset"]), int(answer.properties["count"])
    except (KeyError, ValueError) as error:
        raise PeerMisbehaved(f"the answer to a FETCH is without a proper {error}") from None
    return Portion(Source(answer.body, wanted.topic, wanted.partition), offset, count)


def fetched(answer: Frame, wanted: Wanted) -> Fetched:
    """Return the messages that a FETCH was answered with. Raises RequestRefused, or PeerMisbehaved."""
    portion = portion_in(answer, wanted)
    return Fetched(portion.source.read(sys.maxsize), portion.next_offset)
