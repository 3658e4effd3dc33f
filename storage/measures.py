"""What is counted while messages are stored: plain numbers, for metrics and status pages to read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Upper bounds of the buckets.
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
MESSAGES = (1, 10, 100, 1_000, 10_000, 100_000)
BYTES = (1 << 10, 10 << 10, 100 << 10, 1 << 20, 8 << 20)


class Histogram:
    """How many of the observed values fell into each bucket, and their sum. Observing costs a bisection."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # a value is at most its bucket's bound; the last one has none
        self.total = 0.0

    def observe(self, *values: float) -> None:
        counts, bounds = self.counts, self.bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.total += sum(values)


class Measures:
    """What an engine has counted since it was opened, over all logs."""

    def __init__(self) -> None:
        self.commit_messages = Histogram(MESSAGES)
        self.commit_bytes = Histogram(BYTES)
        self.sync_seconds = Histogram(SECONDS)
        self.ack_seconds = Histogram(SECONDS)  # of each run, from append() until its publisher is answered
        self.failed_commits = 0
