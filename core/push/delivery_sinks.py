"""Where deliveries go: a joined subscriber as the broker reaches it, through any door."""

from __future__ import annotations

from typing import NamedTuple, Protocol

FULL = 524_288  # bytes that wait for the peer to read; past this, its subscriptions give it nothing more


class PushedRun(NamedTuple):
    """A run of stored frames that is pushed, and its description."""

    subscription_id: str
    topic: str
    partition: int
    attempt: int
    size: int
    settled: int  # the last SETTLE of this subscriber that counted when it was decided
    frames: bytes | memoryview
    suspects: bool = False  # of an unexplained death: to be handled one at a time
    runs: tuple[range, ...] = ()  # their offsets


class DeliverySink(Protocol):
    """A joined subscriber as the broker reaches it."""

    name: str
    settles_at_once: bool  # True: it never acks; what was handed to it is done
    settled: int  # the number of the last SETTLE seen; 0 where there are none

    @property
    def full(self) -> bool:
        """True while it takes nothing more."""

    def deliver(self, delivery: PushedRun) -> None:
        """Push a run. Does not block."""

    def removed(self, subscription_id: str, reason: str) -> None:
        """Notify it that the subscription is removed."""
