"""All that AsyncBrokerClient can do with subscriptions."""

from __future__ import annotations

from typing import Any, Literal

from qb.clients.aio.link import AsyncLink
from qb.clients.aio.subscribing.handler_calls import BatchHandler, Handler, check_handler
from qb.clients.aio.subscribing.joined import AsyncClientSubscriptions
from qb.clients.aio.subscribing.joined_subscription import AsyncJoinedSubscription  # async only
from qb.clients.aio.subscribing.message_iterator import MessageArrival, MessageIterator  # async only
from qb.clients.aio.subscribing.subscriber import AsyncSubscriber
from qb.clients.consuming.desired_membership import plan
from qb.clients.protocol.message import Message  # async only
from qb.clients.protocol.start_positions import Place, options_of, own_name, place_of

Ack = Literal["auto", "manual"]


class AsyncSubscriptionMethods:
    """The part of AsyncBrokerClient that makes, joins and looks after subscriptions."""

    _link: AsyncLink
    _handling: AsyncClientSubscriptions

    async def create_subscription(
        self, subscription_id: str, topic: str, start_offset: Place = 0, **options: Any
    ) -> dict[str, Any]:
        """Create a durable subscription on a topic; the same one again is no error.

        Args:
            subscription_id: Its name, by which subscribers join it: up to 200 characters of A-Z a-z 0-9 . _ -
            topic: The topic whose messages it delivers.
            start_offset: The first message to deliver: an offset, "earliest", "latest", or a time (a datetime, or text
                in ISO 8601).
            **options: `mode` ("shared", "key_shared", "exclusive", "failover"), `ack_deadline` (seconds),
                `max_in_flight`, `max_deliveries`, `backoff` (a dict of initial, factor, cap, jitter),
                `dead_letter_topic`.

        Returns:
            The subscription as the broker describes it.

        Raises:
            SubscriptionExists: One with that name is there, and differs.
            UnknownTopic: There is no such topic.
            BadName: The name breaks the rule for names.
            BadRequest: An option makes no sense.

        Example:
            >>> await client.create_subscription("billing", "orders", "latest", max_deliveries=5)
        """
        created: dict[str, Any] = await self._request(
            "create_subscription",
            subscription_id=subscription_id,
            topic=topic,
            start_offset=place_of(start_offset),
            options=options_of(options),
        )
        return created

    async def delete_subscription(self, subscription_id: str) -> None:
        """Delete a subscription; its subscribers end with SubscriptionRemoved.

        Args:
            subscription_id: The subscription.

        Raises:
            UnknownSubscription: There is no such subscription.
        """
        await self._request("delete_subscription", subscription_id=subscription_id)

    async def list_subscriptions(self, topic: str | None = None) -> list[dict[str, Any]]:
        """List the subscriptions.

        Args:
            topic: Only those of this topic; None lists all.

        Returns:
            The subscriptions as the broker describes them.
        """
        subscriptions: list[dict[str, Any]] = await self._request("list_subscriptions", topic=topic)
        return subscriptions

    async def describe_subscription(self, subscription_id: str) -> dict[str, Any]:
        """Describe a subscription.

        Args:
            subscription_id: The subscription.

        Returns:
            Its options, lag, subscribers, messages in flight, and counts.

        Raises:
            UnknownSubscription: There is no such subscription.
        """
        described: dict[str, Any] = await self._request("describe_subscription", subscription_id=subscription_id)
        return described

    async def seek(self, subscription_id: str, to: Place, partition: int | None = None) -> dict[str, Any]:
        """Move a subscription to another place in its topic.

        Args:
            subscription_id: The subscription.
            to: The next message to deliver: an offset, "earliest", "latest", or a time.
            partition: Only this partition; None moves all.

        Returns:
            The subscription as it is now.

        Raises:
            UnknownSubscription: There is no such subscription.
            UnknownPartition: The topic has no such partition.
            BadRequest: The place makes no sense.
        """
        changed: dict[str, Any] = await self._request(
            "seek", subscription_id=subscription_id, to=place_of(to), partition=partition
        )
        return changed

    async def pause(self, subscription_id: str) -> dict[str, Any]:
        """Deliver nothing more until resume().

        Args:
            subscription_id: The subscription.

        Returns:
            The subscription as it is now.

        Raises:
            UnknownSubscription: There is no such subscription.
        """
        changed: dict[str, Any] = await self._request("pause", subscription_id=subscription_id)
        return changed

    async def resume(self, subscription_id: str) -> dict[str, Any]:
        """Deliver again after pause().

        Args:
            subscription_id: The subscription.

        Returns:
            The subscription as it is now.

        Raises:
            UnknownSubscription: There is no such subscription.
        """
        changed: dict[str, Any] = await self._request("resume", subscription_id=subscription_id)
        return changed

    async def fork(self, subscription_id: str, new_id: str) -> dict[str, Any]:
        """Create a subscription that starts exactly where another one stands.

        Args:
            subscription_id: The subscription to copy.
            new_id: The name of the new one.

        Returns:
            The new subscription.

        Raises:
            UnknownSubscription: There is no such subscription.
            SubscriptionExists: There is one with the new name already.
        """
        forked: dict[str, Any] = await self._request("fork", subscription_id=subscription_id, new_id=new_id)
        return forked

    async def explain(self, subscription_id: str, offset: int, partition: int = 0) -> str:
        """Tell in words why a message of a subscription is where it is.

        Args:
            subscription_id: The subscription.
            offset: The offset of the message.
            partition: Its partition.

        Returns:
            A text for people.

        Raises:
            UnknownSubscription: There is no such subscription.
            UnknownPartition: The topic has no such partition.

        Example:
            >>> print(await client.explain("billing", offset=42))
        """
        explained: dict[str, str] = await self._request(
            "explain", subscription_id=subscription_id, offset=offset, partition=partition
        )
        return explained["text"]

    async def dead_letters(self, subscription_id: str, max: int = 100) -> list[dict[str, Any]]:
        """List the dead letters of a subscription that are neither retried nor purged, oldest first.

        Args:
            subscription_id: The subscription.
            max: The most that are returned.

        Returns:
            The dead letters, each with its number, where it came from, and why it failed.

        Raises:
            UnknownSubscription: There is no such subscription.
        """
        letters: list[dict[str, Any]] = await self._request("dead_letters", subscription_id=subscription_id, max=max)
        return letters

    async def retry_dead_letters(self, subscription_id: str, numbers: list[int] | None = None) -> int:
        """Deliver dead letters to their subscription again.

        Args:
            subscription_id: The subscription.
            numbers: The numbers of the dead letters; None takes all.

        Returns:
            How many are delivered again.

        Raises:
            UnknownSubscription: There is no such subscription.
        """
        done: dict[str, int] = await self._request(
            "retry_dead_letters", subscription_id=subscription_id, numbers=numbers
        )
        return done["retried"]

    async def purge_dead_letters(self, subscription_id: str, numbers: list[int] | None = None) -> int:
        """Forget dead letters.

        Args:
            subscription_id: The subscription.
            numbers: The numbers of the dead letters; None takes all.

        Returns:
            How many were forgotten.

        Raises:
            UnknownSubscription: There is no such subscription.
        """
        done: dict[str, int] = await self._request(
            "purge_dead_letters", subscription_id=subscription_id, numbers=numbers
        )
        return done["purged"]

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

        return MessageIterator(join)

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

    async def _request(self, method: str, **arguments: Any) -> Any:
        """Call a method of the broker."""
        raise NotImplementedError
