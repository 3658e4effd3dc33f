"""Calling a plain function for the messages of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from qb.clients.consuming.inbox import MessageBatch
from qb.clients.tracing import tracing


def handle(portion: MessageBatch, handler: Callable[[Any], Any], batches: bool) -> BaseException | None:
    """Call the handler for what is left of a portion, until it raises or the stay ends; returns what it raised."""
    handler = traced(handler, batches)
    try:
        if not batches:
            _handle_each(portion, handler)
        elif portion.inbox.goes_on:
            _check_result(handler(portion.messages))
            portion.done = len(portion.messages)
    except BaseException as error:  # not only Exception: a worker that dies in silence would be worse
        return error
    return None


def traced(handler: Callable[[Any], Any], batches: bool = False) -> Callable[[Any], Any]:
    """Return the handler with a span round each call, if the program has a tracer provider."""
    spans = tracing()
    if spans is None:
        return handler

    def call(given: Any) -> Any:
        with spans.handling(given if batches else (given,), batches):
            return handler(given)

    return call


def _handle_each(portion: MessageBatch, handler: Callable[[Any], Any]) -> None:
    inbox, done = portion.inbox, portion.done
    for message in portion.messages[done:]:
        if not inbox.goes_on:
            return
        if (result := handler(message)) is not None:
            _check_result(result)
        portion.done = done = done + 1


def _check_result(result: object) -> None:
    """A coroutine that is never awaited must not pass for a message handled."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError("the handler returned something to await: declare it with async def, and use AsyncBrokerClient")


def reason_of(error: BaseException) -> str:
    """Return an exception in one line, as the reason of a nack."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be shown"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
