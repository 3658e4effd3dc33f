"""The lease's decisions: may the owner answer now, may a candidate take over? No I/O; the clock is an argument.

The clock is CLOCK_BOOTTIME of the own machine, which goes on during a suspend. No wall clock, and no clock of another
machine, is ever compared. The lease keeps reads fresh; it is the fence of the journal that keeps writes safe.
"""

from __future__ import annotations

import msgspec

HOLD = 0.8  # of the time to live: as long an owner relies on its lease, counted from the sending of its renewal
RENEW = 0.25  # of the time to live, between two renewals
LOOK = 0.05  # of the time to live, between two looks of a candidate, and before a renewal that failed is sent again
PRECEDENCE = 1.0  # seconds for which a lease that was released to one broker is left to it


class LeaseRecord(msgspec.Struct, frozen=True):
    """What lies in the store of the lease."""

    owner: str
    address: str = ""  # where clients reach it
    cluster_address: str = ""  # where the other brokers do: the port is open as long as its process lives
    epoch: int = 0
    number: int = 0  # counts renewals
    released: bool = False
    successor: str = ""  # the name of the broker to which it was released, if to one


class OwnerLease:
    """The owner's side."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._valid_until = float("-inf")
        self._fenced_at = float("inf")  # when its fence was committed
        self._is_lost = False

    def began(self, now: float) -> None:
        """The fence has been committed. Only a renewal that is sent after that counts."""
        self._fenced_at = now

    def renewed(self, sent_at: float) -> None:
        """A renewal that was sent then has been stored."""
        if sent_at >= self._fenced_at and not self._is_lost:
            self._valid_until = max(self._valid_until, sent_at + HOLD * self._ttl)

    def lost(self) -> None:
        """Another broker has the lease, or a foreign fence lies in the journal: it never comes back."""
        self._is_lost = True
        self._valid_until = float("-inf")

    def may_answer(self, now: float) -> bool:
        """May this broker answer a request now? Asked where a door sends, and where a step begins."""
        return now < self._valid_until

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def next_renewal(self, last_sent: float, has_succeeded: bool) -> float:
        """Return when the next renewal is due: soon, if it is not known that the last one was stored."""
        return last_sent + (RENEW if has_succeeded else LOOK) * self._ttl


class LeaseWatcher:
    """A candidate's side: how long has the lease stood still, by our own clock, while we could have seen it move?"""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._revision = -1
        self._idle = 0.0  # seconds of unbroken observation in which it did not move
        self._seen_at: float | None = None  # the last look that succeeded
        self._record: LeaseRecord | None = None

    @property
    def revision(self) -> int:
        """The revision that was seen last."""
        return self._revision

    @property
    def record(self) -> LeaseRecord | None:
        """The lease as it was seen last."""
        return self._record

    def saw(self, sent_at: float, answered_at: float, revision: int, record: LeaseRecord | None) -> None:
        """A look found this. The first one counts from its answer, a later one only up to its sending."""
        if revision < self._revision:
            self.failed()  # the answer of a server that is behind
            return
        if revision != self._revision:
            self._revision, self._record, self._idle = revision, record, 0.0
        elif self._seen_at is not None:
            self._idle += max(0.0, sent_at - self._seen_at)
        self._seen_at = answered_at

    def failed(self) -> None:
        """A look failed. The time up to the next one does not count: the owner could perhaps not renew either."""
        self._seen_at = None

    def may_take_over(self, owner_refuses: bool = False, name: str = "") -> bool:
        """May we try to take the lease now? The attempt is a compare-and-set on the revision that was seen.

        `owner_refuses`: the cluster port of the owner refuses TCP, and the setting says that this proves its end.
        `name`: of this broker.
        """
        if self._seen_at is None:
            return False
        if self._record is None:
            return True
        if self._record.released:
            return self._record.successor in ("", name) or self._idle >= PRECEDENCE
        return owner_refuses or self._idle >= self._ttl
