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

import msgspec

from qb.core.subscriptions.messages.deadlines import NEVER
from qb.core.wire.columns import Numbers, Offsets, np

_start = attrgetter("offsets.start")


class LeaseHolder(Protocol):
    """The subscriber of a lease, as far as those that find the lease ask for it."""

    name: str
    in_flight: int
    reserved: bool
    started: set[tuple[int, int]]

    def release(self, lease: Lease, part: range) -> list[range]: ...

    def split(self, lease: Lease, part: range) -> Lease: ...


class Lease(msgspec.Struct, eq=False, gc=False):
    """Messages of a run that one subscriber holds until a deadline; the first and the last of `offsets` among them.

    There may be a million, so the garbage collector walks none: the end of a subscription lets go of its leases.
    """

    subscriber: LeaseHolder
    partition: int
    offsets: range
    attempt: int
    recorded: bool  # does each message have a record?
    since: float
    _held: bytearray | None = None  # a 1 for each offset that is held; None: all are
    count: int = 0  # messages that are held
    keys: tuple[str | None, ...] = ()  # in key_shared, of the run as it was pushed, if they have no numbers yet
    numbers: Numbers | None = None  # in key_shared, of the keys of all in the span as it was pushed; None: not known
    keys_from: int = 0  # the offset of the first of these
    due: float = 0.0  # the deadline; set by Deadlines
    bits: int = 0  # of its length; set by LeaseIndex

    def __post_init__(self) -> None:
        self.count = len(self.offsets) if self._held is None else self._held.count(1)
        self.due = self.since

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

    def keys_held(self) -> Iterator[tuple[range, tuple[str | None, ...]]]:
        """Yield the runs that are held, each with its keys, if the lease has the keys."""
        for run in self.held() if self.keys else ():
            first = self.keys_from
            yield run, self.keys[run.start - first : run.stop - first : run.step]

    def number_at(self, offset: int) -> int:
        """Return the number of the key of a message; the lease must know it."""
        assert self.numbers is not None
        return int(self.numbers[offset - self.keys_from])

    def numbers_at(self, released: range | Offsets) -> Numbers:
        """Return the numbers of the keys of messages that it holds or held; it must know them."""
        assert self.numbers is not None
        first = self.keys_from
        if isinstance(released, range):
            return self.numbers[released.start - first : released.stop - first : released.step]
        return self.numbers[released - first]

    def list_keyed(self, offsets: list[int], numbers: list[int]) -> None:
        """Add to these lists what is held, and the numbers of its keys; the lease must know them."""
        if self.count == 1:  # there may be thousands of these
            offsets.append(self.offsets.start)
            numbers.append(self.number_at(self.offsets.start))
        else:
            held = self.held_offsets()
            offsets += held.tolist()
            numbers += self.numbers_at(held).tolist()

    def held_offsets(self) -> Offsets:
        """Return the messages that are held."""
        offsets = np.arange(self.offsets.start, self.offsets.stop, self.offsets.step)
        return offsets if self._held is None else offsets[np.frombuffer(self._held, np.bool_)]

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

    def release_scattered(self, offsets: Offsets) -> tuple[Offsets, Offsets]:
        """Hold these offsets of its span no longer; returns those that were held, and the others. Its step must be 1.

        It costs as much as there are of them.
        """
        if self._held is None:
            self._held = bytearray(b"\1") * len(self.offsets)
        marks = np.frombuffer(self._held, np.bool_)
        indexes = offsets - self.offsets.start
        held = marks[indexes]
        marks[indexes] = False
        del marks  # else the marks cannot be cut
        released = offsets[held]
        self.count -= len(released)
        if not self.count:
            self.offsets, self._held, self.due = self.offsets[:0], None, NEVER
        else:
            self._trim()
        return released, offsets[~held]

    def split(self, part: range) -> Lease:
        """Return a new lease of what is held of the part; this one holds it no longer. Some of it must be held."""
        new = Lease(self.subscriber, self.partition, part, self.attempt, self.recorded, self.since)
        new.keys, new.numbers, new.keys_from = self.keys, self.numbers, self.keys_from
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


FEW = 8  # leases that lie in a tuple: one of what is not walked is not walked itself


class LeaseIndex(msgspec.Struct, eq=False, gc=False):
    """The leases of one subscriber in one partition.

    A few are a tuple. Of many, those of about the same length stand in one list. All are sorted by first offset. A
    lease that reaches some offset begins at most that length before it, so a lookup passes over few that do not.
    """

    _few: tuple[Lease, ...] = ()  # all, until there have been many
    _by_length: dict[int, list[Lease]] | None = None  # by the bits of last offset - first offset
    count: int = 0  # messages that are held

    def __bool__(self) -> bool:
        return bool(self._few or self._by_length)

    def __iter__(self) -> Iterator[Lease]:
        """Return all, sorted by first offset."""
        return iter(self._few) if self._by_length is None else merge(*self._by_length.values(), key=_start)

    def unsorted(self) -> Iterator[Lease]:
        """Return all, in any order."""
        return iter(self._few) if self._by_length is None else chain.from_iterable(self._by_length.values())

    @property
    def first(self) -> int:
        """The lowest offset that is held; there must be one."""
        if self._by_length is None:
            return self._few[0].offsets.start
        return min(leases[0].offsets.start for leases in self._by_length.values())

    def add(self, lease: Lease) -> None:
        """Add a lease that holds something."""
        lease.bits = (lease.offsets[-1] - lease.offsets[0]).bit_length()
        self.count += lease.count
        if self._by_length is None:
            few = self._few
            if not few or few[-1].offsets.start < lease.offsets.start:
                self._few = (*few, lease)
            else:
                self._few = tuple(sorted((*few, lease), key=_start))
            if len(self._few) > FEW:
                self._by_length = {}
                for each in self._few:
                    self._by_length.setdefault(each.bits, []).append(each)
                self._few = ()
            return
        leases = self._by_length.setdefault(lease.bits, [])
        if not leases or leases[-1].offsets.start < lease.offsets.start:
            leases.append(lease)
        else:
            insort(leases, lease, key=_start)

    def remove(self, lease: Lease) -> None:
        """Take a lease out."""
        self.count -= lease.count
        if self._by_length is None:
            self._few = tuple([each for each in self._few if each is not lease])
            return
        leases = self._by_length[lease.bits]
        if leases[0] is lease:
            del leases[0]
        else:
            del leases[leases.index(lease, bisect_left(leases, lease.offsets.start, key=_start))]
        if not leases:
            del self._by_length[lease.bits]
            self._by_length = self._by_length or None

    def near(self, first: int, last: int) -> list[Lease]:
        """Return the leases that reach into these offsets, and few others, sorted by first offset."""
        if self._by_length is None:
            return [each for each in self._few if each.offsets.start <= last and each.offsets[-1] >= first]
        found: list[Lease] = []
        for bits, leases in self._by_length.items():
            low = bisect_right(leases, first - (1 << bits), key=_start)
            found += leases[low : bisect_right(leases, last, key=_start)]
        if len(self._by_length) > 1:
            found.sort(key=_start)
        return found
