"""How a consumer consumes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LONGEST_WAIT = 30.0  # seconds that the broker lets a fetch wait


class FetchTerms(NamedTuple):
    """How much one fetch of a consumer asks for, and how long it waits for that."""

    max_bytes: int = 1 << 20
    max_wait: float = 10.0
    min_bytes: int = 1


DEFAULT_TERMS = FetchTerms()


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
    terms: FetchTerms = DEFAULT_TERMS
    partition: int | None = None  # this one alone


def checked_options(
    group_id: str,
    topics: str | Iterable[str],
    auto_commit: bool,
    auto_commit_interval_ms: int,
    start: str | int,
    max_poll_records: int,
    session_timeout: float,
    rebalance_timeout: float,
    terms: FetchTerms = DEFAULT_TERMS,
    partition: int | None = None,
) -> ConsumerOptions:
    """Return the options; what only the broker can judge is left to it. Raises ValueError."""
    named = (topics,) if isinstance(topics, str) else tuple(topics)
    if start not in ("earliest", "latest") and not (isinstance(start, int) and start >= 0):
        raise ValueError(f"start must be 'earliest', 'latest' or an offset from 0 on, not {start!r}")
    if max_poll_records < 1 or auto_commit_interval_ms < 1:
        raise ValueError("max_poll_records and auto_commit_interval_ms must be at least 1")
    if terms.max_bytes < 1 or terms.min_bytes < 1 or not 0 <= terms.max_wait <= LONGEST_WAIT:
        raise ValueError(f"max_bytes and min_bytes must be at least 1, max_wait_ms from 0 to {LONGEST_WAIT * 1000:.0f}")
    if partition is not None and (len(named) != 1 or partition < 0):
        raise ValueError("partition must be one of a single topic, from 0 on")
    interval = auto_commit_interval_ms / 1000
    timeouts = session_timeout, max(session_timeout, rebalance_timeout)
    return ConsumerOptions(group_id, named, auto_commit, interval, start, max_poll_records, *timeouts, terms, partition)
