"""Leases, and how one is found by offset among many.

A lease never falls into pieces: it notes which of its messages are still held. So a subscriber has at most as many
leases as runs were pushed to it, in whatever order it acks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import merge
from itertools import chain
from operator import attrgetter
from typing import Protocol

from qb.core.subscriptions.messages.deadlines import NEVER

_start = attrgetter("offsets.start")


class LeaseHolder(Protocol):
    """The subscriber of a lease, as far as those that find the lease ask for it."""

    name: str
    in_flight: int
    reserved: bool
    started: set[tuple[int, int]]

    def release(self, lease: Lease, part: range) -> list[range]: ...

    def split(self, lease: Lease, part: range) -> Lease: ...


class Lease:
    """Messages of a run that one subscriber holds until a deadline; the first and the last of `offsets` among them."""

    __slots__ = ("_held", "attempt", "bits", "count", "due", "offsets", "partition", "recorded", "since", "subscriber")

    def __init__(
        self,
        subscriber: LeaseHolder,
        partition: int,
        offsets: range,
        attempt: int,
        recorded: bool,
        since: float,
        held: bytearray | None = None,
    ) -> None:
        self.subscriber = subscriber
        self.partition = partition
        self.offsets = offsets
        self.count = len(offsets) if held is None else held.count(1)  # messages that are held
        self.attempt = attempt
        self.recorded = recorded  # does each message have a record?
        self.since = since
        self.due = since  # the deadline; set by Deadlines
        self.bits = 0  # of its length; set by LeaseIndex
        self._held = held  # a 1 for each offset that is held; None: all are

    def held(self, part: range | None = None) -> list[range]:
        """Return the messages that are held, of all or of a run out of its offsets, as runs in offset order."""
        part = self.offsets if part is None else part
        if self._held is None or not part:
            return [part] if part else []
        marks = self._held[self._slice(part)]
        runs = []
        at = marks.find(1)
        while at >= 0:
            end = marks.find(0, at)
            end = len(marks) if end < 0 else end
            runs.append(part[at:end])
            at = marks.find(1, end)
        return runs

    def release(self, part: range) -> list[range]:
        """Hold these no longer, a run out of its offsets; returns those that were held."""
        if self._held is None and len(part) == self.count:
            self.offsets, self.count, self.due = self.offsets[:0], 0, NEVER
            return [part]
        released = self.held(part)
        self.count -= sum(map(len, released))
        if not self.count:
            self.offsets, self._held, self.due = self.offsets[:0], None, NEVER
        elif released:
            part_slice = self._slice(part)
            if self._held is None and part_slice.step == 1 and part_slice.start == 0:
                self.offsets = self.offsets[part_slice.stop :]  # acks in order
            else:
                self._held = self._held or bytearray(b"\1") * len(self.offsets)
                self._held[part_slice] = bytes(len(part))
                self._trim()
        return released

    def release_scattered(self, offsets: list[int]) -> tuple[list[int], list[int]]:
        """Hold these offsets of its span no longer; returns those that were held, and the others. Its step must be 1.

        It costs as much as there are of them.
        """
        first, held = self.offsets.start, self._held
        if held is None:
            released, others = offsets, []
        else:
            released = [offset for offset in offsets if held[offset - first]]
            others = [offset for offset in offsets if not held[offset - first]] if len(released) < len(offsets) else []
        self.count -= len(released)
        if not self.count:
            self.offsets, self._held, self.due = self.offsets[:0], None, NEVER
        elif released:
            held = self._held = held or bytearray(b"\1") * len(self.offsets)
            for offset in released:
                held[offset - first] = 0
            self._trim()
        return released, others

    def split(self, part: range) -> Lease:
        """Return a new lease of what is held of the part; this one holds it no longer. Some of it must be held."""
        new = Lease(self.subscriber, self.partition, part, self.attempt, self.recorded, self.since)
        if self._held is not None:
            new._held = self._held[self._slice(part)]
        new.count = sum(map(len, self.release(part)))
        new._trim()
        return new

    def _trim(self) -> None:
        """Let the offsets begin and end with a held one, and forget the marks if there are no gaps."""
        marks = self._held
        if marks is None:
            return
        first, end = marks.find(1), marks.rfind(1) + 1
        if end - first < len(marks):
            self.offsets = self.offsets[first:end]
            del marks[end:], marks[:first]
        if self.count == len(marks):
            self._held = None

    def _slice(self, part: range) -> slice:
        """Return where the marks of a run out of its offsets are."""
        first, last = self.offsets.index(part[0]), self.offsets.index(part[-1])
        return slice(first, last + 1, max(1, part.step // self.offsets.step))


class LeaseIndex:
    """The leases of one subscriber in one partition.

    Those of about the same length stand in one list, sorted by first offset. A lease that reaches some offset begins at
    most that length before it, so a lookup passes over few that do not.
    """

    def __init__(self) -> None:
        self._by_length: dict[int, list[Lease]] = {}  # by the bits of last offset - first offset
        self.count = 0  # messages that are held

    def __bool__(self) -> bool:
        return bool(self._by_length)

    def __iter__(self) -> Iterator[Lease]:
        """Return all, sorted by first offset."""
        return merge(*self._by_length.values(), key=_start)

    def unsorted(self) -> Iterator[Lease]:
        """Return all, in any order."""
        return chain.from_iterable(self._by_length.values())

    @property
    def first(self) -> int:
        """The lowest offset that is held; there must be one."""
        return min(leases[0].offsets.start for leases in self._by_length.values())

    def add(self, lease: Lease) -> None:
        """Add a lease that holds something."""
        lease.bits = (lease.offsets[-1] - lease.offsets[0]).bit_length()
        leases = self._by_length.setdefault(lease.bits, [])
        if not leases or leases[-1].offsets.start < lease.offsets.start:
            leases.append(lease)
        else:
            insort(leases, lease, key=_start)
        self.count += lease.count

    def remove(self, lease: Lease) -> None:
        """Take a lease out."""
        leases = self._by_length[lease.bits]
        if leases[0] is lease:
            del leases[0]
        else:
            del leases[leases.index(lease, bisect_left(leases, lease.offsets.start, key=_start))]
        if not leases:
            del self._by_length[lease.bits]
        self.count -= lease.count

    def near(self, first: int, last: int) -> list[Lease]:
        """Return the leases that reach into these offsets, and few others, sorted by first offset."""
        found: list[Lease] = []
        for bits, leases in self._by_length.items():
            low = bisect_right(leases, first - (1 << bits), key=_start)
            found += leases[low : bisect_right(leases, last, key=_start)]
        if len(self._by_length) > 1:
            found.sort(key=_start)
        return found
