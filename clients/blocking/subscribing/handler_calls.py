"""The calls of one subscriber's handler, in the threads that have work for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qb.clients.consuming.desired_membership import JoinPlan
from qb.clients.consuming.handling import handle
from qb.clients.consuming.inbox import MessageBatch
from qb.clients.protocol.message import Message

Handler = Callable[[Message], Any]
BatchHandler = Callable[[list[Message]], Any]


class HandlerCalls:
    """Calls the handler that a plan names."""

    def __init__(self, plan: JoinPlan) -> None:
        self._handler, self._batches = plan.handler, plan.manner.batches

    def handle(self, portion: MessageBatch) -> BaseException | None:
        """Call the handler for what is left of a portion, until it raises or the stay ends; returns what it raised."""
        return handle(portion, self._handler, self._batches)

    def cancel(self) -> None:
        """End the calls that are running: a thread cannot be, its call is left to itself."""
