"""The calls of one subscriber's handler, in the threads that have work for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from qb.clients.consuming.desired_membership import JoinPlan
from qb.clients.consuming.handling import handle, traced
from qb.clients.consuming.inbox import MessageBatch
from qb.clients.protocol.message import Message

__all__ = ["BatchHandler", "Handler", "HandlerCalls", "check_handler", "traced"]

Handler = Callable[[Message], Any]
BatchHandler = Callable[[list[Message]], Any]


def check_handler(plan: JoinPlan) -> JoinPlan:
    """Return the plan if its handler can be called in a thread. Raises TypeError for an `async def`."""
    for function in (plan.handler, type(plan.handler).__call__):
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError("the handler is an async def, which BrokerClient cannot run: use AsyncBrokerClient")
    return plan


class HandlerCalls:
    """Calls the handler that a plan names."""

    def __init__(self, plan: JoinPlan) -> None:
        self._handler, self._batches = plan.handler, plan.manner.batches

    def handle(self, portion: MessageBatch) -> BaseException | None:
        """Call the handler for what is left of a portion, until it raises or the stay ends; returns what it raised."""
        return handle(portion, self._handler, self._batches)

    def cancel(self) -> None:
        """End the calls that are running: a thread cannot be, its call is left to itself."""
