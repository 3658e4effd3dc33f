"""Waiting for a state that sends no event to this process: of another process, of a file, of a broker's own work.

The only sleeps on the real clock stand here, between two looks. Every wait is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import anyio

LIMIT = 30.0  # seconds until a wait fails
PAUSE = 0.002  # seconds between two looks


def wait_until(condition: Callable[[], object], seconds: float = LIMIT) -> None:
    """Return when the condition holds; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds:g} s"
        time.sleep(PAUSE)


async def until(condition: Callable[[], object], seconds: float = LIMIT) -> None:
    """Return when the condition holds; fails after so many seconds. For tests on the real clock."""

    async def holds() -> object:
        return condition()

    await until_true(holds, seconds)


async def until_true(condition: Callable[[], Awaitable[object]], seconds: float = LIMIT) -> None:
    """Return when the condition, which may ask a broker, holds; fails after so many seconds."""
    with anyio.fail_after(seconds):
        while not await condition():  # noqa: ASYNC110 (there is no event to wait for)
            await anyio.sleep(PAUSE)


def holds_for(seconds: float, condition: Callable[[], object]) -> None:
    """Look again and again for so long; fails at the first look that does not find the condition true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert condition()
        time.sleep(PAUSE)


async def holds_during(seconds: float, condition: Callable[[], Awaitable[object]]) -> None:
    """As holds_for(), for a condition that may ask a broker."""
    end = anyio.current_time() + seconds
    while anyio.current_time() < end:
        assert await condition()
        await anyio.sleep(PAUSE)
