"""What a user may set on a subscription, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from random import Random
from typing import Any

import msgspec

from qb.core.subscriptions.messages.adaptive_window import MOST
from qb.core.wire.argument_errors import in_words
from qb.core.wire.errors import BadRequest
from qb.core.wire.names import DEAD_LETTERS

LONGEST = 7 * 24 * 3600.0  # no deadline, delay or extension is longer than a week
LARGEST_WINDOW = 100_000


class SubscriptionMode(StrEnum):
    """How subscribers share a subscription."""

    SHARED = "shared"
    KEY_SHARED = "key_shared"
    EXCLUSIVE = "exclusive"
    FAILOVER = "failover"


def check_between(name: str, value: float, low: float, high: float) -> None:
    """Raise BadRequest unless low <= value <= high."""
    if not (math.isfinite(value) and low <= value <= high):
        raise BadRequest(f"{name} must be between {low:g} and {high:g}, not {value!r}")


class RetryBackoff(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a failed message rests: exponential, capped, jittered. In seconds."""

    initial: float = 1.0
    factor: float = 2.0
    cap: float = 300.0
    jitter: float = 0.2  # the part of the delay that chance may take off

    def __post_init__(self) -> None:
        check_between("backoff.initial", self.initial, 0, LONGEST)
        check_between("backoff.factor", self.factor, 1, 10)
        check_between("backoff.cap", self.cap, self.initial, LONGEST)
        check_between("backoff.jitter", self.jitter, 0, 1)

    def delay(self, failures: int, random: Random) -> float:
        """Return how long to rest after so many failures."""
        exponent = min(max(failures, 1) - 1, 64)  # far beyond any cap, and no overflow
        delay = min(self.cap, self.initial * self.factor**exponent)
        return delay * (1 - self.jitter * random.random())


class SubscriptionOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A subscription's settings, kept durably with it."""

    mode: SubscriptionMode = SubscriptionMode.SHARED
    ack_deadline: float = 30.0
    max_in_flight: int | None = None  # per subscriber; None: the window adapts itself
    max_deliveries: int = 16  # failures until the dead letter; 0: never
    backoff: RetryBackoff = RetryBackoff()
    dead_letter_topic: str | None = None  # None: dead_letters_of()

    def __post_init__(self) -> None:
        check_between("ack_deadline", self.ack_deadline, 0.01, LONGEST)
        if self.max_in_flight is not None:
            check_between("max_in_flight", self.max_in_flight, 1, LARGEST_WINDOW)
        check_between("max_deliveries", self.max_deliveries, 0, 1_000_000)

    def window(self, asked: int | None) -> int | None:
        """Return the fixed window of a subscriber that asked for one, or did not; None: it adapts itself."""
        if asked is None:
            return self.max_in_flight
        return min(asked, MOST if self.max_in_flight is None else self.max_in_flight)

    def dead_letters_of(self, subscription_id: str) -> str:
        """Return the topic for this subscription's dead letters."""
        return self.dead_letter_topic or subscription_id + DEAD_LETTERS


def parse_options(given: Mapping[str, Any]) -> SubscriptionOptions:
    """Return options from what a peer sent. Raises BadRequest that names what is wrong."""
    try:
        return msgspec.convert(given, SubscriptionOptions)
    except msgspec.ValidationError as wrong:
        raise BadRequest(f"subscription options: {in_words(str(wrong))}") from None
