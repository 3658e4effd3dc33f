"""Requests whose steps of the event loop must be bounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import trio

from qb.core.pacing import MOST_AT_ONCE, counted

WIDE = 1_024  # partitions of a topic


class LongestPass(trio.abc.Instrument):
    """The longest time between two looks of the loop at its sockets."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = perf_counter()

    def after_io_wait(self, timeout: float) -> None:
        self._since = perf_counter()

    def before_io_wait(self, timeout: float) -> None:
        self.seconds = max(self.seconds, perf_counter() - self._since)


@contextmanager
def bounded(name: str) -> Iterator[None]:
    """Assert that no step counts too many items while the context is open; print how long the longest pass took."""
    longest = LongestPass()
    trio.lowlevel.add_instrument(longest)
    try:
        with counted() as step:
            yield
    finally:
        trio.lowlevel.remove_instrument(longest)
    print(f"{name:28} {step.most:7} items {1000 * longest.seconds:8.1f} ms", flush=True)
    assert step.most <= MOST_AT_ONCE
