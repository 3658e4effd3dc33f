"""The messages of a subscription as an asynchronous iterator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from types import TracebackType

from qb.clients.aio.event_loops.running_loop import Waiter, running_loop
from qb.clients.aio.subscribing.handler_pool import AsyncHandlerWork
from qb.clients.aio.subscribing.joined_subscription import AsyncJoinedSubscription
from qb.clients.aio.waiting import checkpoint
from qb.clients.consuming.inbox import MessageBatch
from qb.clients.protocol.message import Message


class MessageArrival:
    """Wakes the loop when messages have come, or none will come any more."""

    def __init__(self) -> None:
        self.waiter: Waiter | None = None  # of the loop, from its look for messages on

    def call(self, work: AsyncHandlerWork, workers: int) -> None:
        """There is something to take."""
        if self.waiter is not None:
            self.waiter.wake()

    def stop(self) -> None:
        """Nothing will come any more."""
        if self.waiter is not None:
            self.waiter.wake()


Join = Callable[[MessageArrival], Awaitable[AsyncJoinedSubscription]]


class MessageIterator:
    """The messages of a subscription, for `async for`; returned by AsyncBrokerClient.messages().

    Joins the subscription at the first message. A message is acked when the next one is asked for. A loop that ends by
    `break` or by an exception gives back its message and leaves the subscription; that is no failure of the message.
    In an `async with` block over this object an exception nacks the message instead, as that of a handler does. The
    loop ends by itself when the client disconnects, and raises SubscriptionRemoved when the subscription is deleted.

    Args:
        join: Joins the subscription.
        subscription_id: The subscription.
    """

    def __init__(self, join: Join, subscription_id: str) -> None:
        self._join, self._subscription_id = join, subscription_id
        self._arrival = MessageArrival()
        self._joined: AsyncJoinedSubscription | None = None
        self._portion: MessageBatch | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._subscription_id!r}>"

    def __aiter__(self) -> MessageIterator:
        return self

    async def __anext__(self) -> Message:
        if self._joined is None:
            self._joined = await self._join(self._arrival)
        self._joined.check_process()
        message = self._next_in_hand(self._joined) or await self._take(self._joined)
        if message is None:
            if self._joined.error is not None:
                raise self._joined.error
            raise StopAsyncIteration
        return message

    def _next_in_hand(self, joined: AsyncJoinedSubscription) -> Message | None:
        """The message in hand is done; return the next one of its portion."""
        portion = self._portion
        if portion is None:
            return None
        portion.done += 1
        if portion.done < len(portion.messages) and portion.inbox.goes_on:
            return portion.messages[portion.done]
        joined.handled(portion, None)
        self._portion = None
        return None

    async def _take(self, joined: AsyncJoinedSubscription) -> Message | None:
        await checkpoint()
        while not joined.over:
            self._arrival.waiter = arrived = running_loop().waiter()
            self._portion = await joined.take()
            if self._portion is not None:
                joined.put_down(self._portion)  # leaving does not wait for a loop, which may never ask again
                return self._portion.messages[0]
            await arrived.wait(inf)
        await joined.wait_until_ended()
        return None

    async def __aenter__(self) -> MessageIterator:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._joined is not None and self._portion is not None and isinstance(error, Exception):
            self._joined.handled(self._portion, error)
            self._portion = None
        await self.aclose()

    async def aclose(self) -> None:
        """Leave the subscription and give back the message in hand."""
        if self._joined is not None:
            await self._joined.leave()

    def __del__(self) -> None:
        if self._joined is not None:
            self._joined.abandon()
