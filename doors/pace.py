"""How fast one connection may go: the bytes that its user and its address share among all their connections."""

from __future__ import annotations

from collections.abc import Iterator

import trio

from qb.core.rights.quotas import Allowance, RateBucket

LEAST_READ = 4_096  # bytes that are read at a time at least, however slow
READS = 10  # pieces in which a connection reads what it may in a second


class Pace:
    """The pace of one connection. What passes is counted at once; what comes next waits until that is paid for."""

    def __init__(self, address: Allowance) -> None:
        self._address = address
        self._user: Allowance | None = None

    @property
    def allowances(self) -> tuple[Allowance, ...]:
        """What the connection takes part in."""
        return (self._address,) if self._user is None else (self._user, self._address)

    def belongs_to(self, user: Allowance | None) -> None:
        """Count the connection as one of this user, and of no other. Raises QuotaExceeded: it is counted in none."""
        if user is self._user:
            return
        if self._user is not None:
            self._user.disconnect()
            self._user = None
        if user is not None:
            user.connect()
            self._user = user

    # Bytes

    @property
    def is_free(self) -> bool:
        """Is there no limit on the rate? Asked for each piece that is read or sent, so it costs next to nothing."""
        return self._address.incoming is None and (self._user is None or self._user.incoming is None)

    def received(self, size: int) -> None:
        """So many bytes were read."""
        for bucket in self._incoming():
            bucket.take(size, trio.current_time())

    def sent(self, size: int) -> None:
        """So many bytes were given to the connection."""
        for bucket in self._outgoing():
            bucket.take(size, trio.current_time())

    @property
    def portion(self) -> int:
        """How many bytes to read at a time; 0: as many as there are."""
        rates = [bucket.rate for bucket in self._incoming()]
        return max(LEAST_READ, min(rates) // READS) if rates else 0

    def seconds_to_read(self) -> float:
        """Return in how many seconds more may be read; 0: now."""
        return max((bucket.wait(trio.current_time()) for bucket in self._incoming()), default=0.0)

    def seconds_to_send(self) -> float:
        """Return in how many seconds more may be sent; 0: now."""
        return max((bucket.wait(trio.current_time()) for bucket in self._outgoing()), default=0.0)

    def _incoming(self) -> Iterator[RateBucket]:
        for each in self.allowances:
            if each.incoming is not None:
                yield each.incoming

    def _outgoing(self) -> Iterator[RateBucket]:
        for each in self.allowances:
            if each.outgoing is not None:
                yield each.outgoing
