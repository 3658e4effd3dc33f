"""Where logs begin and end, noted in the metadata: what a start must find in their files.

A kill takes nothing that was durable. So a log that begins later or ends earlier than was noted is damaged, even where
its files are whole: a segment is missing, or the end was cut off between two batches. An end is noted twice: at once in
a file of its own, without a sync, and within a second in the metadata. So of what was stored in the last second a power
cut alone can take both notes. A beginning is noted before retention deletes anything.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

import trio

from qb.core.wire.errors import LogDamaged
from qb.storage.engine import Metadata
from qb.storage.log.log_ends import LogEnds, NotedEnd, ends_notes, identity_of
from qb.storage.log.segment_identity import SegmentMark

KEY = "log/"
MARKS = "/marks"  # behind the key of a log: of its segments that do not say whose they are
INTERVAL = 1.0  # seconds between two rounds of notes
AT_ONCE = 1_000  # logs in one round


class Extended(Protocol):
    """A log that has come to have more messages, or fewer."""

    topic: str
    partition: int

    @property
    def first_offset(self) -> int: ...
    @property
    def durable_offset(self) -> int: ...
    @property
    def is_deleted(self) -> bool: ...


class LogExtent(NamedTuple):
    """What a log has at least: the messages from `first` up to `next`; it begins with `first`."""

    first: int
    next: int  # 0: not known
    last: int = 0  # what a last batch that is in doubt went up to; not kept in the metadata

    def up_to(self, noted: NotedEnd) -> LogExtent:
        """Return it with what was noted at once: all before the last batch must be there, and that batch may be."""
        return self._replace(next=max(self.next, noted.first), last=noted.next)

    def missing_text(self, file: str, found: int) -> str | None:
        """Return the sentence for the operator about a last batch that is not in a log which ends before `found`."""
        if found >= self.last:
            return None
        what = f"{file} ends before offset {found}, but all before {self.last} was stored when the broker was killed"
        return f"{what}: the last batch is missing; if it was acked, it is lost"

    def check_first(self, directory: str, found: int) -> None:
        """Raises LogDamaged if a log that begins with the offset `found` lacks its first segments."""
        if found > self.first:
            what = f"its first segment begins with offset {found}, but the log begins with {self.first}"
            raise LogDamaged(directory, 0, f"{what}: a segment is missing")

    def check_next(self, file: str, size: int, found: int) -> None:
        """Raises LogDamaged if a log that ends before the offset `found` lacks messages that were durable."""
        if found < self.next:
            what = f"the log ends before offset {found}, but all before {self.next} was stored"
            raise LogDamaged(file, size, f"{what}: its end, or a segment behind it, is missing")


UNKNOWN = LogExtent(2**63, 0)


def dropped_segments(bases: Sequence[int], first: int) -> int:
    """Return how many of the oldest segments hold nothing but what retention has dropped: all before `first`."""
    return 0 if first >= UNKNOWN.first else max(0, bisect_right(bases, first) - 1)


def key_of(topic: str, partition: int | str = "") -> str:
    """Return where the metadata keeps the extent of a log, or what holds for all logs of a topic."""
    return f"{KEY}{topic}/{partition}"


def marks_in(value: Iterable[Sequence[int]]) -> dict[int, SegmentMark]:
    """Return the marks in a value of the metadata, by the offset that their segment begins with."""
    return {mark[0]: SegmentMark(*mark) for mark in value}


class LogExtents:
    """Notes where logs begin and end. Belongs to the event loop."""

    def __init__(self, metadata: Metadata, *, are_durable: bool, ends: LogEnds | None = None) -> None:
        """`are_durable`: is what a log has taken on stable storage? `ends`: where that is noted at once."""
        self._metadata, self._ends, self._are_durable = metadata, ends, are_durable
        self._moved: dict[Extended, None] = {}  # the first to move comes first
        self._identities: dict[Extended, int] = {}

    def of(self, topic: str, partition: int) -> LogExtent:
        """Return what is noted of a log, or of its topic."""
        entry = self._metadata.get(key_of(topic, partition)) or self._metadata.get(key_of(topic))
        noted = LogExtent(*entry.value) if entry else UNKNOWN
        return noted.up_to(self._ends.of(self._identity(topic, partition))) if self._ends else noted

    def marks(self, topic: str, partition: int) -> dict[int, SegmentMark]:
        """Return the marks of segments of a log that do not say themselves whose they are."""
        entry = self._metadata.get(key_of(topic, f"{partition}{MARKS}"))
        return marks_in(entry.value) if entry else {}

    def mark(self, topic: str, partition: int, found: Sequence[SegmentMark]) -> None:
        """Have noted with the next write how such segments begin, unless that is noted already."""
        if {mark.base: mark for mark in found} != self.marks(topic, partition):
            self._metadata.put_soon(key_of(topic, f"{partition}{MARKS}"), found or None)

    def notes(self, data_dir: Path) -> list[str]:
        """Return what an operator should know of the notes that a start found."""
        return ends_notes(data_dir, self._ends.found) if self._ends else []

    def _identity(self, topic: str, partition: int) -> int:
        made = self._metadata.get(f"topic/{topic}")
        return identity_of(topic, partition, made.value.get("created_ms", 0) if made else 0)

    def begin(self, topic: str) -> None:
        """Have it noted with the next write that the logs of a new topic begin with offset 0 unless noted otherwise."""
        self._metadata.put_soon(key_of(topic), (0, 0))

    def adopt(self, topic: str, logs: Iterable[Extended]) -> None:
        """Have noted with the next write what the logs of a topic have of which nothing is noted.

        It comes from a broker that noted nothing, or from another data directory.
        """
        if self._metadata.get(key_of(topic)) is None:
            for log in logs:
                if self._metadata.get(key_of(topic, log.partition)) is None:
                    self._metadata.put_soon(key_of(topic, log.partition), self._extent(log))

    def moved(self, log: Extended, first: int) -> None:
        """Note the new end of a log whose last batch begins with an offset, and have the metadata note it soon."""
        self._moved[log] = None
        if self._ends and self._are_durable:
            if log not in self._identities:
                self._identities[log] = self._identity(log.topic, log.partition)
            self._ends.note(self._identities[log], first, log.durable_offset)

    def mend(self, topic: str, partition: int, end: int) -> None:
        """Note that a log without the last batch that was noted ends here; that it is missing was reported."""
        if self._ends:
            self._ends.note(self._identity(topic, partition), end, end)

    def forget(self, log: Extended) -> None:
        """Forget a log that was deleted."""
        self._moved.pop(log, None)
        known = self._identities.pop(log, None)
        if self._ends:
            self._ends.forget(self._identity(log.topic, log.partition) if known is None else known)

    async def note_first(self, log: Extended) -> None:
        """Note durably where a log begins; what lies before may be deleted then. Raises BrokerError."""
        await self._metadata.put(key_of(log.topic, log.partition), self._extent(log))

    def _extent(self, log: Extended) -> tuple[int, int]:
        return log.first_offset, log.durable_offset if self._are_durable else 0

    async def run(self) -> None:
        """Note the ends of logs until cancelled."""
        while True:
            await trio.sleep(INTERVAL)
            self.note()

    def note(self) -> None:
        """Note the ends of logs that have moved, without waiting; a thousand of them, the others next time."""
        for log in list(islice(self._moved, AT_ONCE)):
            del self._moved[log]
            if self._are_durable and not log.is_deleted:
                self._metadata.put_soon(key_of(log.topic, log.partition), self._extent(log))
