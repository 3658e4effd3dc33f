"""Distinguishes an outage from bad messages, and slows down to probes."""

from __future__ import annotations

from collections import deque
from itertools import repeat

OUTCOMES = 20  # how many are looked at
FAILED = 18  # so many nacks among them are an outage
CLOSING = 3  # so many acks in a row end it
INTERVAL, LONGEST_INTERVAL = 1.0, 30.0  # seconds between probes


class OutageBreaker:
    """Closed: everything goes out. Open: one message at a time, and nothing is held against it."""

    def __init__(self) -> None:
        self.open = False
        self.next_probe = 0.0  # while open
        self._interval = INTERVAL
        self._acks = 0  # in a row, while open
        self._outcomes: deque[tuple[int, int] | None] = deque(maxlen=OUTCOMES)  # None is an ack

    def acked(self, count: int, now: float) -> None:
        """So many messages were acked."""
        if not self.open:
            self._outcomes.extend(repeat(None, min(count, OUTCOMES)))
            return
        self._acks += count
        self._interval = INTERVAL
        self.next_probe = now
        if self._acks >= CLOSING:
            self.open = False
            self._outcomes.clear()

    def nacked(self, partition: int, offset: int, now: float) -> None:
        """A handler failed on this message."""
        if self.open:
            self._acks = 0
            return
        if (partition, offset) in self._outcomes:
            return  # one bad message, tried again, says nothing about the others
        self._outcomes.append((partition, offset))
        if len(self._outcomes) == OUTCOMES and OUTCOMES - self._outcomes.count(None) >= FAILED:
            self.open = True
            self._acks = 0
            self._interval = INTERVAL
            self.next_probe = now + INTERVAL

    def allowance(self, now: float) -> int | None:
        """Return how many messages may go out now; None means any number."""
        if not self.open:
            return None
        return 1 if now >= self.next_probe else 0

    def probed(self, now: float) -> None:
        """A probe went out."""
        self._interval = min(LONGEST_INTERVAL, self._interval * 2)
        self.next_probe = now + self._interval
