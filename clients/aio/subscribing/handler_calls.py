"""The calls of one subscriber's handler, in the tasks that have work for it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.to_thread

from qb.clients.aio.background import is_cancellation
from qb.clients.aio.event_loops.running_loop import running_loop
from qb.clients.consuming.desired_membership import JoinPlan
from qb.clients.consuming.handling import handle
from qb.clients.consuming.inbox import MessageBatch
from qb.clients.protocol.message import Message
from qb.clients.tracing import tracing

Handler = Callable[[Message], Awaitable[Any]] | Callable[[Message], Any]
BatchHandler = Callable[[list[Message]], Awaitable[Any]] | Callable[[list[Message]], Any]


def check_handler(plan: JoinPlan) -> JoinPlan:
    """Return the plan if its handler can be awaited or called in a thread. Raises TypeError for an async generator."""
    for function in (plan.handler, type(plan.handler).__call__):
        if inspect.isasyncgenfunction(function):
            raise TypeError("the handler is an async generator, which cannot be awaited: let it return, not yield")
    return plan


class AsyncHandlerCalls:
    """Calls the handler that a plan names: an async one in the task that asks, any other in a thread."""

    def __init__(self, plan: JoinPlan) -> None:
        self._handler, self._batches = plan.handler, plan.manner.batches
        self._call = _handle_in_task if is_asynchronous(plan.handler) else _handle_in_thread
        self._running: set[anyio.CancelScope] = set()

    async def handle(self, portion: MessageBatch) -> BaseException | None:
        """Call the handler for what is left of a portion, until it raises or the stay ends; returns what it raised.

        Returns None too if cancel() ended it: then the portion says what is done. A cancellation from outside goes
        through.
        """
        with anyio.CancelScope() as scope:
            self._running.add(scope)
            try:
                return await self._call(portion, self._handler, self._batches)
            finally:
                self._running.discard(scope)
        return None

    def cancel(self) -> None:
        """End the calls that are running. A thread cannot be ended, its call is left to itself."""
        for scope in self._running:
            scope.cancel()


def is_asynchronous(handler: Callable[[Any], Any]) -> bool:
    """Must what the handler returns be awaited?"""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


async def _handle_in_thread(
    portion: MessageBatch, handler: Callable[[Any], Any], batches: bool
) -> BaseException | None:
    return await anyio.to_thread.run_sync(handle, portion, handler, batches, abandon_on_cancel=True)


async def _handle_in_task(portion: MessageBatch, handler: Callable[[Any], Any], batches: bool) -> BaseException | None:
    handler = traced(handler, batches)
    try:
        if not batches:
            await _handle_each(portion, handler)
        elif portion.inbox.goes_on:
            await handler(portion.messages)
            portion.done = len(portion.messages)
    except BaseException as error:
        if not is_cancellation(error):
            return error
        if running_loop().is_cancelling():
            raise
        failure = RuntimeError("the handler awaited a task or future that was cancelled")
        failure.__cause__ = error
        return failure
    return None


def traced(handler: Callable[[Any], Awaitable[Any]], batches: bool = False) -> Callable[[Any], Awaitable[Any]]:
    """Return an async handler with a span round each call, if the program has a tracer provider."""
    spans = tracing()
    if spans is None:
        return handler

    async def call(given: Any) -> Any:
        with spans.handling(given if batches else (given,), batches):
            return await handler(given)

    return call


async def _handle_each(portion: MessageBatch, handler: Callable[[Any], Any]) -> None:
    inbox = portion.inbox
    for message in portion.messages[portion.done :]:
        if not inbox.goes_on:
            return
        await handler(message)
        portion.done += 1
