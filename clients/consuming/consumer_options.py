"""How a consumer consumes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ConsumerOptions(NamedTuple):
    """How a consumer consumes; see checked_options()."""

    group_id: str
    topics: tuple[str, ...]
    auto_commit: bool
    commit_interval: float
    start: str | int
    max_poll_records: int
    session_timeout: float
    rebalance_timeout: float


def checked_options(
    group_id: str,
    topics: str | Iterable[str],
    auto_commit: bool,
    auto_commit_interval_ms: int,
    start: str | int,
    max_poll_records: int,
    session_timeout: float,
    rebalance_timeout: float,
) -> ConsumerOptions:
    """Return the options; what only the broker can judge is left to it. Raises ValueError."""
    named = (topics,) if isinstance(topics, str) else tuple(topics)
    if start not in ("earliest", "latest") and not (isinstance(start, int) and start >= 0):
        raise ValueError(f"start must be 'earliest', 'latest' or an offset from 0 on, not {start!r}")
    if max_poll_records < 1 or auto_commit_interval_ms < 1:
        raise ValueError("max_poll_records and auto_commit_interval_ms must be at least 1")
    interval = auto_commit_interval_ms / 1000
    timeouts = session_timeout, max(session_timeout, rebalance_timeout)
    return ConsumerOptions(group_id, named, auto_commit, interval, start, max_poll_records, *timeouts)
