"""The options of a producer, and the checks that need no broker."""

from __future__ import annotations

from typing import NamedTuple

from qb.core.wire.compression.codecs import check_codec

BATCH_SIZE = 10_000
BATCH_BYTES = 256 * 1024  # as much as publish_many sends at once: few system calls, little to copy
LINGER_MS = 5.0
RETRIES = 5
RETRY_BACKOFF_MS = 100.0
MAX_BUFFERED_BYTES = 32 * 1024 * 1024
ACKS = ("all", "leader", "none")
WHEN_FULL = ("block", "raise")


class ProducerOptions(NamedTuple):
    """How a producer batches, retries and waits."""

    batch_size: int = BATCH_SIZE
    batch_bytes: int = BATCH_BYTES
    linger: float = LINGER_MS / 1000
    acks: str = "all"
    compression: str | None = None
    retries: int = RETRIES
    retry_backoff: float = RETRY_BACKOFF_MS / 1000
    max_buffered_bytes: int = MAX_BUFFERED_BYTES
    when_full: str = "block"
    partition: int | None = None  # of the messages that name none

    @property
    def waits_for_acks(self) -> bool:
        """Does a message count as sent only when the broker has answered?"""
        return self.acks != "none"


def checked_producer_options(
    batch_size: int,
    batch_bytes: int,
    linger_ms: float,
    acks: str,
    compression: str | None,
    retries: int,
    retry_backoff_ms: float,
    max_buffered_bytes: int,
    when_full: str,
    partition: int | None = None,
) -> ProducerOptions:
    """Return the options. Raises ValueError for what makes no sense, ImportError for a codec that is not installed."""
    least = {"batch_size": (batch_size, 1), "batch_bytes": (batch_bytes, 1), "linger_ms": (linger_ms, 0)}
    least |= {"retries": (retries, 0), "retry_backoff_ms": (retry_backoff_ms, 0)}
    for name, (value, lowest) in (least | {"max_buffered_bytes": (max_buffered_bytes, 1)}).items():
        if not value >= lowest:
            raise ValueError(f"{name} must be at least {lowest}, not {value!r}")
    for name, word, words in (("acks", acks, ACKS), ("when_full", when_full, WHEN_FULL)):
        if word not in words:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, not {word!r}")
    return ProducerOptions(
        batch_size,
        batch_bytes,
        linger_ms / 1000,
        acks,
        check_codec(compression),
        retries,
        retry_backoff_ms / 1000,
        max_buffered_bytes,
        when_full,
        partition,
    )
