"""What the broker counts beside its logs and subscriptions, which count for themselves.

Plain numbers, changed where the thing happens; qb.doors.http.reports.prometheus reads them for each request.
"""

from __future__ import annotations

from collections import Counter

from qb.core.loop_watch import LoopWatch


class BrokerMetrics:
    """Counts since the start; those of connections are by door."""

    def __init__(self) -> None:
        self.connections: Counter[str] = Counter()  # open now
        self.connections_accepted: Counter[str] = Counter()
        self.connections_refused: Counter[str] = Counter()
        self.requests: Counter[tuple[str, str, int]] = Counter()  # over HTTP, by method, route and status
        self.compressed_bytes: Counter[str] = Counter()  # on the wire, "in" and "out"
        self.inflated_bytes: Counter[str] = Counter()  # what they stand for
        self.event_loop = LoopWatch()
