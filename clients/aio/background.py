"""The tasks that a client runs beside those of its caller. qb.clients.blocking.background is the same with threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import Any
from weakref import WeakSet

import trio

from qb.clients.protocol.forking import call_in_child


class AsyncBackground:
    """A nursery that lives as long as the `async with` block over its owner.

    A cancellation of the caller cancels its tasks, but for those that shield themselves until the owner ends them; what
    a task raises cancels the block, which raises it.
    """

    def __init__(self) -> None:
        self._manager: Any = None  # what trio.open_nursery() returned, while the block is entered
        self._nursery: trio.Nursery | None = None
        self._shields: WeakSet[trio.CancelScope] = WeakSet()
        self._closing = False
        self._context: Context = copy_context()
        call_in_child(self, AsyncBackground._disown)

    def _disown(self) -> None:
        """In a child of fork(): the tasks are the parent's."""
        self._manager = self._nursery = None

    async def open(self) -> None:
        """Enter the nursery; close() follows, in the same task. Raises RuntimeError if it is entered already."""
        if self._nursery is not None:
            raise RuntimeError("it is open already: enter it with `async with` once, and share it between tasks")
        self._manager, self._context = trio.open_nursery(), copy_context()
        self._nursery = await self._manager.__aenter__()

    def start(self, name: str, function: Callable[..., Awaitable[Any]], *arguments: Any, finish: bool = False) -> None:
        """Run an async function in a task of its own, with the context variables of the block.

        `finish` is for threads: tasks always end before the block does. Raises RuntimeError if it is not open.
        """
        if self._nursery is None:
            raise RuntimeError("it is not open: use it inside `async with`, the block that its tasks live in")
        self._context.run(self._nursery.start_soon, function, *arguments, name=name)

    def shield(self) -> trio.CancelScope:
        """Return a scope that the caller's cancellation does not reach; close() cancels it, before or after this."""
        scope = trio.CancelScope(shield=True)
        self._shields.add(scope)
        if self._closing:
            scope.cancel()
        return scope

    async def join(self) -> None:
        """Return when all tasks have ended: close() sees to that."""

    async def close(self, error: BaseException | None = None) -> None:
        """Cancel what still runs and leave the nursery. `error` is what the block raised, if anything.

        Raises what a task has raised.
        """
        manager, self._manager = self._manager, None
        if manager is None or self._nursery is None:
            return
        self._closing = True  # until the nursery is left, a task may start another, which is cancelled too
        self._nursery.cancel_scope.cancel()
        for scope in list(self._shields):
            scope.cancel()
        known = error if error is not None and is_cancellation(error) else None
        faults: list[BaseException] = []
        try:
            await manager.__aexit__(type(known) if known else None, known, None)
        except BaseExceptionGroup as group:  # what is cancelled is known to the caller already
            faults = [each for each in group.exceptions if each is not known and not isinstance(each, trio.Cancelled)]
        finally:
            self._nursery, self._closing = None, False
        if faults:
            raise faults[0] if len(faults) == 1 else BaseExceptionGroup("faults of background tasks", faults)


def is_cancellation(error: BaseException) -> bool:
    """Is it a cancellation, or a group with one in it?"""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(trio.Cancelled) is not None
    return isinstance(error, trio.Cancelled)
