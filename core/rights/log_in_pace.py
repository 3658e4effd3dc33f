"""How long an address must wait that has failed to log in often. Pure: addresses and times in, seconds out."""

from __future__ import annotations

from collections import OrderedDict

FREE = 10  # failures without any wait
FORGOTTEN = 600.0  # seconds after the last failure
# Seconds of the first wait, which doubles with each failure, and of the longest one. Others at the address who have the
# right token wait too, and a client gives each broker of a cluster one second to answer.
FIRST, LONGEST = 0.1, 0.5
ADDRESSES = 10_000  # that are remembered; beyond this the one that failed longest ago is forgotten


class LogInPace:
    """Failed log-ins by address."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def failed(self, address: str, now: float) -> None:
        """Note a failure."""
        count = self._count(address, now) + 1
        self._failures[address] = count, now
        self._failures.move_to_end(address)
        if len(self._failures) > ADDRESSES:
            self._failures.popitem(last=False)

    def wait(self, address: str, now: float) -> float:
        """Return how many seconds the next attempt of an address must wait."""
        count = self._count(address, now)
        return 0.0 if count < FREE else min(LONGEST, FIRST * 2.0 ** min(count - FREE, 10))

    def _count(self, address: str, now: float) -> int:
        count, last = self._failures.get(address, (0, now))
        return 0 if now - last > FORGOTTEN else count
