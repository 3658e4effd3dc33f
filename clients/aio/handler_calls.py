"""As qb.clients.blocking.handler_calls, for handlers on trio."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from qb.clients.blocking.handler_calls import handle
from qb.clients.consuming.inbox import MessageBatch
from qb.clients.protocol.message import Message

AsyncHandler = Callable[[Message], Awaitable[Any]]
AsyncBatchHandler = Callable[[list[Message]], Awaitable[Any]]


def is_asynchronous(handler: Callable[[Any], Any]) -> bool:
    """Must what the handler returns be awaited?"""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


async def handle_in_thread(portion: MessageBatch, handler: Callable[[Any], Any], batches: bool) -> BaseException | None:
    """For handlers that are not async. If cancelled, the thread is left to itself."""
    return await trio.to_thread.run_sync(handle, portion, handler, batches, abandon_on_cancel=True)


async def handle_in_task(portion: MessageBatch, handler: Callable[[Any], Any], batches: bool) -> BaseException | None:
    """For async handlers. A cancellation goes through."""
    try:
        if not batches:
            await _handle_each(portion, handler)
        elif portion.inbox.goes_on:
            await handler(portion.messages)
            portion.done = len(portion.messages)
    except BaseException as error:
        if _is_cancellation(error):
            raise
        return error
    return None


async def _handle_each(portion: MessageBatch, handler: Callable[[Any], Any]) -> None:
    inbox = portion.inbox
    for message in portion.messages[portion.done :]:
        if not inbox.goes_on:
            return
        await handler(message)
        portion.done += 1


def _is_cancellation(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(trio.Cancelled) is not None
    return isinstance(error, trio.Cancelled)
