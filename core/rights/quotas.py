"""How much one user, or one address, may use at a time: decisions alone, times in and seconds out."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from qb.core.rights.principals import Quotas
from qb.core.wire.errors import QuotaExceeded

BURST = 1.0  # seconds of its rate that may pass at once after a pause
SOON, LATER = 1.0, 60.0  # seconds after which to ask again for what others give back by themselves, and for what stays
KEPT = ("topics", "partitions", "subscriptions")  # what is counted when it is made


class RateBucket:
    """Bytes in one direction. They may pass before they are paid for; then nothing more passes until they are."""

    def __init__(self, rate: int) -> None:
        """`rate` in bytes a second."""
        self.rate = rate
        self._free = rate * BURST
        self._at: float | None = None

    def take(self, size: int, now: float) -> None:
        """So many bytes have passed."""
        self._fill(now)
        self._free -= size

    def wait(self, now: float) -> float:
        """Return in how many seconds more may pass; 0.0: now."""
        self._fill(now)
        return max(0.0, -self._free / self.rate)

    def _fill(self, now: float) -> None:
        if self._at is None:
            self._at = now
        elif now > self._at:
            self._free = min(self.rate * BURST, self._free + (now - self._at) * self.rate)
            self._at = now


class Allowance:
    """What all connections of one user, or of one address, may use together, and use."""

    def __init__(self, whose: str, quotas: Quotas) -> None:
        """`whose` is for the texts of refusals: `user 'billing'`, `address 10.0.0.7`."""
        self.whose = whose
        self.quotas = quotas
        self.incoming, self.outgoing = _bucket(quotas), _bucket(quotas)
        self.connections = 0
        self._subscribers: dict[Hashable, Callable[[], None]] = {}

    def change(self, quotas: Quotas) -> None:
        """Allow more or less from now on. What there is already stays."""
        if quotas.rate != self.quotas.rate:
            self.incoming, self.outgoing = _bucket(quotas), _bucket(quotas)
        self.quotas = quotas
        self._share()

    # Connections

    def connect(self) -> None:
        """Count one more connection. Raises QuotaExceeded."""
        most = self.quotas.connections
        if most is not None and self.connections >= most:
            raise self._exceeded("connections", self.connections, most, SOON)
        self.connections += 1

    def disconnect(self) -> None:
        """Count one less."""
        self.connections -= 1

    # What is made and stays

    def check(self, what: str, has: int, more: int = 1) -> None:
        """Raises QuotaExceeded if it has so many topics, partitions or subscriptions, and may not have more."""
        most = getattr(self.quotas, what)
        if most is not None and more and has + more > most:
            raise self._exceeded(what, has, most, LATER)

    def check_storage(self, size: int) -> None:
        """Raises QuotaExceeded if the topics that it has made hold so many bytes, and may hold no more."""
        most = self.quotas.storage
        if most is not None and size >= most:
            raise self._exceeded("bytes of storage", size, most, LATER)

    # Messages in flight

    @property
    def window(self) -> int | None:
        """How many messages each of its subscribers may have in flight; None: as many as its subscription allows."""
        most = self.quotas.in_flight
        return None if most is None else max(1, most // max(1, len(self._subscribers)))

    def join(self, subscriber: Hashable, changed: Callable[[], None]) -> None:
        """Count one more subscriber; `changed` is called when `window` is another one. Raises QuotaExceeded."""
        most = self.quotas.in_flight
        if most is not None and len(self._subscribers) >= most:
            raise self._exceeded("subscribers, with one message in flight each", len(self._subscribers), most, SOON)
        self._subscribers[subscriber] = changed
        if most is not None:
            self._share()

    def leave(self, subscriber: Hashable) -> None:
        """Count one less; one that is not there is no error."""
        if self._subscribers.pop(subscriber, None) is not None and self.quotas.in_flight is not None:
            self._share()

    def _share(self) -> None:
        for changed in list(self._subscribers.values()):
            changed()

    def _exceeded(self, what: str, has: int, most: int, retry_after: float) -> QuotaExceeded:
        return QuotaExceeded(f"{self.whose} has {has} {what}, and may have {most}", retry_after)


def _bucket(quotas: Quotas) -> RateBucket | None:
    return None if quotas.rate is None else RateBucket(quotas.rate)
