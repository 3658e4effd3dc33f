"""The wall clock as frames, seals and records carry it."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Return the wall clock in ms since the epoch."""
    return time.time_ns() // 1_000_000
