"""The event loops that the async client runs under."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import trio
import uvloop

Main = Callable[[], Coroutine[Any, Any, Any]]
LONGEST = 20.0  # seconds that a test may take


async def bounded(main: Callable[[], Awaitable[Any]]) -> Any:
    """Await a main function for so long only."""
    with anyio.fail_after(LONGEST):
        return await main()


def on_trio(main: Main) -> Any:
    return trio.run(bounded, main)


def on_asyncio(main: Main) -> Any:
    return _on(asyncio.new_event_loop, main)


def on_uvloop(main: Main) -> Any:
    return _on(uvloop.new_event_loop, main)


def _on(loop_factory: Callable[[], asyncio.AbstractEventLoop], main: Main) -> Any:
    """Fails also for what is raised by a callback or a task that no other task waits for."""
    faults: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: faults.append(context))
        result = runner.run(bounded(main))
    assert faults == []
    return result


RUNNERS = {"asyncio": on_asyncio, "uvloop": on_uvloop, "trio": on_trio}
