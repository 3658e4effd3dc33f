"""Joining subscriptions, so that messages are pushed to handlers."""

from __future__ import annotations

from typing import Any, Literal

from qb.clients.aio.methods.subscription_admin import AsyncSubscriptionAdminMethods
from qb.clients.aio.subscribing.handler_calls import BatchHandler, Handler, check_handler
from qb.clients.aio.subscribing.joined_subscription import AsyncJoinedSubscription  # async only
from qb.clients.aio.subscribing.message_iterator import MessageArrival, MessageIterator  # async only
from qb.clients.aio.subscribing.subscriber import AsyncSubscriber
from qb.clients.consuming.desired_membership import plan
from qb.clients.consuming.start_positions import Place, own_name
from qb.clients.protocol.message import Message  # async only

Ack = Literal["auto", "manual"]


class AsyncSubscriptionMethods(AsyncSubscriptionAdminMethods):
    """The part of AsyncBrokerClient that joins subscriptions and leaves them."""

    async def subscribe_to_subscription(
        self,
        subscription_id: str,
        handler: Handler | None = None,
        *,
        batch_handler: BatchHandler | None = None,
        ack: Ack = "auto",
        concurrency: int = 1,
        window: int | None = None,
    ) -> AsyncSubscriber:
        """Join a subscription: from now on the handler is called with each message.

        It runs in a task of the client's own, or in a thread if it is not async.
        Its return acks the message, its exception nacks it. The lease of a message is renewed while it is here. The
        subscription is joined again by itself when the connection was lost.

        Args:
            subscription_id: The subscription.
            handler: Called with one Message at a time.
            batch_handler: Called with lists of messages instead; its return or exception counts for all in a list.
            ack: "auto", or "manual": then the handler calls Message.ack() or Message.nack().
            concurrency: How many handlers of this subscription may run at a time. With 1 the handlers of all
                subscriptions of the client run one at a time.
            window: The most messages that are delivered ahead; the broker's default if None.

        Returns:
            The subscriber, to wait for it or to leave.

        Raises:
            UnknownSubscription: There is no such subscription.
            SubscriptionBusy: Its mode has no place for one more subscriber.
            TypeError: The handler is not one that this client can call.
            ValueError: An argument makes no sense.

        Example:
            >>> subscriber = await client.subscribe_to_subscription("billing", handle, concurrency=4)
        """
        wanted = check_handler(plan(subscription_id, handler, batch_handler, ack, concurrency, window))
        return AsyncSubscriber(await self._handling.join(wanted))

    # async only

    def messages(self, subscription_id: str, *, ack: Ack = "auto", window: int | None = None) -> MessageIterator:
        """Return the messages of a subscription for `async for`.

        A message is acked when the next one is asked for; see MessageIterator.

        Args:
            subscription_id: The subscription; it is joined at the first message.
            ack: "auto", or "manual": then the loop calls Message.ack() or Message.nack().
            window: The most messages that are delivered ahead; the broker's default if None.

        Returns:
            An asynchronous iterator, also to be used with `async with`.

        Example:
            >>> async for message in client.messages("billing"):
            ...     print(message.text())
        """

        def unused(message: Message) -> None:
            raise AssertionError("the loop handles the messages")

        async def join(arrival: MessageArrival) -> AsyncJoinedSubscription:
            return await self._handling.join(plan(subscription_id, unused, None, ack, 1, window), arrival)

        return MessageIterator(join, subscription_id)

    # end of async only

    async def unsubscribe_from_subscription(self, subscription_id: str) -> None:
        """Leave a subscription that this client has joined; see AsyncSubscriber.unsubscribe().

        Args:
            subscription_id: The subscription.

        Raises:
            NotJoined: This client has not joined it.
        """
        await self._handling.find(subscription_id).leave()

    async def create_and_subscribe(
        self,
        subscription_id: str,
        topic: str,
        handler: Handler | None = None,
        start_offset: Place = 0,
        *,
        batch_handler: BatchHandler | None = None,
        ack: Ack = "auto",
        concurrency: int = 1,
        window: int | None = None,
        **options: Any,
    ) -> AsyncSubscriber:
        """Create a subscription unless it is there, and join it.

        Args:
            subscription_id: Its name; see create_subscription().
            topic: The topic whose messages it delivers.
            handler: Called with one Message at a time; see subscribe_to_subscription().
            start_offset: The first message to deliver, if the subscription is new.
            batch_handler: Called with lists of messages instead.
            ack: "auto" or "manual".
            concurrency: How many handlers may run at a time.
            window: The most messages that are delivered ahead.
            **options: The subscription's options; see create_subscription().

        Returns:
            The subscriber, to wait for it or to leave.

        Raises:
            SubscriptionExists: One with that name is there, and differs.
            UnknownTopic: There is no such topic.
            SubscriptionBusy: Its mode has no place for one more subscriber.

        Example:
            >>> subscriber = await client.create_and_subscribe("billing", "orders", handle)
        """
        wanted = check_handler(plan(subscription_id, handler, batch_handler, ack, concurrency, window))
        await self.create_subscription(subscription_id, topic, start_offset, **options)
        return AsyncSubscriber(await self._handling.join(wanted))

    async def subscribe(
        self,
        topic: str,
        offset: Place = 0,
        handler: Handler | None = None,
        *,
        batch_handler: BatchHandler | None = None,
        ack: Ack = "auto",
        concurrency: int = 1,
        window: int | None = None,
    ) -> AsyncSubscriber:
        """Handle all messages of a topic, by a subscription of its own that is deleted when it ends.

        Args:
            topic: The topic.
            offset: The first message: an offset, "earliest", "latest", or a time.
            handler: Called with one Message at a time; see subscribe_to_subscription().
            batch_handler: Called with lists of messages instead.
            ack: "auto" or "manual".
            concurrency: How many handlers may run at a time.
            window: The most messages that are delivered ahead.

        Returns:
            The subscriber, to wait for it or to leave.

        Raises:
            UnknownTopic: There is no such topic.
            BadRequest: The offset makes no sense.

        Example:
            >>> async with await client.subscribe("orders", "latest", print) as subscriber:
            ...     await subscriber.wait(timeout=10)
        """
        name = own_name(topic)
        wanted = check_handler(plan(name, handler, batch_handler, ack, concurrency, window))
        await self.create_subscription(name, topic, offset)
        return AsyncSubscriber(await self._handling.join(wanted, on_end=lambda: self._delete_own(name)))

    async def _delete_own(self, name: str) -> None:
        if self._link.up:
            await self.delete_subscription(name)
