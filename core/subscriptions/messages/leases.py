"""A subscriber, its window, and the runs of messages that it holds."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter

from qb.core.wire.offset_runs import intersect, subtract

_start = attrgetter("offsets.start")


class Lease:
    """A run of messages of one partition that one subscriber holds until a deadline."""

    __slots__ = ("attempt", "due", "offsets", "partition", "recorded", "since", "subscriber")

    def __init__(
        self, subscriber: JoinedSubscriber, partition: int, offsets: range, attempt: int, recorded: bool, since: float
    ) -> None:
        self.subscriber = subscriber
        self.partition = partition
        self.offsets = offsets
        self.attempt = attempt
        self.recorded = recorded  # does each message have a record?
        self.since = since
        self.due = since  # the deadline; set by Deadlines

    def part(self, offsets: range) -> Lease:
        """Return a lease like this one for some of its offsets."""
        return Lease(self.subscriber, self.partition, offsets, self.attempt, self.recorded, self.since)


class JoinedSubscriber:
    """One joined subscriber."""

    def __init__(self, name: str, window: int, announces: bool) -> None:
        self.name = name
        self.window = window
        self.announces = announces  # names redelivered messages before it handles them
        self.in_flight = 0
        self.unsaved = 0  # acked, but not durably yet: these keep their slots of the window
        self.assigned = 0  # chosen for it in the decision that is being made, not leased yet
        self.blocked = False  # its connection takes nothing more for now
        self.reserved = False  # kept for one isolated message, or busy with it
        self.started: set[tuple[int, int]] = set()  # (partition, offset) that it has named and not settled
        self._leases: dict[int, list[Lease]] = {}  # by partition, sorted by first offset
        self._acked: dict[int, int] = {}  # how many of the unsaved ones, by the number of the snapshot that has them

    @property
    def room(self) -> int:
        """How many more messages it takes now; negative or 0 means none."""
        return 0 if self.blocked or self.reserved else self.free

    @property
    def free(self) -> int:
        """How many slots of its window are free; negative if late acks have taken more than there are."""
        return self.window - self.in_flight - self.unsaved - self.assigned

    def note_unsaved(self, count: int, number: int) -> None:
        """So many messages were acked; the snapshot of this number will be the first to have them."""
        self.unsaved += count
        self._acked[number] = self._acked.get(number, 0) + count

    def unsaved_in(self, number: int) -> int:
        """How many slots the durability of this one snapshot will free."""
        return self._acked.get(number, 0)

    def note_saved(self, number: int) -> int:
        """The snapshot of this number is durable; returns how many slots are free again."""
        durable = [each for each in self._acked if each <= number]
        freed = sum(self._acked.pop(each) for each in durable)
        self.unsaved -= freed
        return freed

    def leases(self, partition: int | None = None) -> Iterator[Lease]:
        """Return what it holds, by partition and first offset."""
        for number in sorted(self._leases) if partition is None else (partition,):
            yield from self._leases.get(number, ())

    def add(self, lease: Lease) -> None:
        """Hold one more lease."""
        leases = self._leases.setdefault(lease.partition, [])
        if not leases or leases[-1].offsets.start < lease.offsets.start:
            leases.append(lease)
        else:
            insort(leases, lease, key=_start)
        self.in_flight += len(lease.offsets)

    def find(self, partition: int, run: range) -> list[tuple[Lease, range]]:
        """Return each lease that holds some of the run, with what it holds of it."""
        leases = self._leases.get(partition)
        if not leases or not run:
            return []
        found = []
        wanted = len(run)
        for index in range(bisect_right(leases, run[-1], key=_start) - 1, -1, -1):
            part = intersect(leases[index].offsets, run)
            if part:
                found.append((leases[index], part))
                wanted -= len(part)
                if not wanted:
                    break
        found.reverse()
        return found

    def release(self, lease: Lease, part: range) -> list[Lease]:
        """Hold these no longer; returns the leases for the rest, which replace the old one."""
        leases = self._leases[lease.partition]
        index = bisect_right(leases, lease.offsets.start, key=_start) - 1
        while leases[index] is not lease:
            index -= 1
        del leases[index]
        self.in_flight -= len(lease.offsets)
        if len(part) == len(lease.offsets):
            return []
        rest = [lease.part(offsets) for offsets in subtract(lease.offsets, part)]
        for remaining in rest:
            self.add(remaining)
        return rest
