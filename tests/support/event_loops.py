"""The event loops that the async client runs under.

uvloop has code that runs in every child of fork(), so it is loaded only in a process of its own, where UVLOOP is set.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
import trio

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
    import uvloop

    return _on(uvloop.new_event_loop, main)


def _on(loop_factory: Callable[[], asyncio.AbstractEventLoop], main: Main) -> Any:
    """Fails also for what is raised by a callback or a task that no other task waits for."""
    faults: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: faults.append(context))
        result = runner.run(bounded(main))
    assert faults == []
    return result


UVLOOP = "TESTS_UNDER_UVLOOP"  # a variable: set, tests run under uvloop instead of the other loops
NATIVE = {"uvloop": on_uvloop} if UVLOOP in os.environ else {"asyncio": on_asyncio}
RUNNERS = NATIVE if UVLOOP in os.environ else NATIVE | {"trio": on_trio}
