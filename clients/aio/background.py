"""The tasks that a client runs beside those of its caller. qb.clients.blocking.background is the same with threads."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from typing import Any
from weakref import WeakSet

import anyio
from anyio.abc import TaskGroup

from qb.clients.aio.event_loops.running_loop import running_loop
from qb.clients.protocol.forking import call_in_child


class AsyncBackground:
    """A task group that lives as long as the `async with` block over its owner.

    A cancellation of the caller cancels its tasks, but for those that shield themselves until the owner ends them; what
    a task raises cancels the block, which raises it.
    """

    def __init__(self) -> None:
        self._group: TaskGroup | None = None  # while the block is entered
        self._shields: WeakSet[anyio.CancelScope] = WeakSet()
        self._closing = False
        self._context: Context = copy_context()
        call_in_child(self, AsyncBackground._disown)

    def _disown(self) -> None:
        """In a child of fork(): the tasks are the parent's."""
        self._group = None

    async def open(self) -> None:
        """Enter the task group; close() follows, in the same task. Raises RuntimeError if it is entered already."""
        if self._group is not None:
            raise RuntimeError("the client is open already: enter it by `async with` once, and share it between tasks")
        group, self._context = anyio.create_task_group(), running_loop().context()
        self._group = await group.__aenter__()

    def start(
        self, name: str, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any, finish: bool = False
    ) -> None:
        """Run an async function in a task of its own, with the context variables of the block.

        `finish` is for threads: tasks always end before the block does. Raises RuntimeError if it is not open.
        """
        if self._group is None:
            raise RuntimeError("the client is not open: use it inside `async with`, the block that its tasks live in")
        self._context.run(partial(self._group.start_soon, function, *arguments, name=name))

    def shield(self) -> anyio.CancelScope:
        """Return a scope that the caller's cancellation does not reach; close() cancels it, before or after this."""
        scope = anyio.CancelScope(shield=True)
        self._shields.add(scope)
        if self._closing:
            scope.cancel()
        return scope

    async def join(self) -> None:
        """Return when all tasks have ended: close() sees to that."""

    def interrupt(self, error: BaseException | None) -> None:
        """The block ends by this error. If it is a cancellation, it reaches the tasks now, as under trio it has.

        Under asyncio a task can be cancelled by itself, without the scope that it is in.
        """
        if self._group is not None and error is not None and is_cancellation(error):
            self._group.cancel_scope.cancel()

    async def close(self, error: BaseException | None = None) -> None:
        """Cancel what still runs and leave the task group. `error` is what the block raised, if anything.

        Raises what a task has raised.
        """
        group = self._group
        if group is None or self._closing:
            return
        self._closing = True  # until the task group is left, a task may start another, which is cancelled too
        group.cancel_scope.cancel()
        for scope in list(self._shields):
            scope.cancel()
        known = error if error is not None and is_cancellation(error) else None
        faults: list[BaseException] = []
        try:
            await group.__aexit__(type(known) if known else None, known, None)
        except BaseExceptionGroup as raised:  # what is cancelled is known to the caller already
            faults = [each for each in raised.exceptions if not is_cancellation(each)]
        except anyio.get_cancelled_exc_class():
            if known is None:
                raise
        finally:
            self._group, self._closing = None, False
        if faults:
            raise faults[0] if len(faults) == 1 else BaseExceptionGroup("faults of background tasks", faults)


def is_cancellation(error: BaseException) -> bool:
    """Is it a cancellation, or a group with one in it?"""
    cancelled = anyio.get_cancelled_exc_class()
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(cancelled) is not None
    return isinstance(error, cancelled)
