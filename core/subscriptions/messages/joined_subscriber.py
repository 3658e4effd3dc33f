"""A subscriber, its window, and the leases of messages that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from qb.core.pacing import AT_ONCE
from qb.core.subscriptions.messages.adaptive_window import LEAST, MOST, AdaptiveWindow
from qb.core.subscriptions.messages.leases import Lease, LeaseIndex
from qb.core.wire.columns import Offsets
from qb.core.wire.offset_runs import intersect

IN_FLIGHT_TOGETHER = 20_000  # messages, to all subscribers of a subscription: a step that meets all stays short
LEAST_SHARE = 100  # messages: each subscriber may have so many in flight, however many others there are
MOST_ACKED = 10 * AT_ONCE  # messages that one step acks: each costs about a tenth of what a lease costs


class OffsetsByKey:
    """Messages of a partition by the numbers of their keys: what was in flight once, and may be so still."""

    def __init__(self) -> None:
        self.offsets: dict[int, list[int]] = {}
        self.count = 0  # messages that were added

    def add(self, lease: Lease) -> None:
        """Add those of a lease that knows their keys."""
        if lease.numbers is None:
            return
        offsets: list[int] = []
        numbers: list[int] = []
        lease.list_keyed(offsets, numbers)
        for offset, number in zip(offsets, numbers, strict=True):
            self.offsets.setdefault(number, []).append(offset)
        self.count += lease.count


class JoinedSubscriber:
    """One joined subscriber."""

    def __init__(self, name: str, window: int | None, announces: bool, widest: int = MOST) -> None:
        """`window` is fixed; None: it adapts itself, and is at most so wide."""
        self.name = name
        self.adapting = AdaptiveWindow(widest) if window is None else None
        self._fixed = LEAST if window is None else window
        self._most: int | None = None  # of its user and its address; None: they have no quota
        self.share(1)
        self.announces = announces  # names redelivered messages before it handles them
        self.in_flight = 0
        self.unsaved = 0  # acked, but not durably yet: these keep their slots of the window
        self.assigned = 0  # chosen for it in the decision that is being made, not leased yet
        self.blocked = False  # its connection takes nothing more for now
        self.reserved = False  # kept for one isolated message, or busy with it
        self.started: set[tuple[int, int]] = set()  # (partition, offset) that it has named and not settled
        self.looked_at = 0  # leases and waiting messages compared with its runs since it joined: what settling costs
        self._leases: dict[int, LeaseIndex] = {}  # by partition; none is empty
        self._by_key: dict[int, OffsetsByKey] = {}  # by partition, where something has failed
        self._acked: dict[int, int] = {}  # how many of the unsaved ones, by the number of the snapshot that has them

    def share(self, among: int) -> None:
        """There are so many subscribers: have no more in flight than its share of what may be in flight together."""
        self._share = max(LEAST_SHARE, IN_FLIGHT_TOGETHER // among)
        self._set_window()

    def limit(self, most: int | None) -> None:
        """Have at most so many in flight from now on, whatever the window is; None: no limit."""
        self._most = most
        self._set_window()

    def _set_window(self) -> None:
        window = min(self._share, self._fixed if self.adapting is None else self.adapting.size)
        self.window = window if self._most is None else min(window, self._most)

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

    def adapt(self, count: int, message_bytes: float, now: float) -> None:
        """So many messages were acked: let a window that adapts itself follow the pace."""
        if self.adapting is not None:
            self.adapting.acked(count, message_bytes, now, ran_dry=not self.in_flight and self.free <= 0)
            self._set_window()

    def unsaved_in(self, number: int) -> int:
        """How many slots the durability of this one snapshot will free."""
        return self._acked.get(number, 0)

    def note_saved(self, number: int) -> int:
        """The snapshot of this number is durable; returns how many slots are free again."""
        durable = [each for each in self._acked if each <= number]
        freed = sum(self._acked.pop(each) for each in durable)
        self.unsaved -= freed
        return freed

    def note_not_saved(self, number: int, upcoming: int) -> None:
        """The snapshot of this number was not stored: the one that is upcoming will be the first to have its acks."""
        if acked := self._acked.pop(number, 0):
            self._acked[upcoming] = self._acked.get(upcoming, 0) + acked

    def leases(self, partition: int | None = None) -> Iterator[Lease]:
        """Return what it holds, by partition and first offset."""
        for number in sorted(self._leases) if partition is None else (partition,):
            if number in self._leases:
                yield from self._leases[number]

    def partitions(self) -> dict[int, LeaseIndex]:
        """Return the leases by partition, where there are any; to be read only."""
        return self._leases

    def add(self, lease: Lease) -> None:
        """Hold one more lease."""
        index = self._leases.setdefault(lease.partition, LeaseIndex())
        index.add(lease)
        self.in_flight += lease.count
        if known := self._by_key.get(lease.partition):
            known.add(lease)
            if known.count > 2 * index.count + MOST_ACKED:  # most of them are settled
                del self._by_key[lease.partition]

    def forget_all(self) -> None:
        """Hold nothing any more: the subscription is no more."""
        self._leases, self._by_key = {}, {}
        self.in_flight = 0

    def find(self, partition: int, run: range) -> list[tuple[Lease, range]]:
        """Return the leases that may hold some of the run, by first offset, each with the run's part in its offsets."""
        index = self._leases.get(partition)
        if index is None or not run:
            return []
        near = index.near(run[0], run[-1])
        self.looked_at += len(near)
        return [(lease, part) for lease in near if (part := intersect(lease.offsets, run))]

    def portions(self, partition: int, run: range) -> list[range]:
        """Cut a run into parts that each meet at most AT_ONCE leases, or MOST_ACKED messages, and one lease more."""
        if len(run) == 1:
            return [run]
        index = self._leases.get(partition)
        near = index.near(run[0], run[-1]) if index is not None and run else []
        cuts = (min(len(run), max(0, -((run.start - cut) // run.step))) for cut in _cuts(near))
        borders = [0, *cuts, len(run)]
        return [part for first, end in pairwise(borders) if (part := run[first:end])] or [run]

    def holds(self, partition: int, offset: int) -> bool:
        """Return whether it holds this message."""
        return self.lease_of(partition, offset) is not None

    def lease_of(self, partition: int, offset: int) -> Lease | None:
        """Return the lease of this message; None if it does not hold it."""
        found = self.find(partition, range(offset, offset + 1))
        return next((lease for lease, part in found if lease.held(part)), None)

    def release(self, lease: Lease, part: range) -> list[range]:
        """Hold these messages of a lease no longer, a run out of its offsets; returns those that were held."""
        if not part:
            return []
        index = self._leases[lease.partition]
        index.remove(lease)
        before = lease.count
        released = lease.release(part)
        self.in_flight -= before - lease.count
        if lease.count:
            index.add(lease)
        elif not index:
            del self._leases[lease.partition]
        return released

    def offsets_of(self, partition: int, number: int) -> list[int]:
        """Return what it holds of the key with this number and has no record, in order.

        The first call looks at all that it holds of the partition; from then on it knows them by key.
        """
        index = self._leases.get(partition)
        if index is None:
            return []
        known = self._by_key.get(partition)
        if known is None:
            known = self._by_key[partition] = OffsetsByKey()
            for lease in index:
                known.add(lease)
        offsets = [offset for offset in known.offsets.pop(number, ()) if self._is_of_key(partition, offset, number)]
        if offsets:
            known.offsets[number] = offsets
        return sorted(offsets)

    def _is_of_key(self, partition: int, offset: int, number: int) -> bool:
        lease = self.lease_of(partition, offset)
        return lease is not None and lease.numbers is not None and lease.number_at(offset) == number

    def release_scattered(self, lease: Lease, offsets: Offsets) -> tuple[Offsets, Offsets]:
        """Hold these offsets of a lease no longer; returns those that were held, and the others."""
        index = self._leases[lease.partition]
        index.remove(lease)
        released, others = lease.release_scattered(offsets)
        self.in_flight -= len(released)
        if lease.count:
            index.add(lease)
        elif not index:
            del self._leases[lease.partition]
        return released, others

    def split(self, lease: Lease, part: range) -> Lease:
        """Return a lease of its own for what is held of the part; some of it, and some other, must be held."""
        index = self._leases[lease.partition]
        index.remove(lease)
        new = lease.split(part)
        index.add(lease)
        index.add(new)
        return new


def _cuts(leases: list[Lease]) -> Iterator[int]:
    """Yield the offsets at which to cut, so that little enough lies between two of them."""
    cost, each = 0, MOST_ACKED // AT_ONCE  # what a lease costs beside its messages
    for lease in leases:
        if cost and cost + lease.count > MOST_ACKED:
            yield lease.offsets.start
            cost = 0
        yield from lease.offsets[MOST_ACKED::MOST_ACKED]
        cost += each + lease.count % MOST_ACKED
