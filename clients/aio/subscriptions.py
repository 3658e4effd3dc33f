"""All that AsyncBrokerClient can do with subscriptions."""

from __future__ import annotations

from typing import Any, Literal

from qb.clients.aio.link import AsyncLink
from qb.clients.aio.subscribing.handler_calls import BatchHandler, Handler, check_handler
from qb.clients.aio.subscribing.joined import AsyncJoinedSubscribers
from qb.clients.aio.subscribing.message_iterator import MessageArrival, MessageIterator  # async only
from qb.clients.aio.subscribing.subscriber import AsyncSubscriber
from qb.clients.consuming.desired_membership import plan
from qb.clients.protocol.message import Message  # async only
from qb.clients.protocol.start_positions import Place, options_of, own_name, place_of

Ack = Literal["auto", "manual"]


class AsyncSubscriptionMethods:
    """The part of AsyncBrokerClient that makes, joins and looks after subscriptions."""

    _link: AsyncLink
    _handling: AsyncJoinedSubscribers

    async def create_subscription(
        self, subscription_id: str, topic: str, start_offset: Place = 0, **options: Any
    ) -> dict[str, Any]:
        """Make a subscription and return it; the same one again is no error.

        `start_offset` is an offset, "earliest", "latest" or a time. Options: mode, ack_deadline, max_in_flight,
        max_deliveries, backoff (initial, factor, cap, jitter), dead_letter_topic. Raises SubscriptionExists,
        UnknownTopic, BadName, BadRequest.
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
        """Remove a subscription; whoever has joined it gets SubscriptionRemoved. Raises UnknownSubscription."""
        await self._request("delete_subscription", subscription_id=subscription_id)

    async def list_subscriptions(self, topic: str | None = None) -> list[dict[str, Any]]:
        """Return all subscriptions, or those of one topic."""
        subscriptions: list[dict[str, Any]] = await self._request("list_subscriptions", topic=topic)
        return subscriptions

    async def describe_subscription(self, subscription_id: str) -> dict[str, Any]:
        """Return a subscription with its lag, what is in flight to whom, and its counts. Raises UnknownSubscription."""
        described: dict[str, Any] = await self._request("describe_subscription", subscription_id=subscription_id)
        return described

    async def seek(self, subscription_id: str, to: Place, partition: int | None = None) -> dict[str, Any]:
        """Begin anew at an offset, "earliest", "latest" or a time, in one partition or in all."""
        changed: dict[str, Any] = await self._request(
            "seek", subscription_id=subscription_id, to=place_of(to), partition=partition
        )
        return changed

    async def pause(self, subscription_id: str) -> dict[str, Any]:
        """Deliver nothing until resume()."""
        changed: dict[str, Any] = await self._request("pause", subscription_id=subscription_id)
        return changed

    async def resume(self, subscription_id: str) -> dict[str, Any]:
        """Deliver again."""
        changed: dict[str, Any] = await self._request("resume", subscription_id=subscription_id)
        return changed

    async def fork(self, subscription_id: str, new_id: str) -> dict[str, Any]:
        """Make a subscription that starts exactly where another one stands, and return it."""
        forked: dict[str, Any] = await self._request("fork", subscription_id=subscription_id, new_id=new_id)
        return forked

    async def explain(self, subscription_id: str, offset: int, partition: int = 0) -> str:
        """Return in words why a message is where it is."""
        explained: dict[str, str] = await self._request(
            "explain", subscription_id=subscription_id, offset=offset, partition=partition
        )
        return explained["text"]

    async def dead_letters(self, subscription_id: str, max: int = 100) -> list[dict[str, Any]]:
        """Return the dead letters that are neither retried nor purged, oldest first."""
        letters: list[dict[str, Any]] = await self._request("dead_letters", subscription_id=subscription_id, max=max)
        return letters

    async def retry_dead_letters(self, subscription_id: str, numbers: list[int] | None = None) -> int:
        """Deliver these dead letters, or all, to this subscription again; returns how many."""
        done: dict[str, int] = await self._request(
            "retry_dead_letters", subscription_id=subscription_id, numbers=numbers
        )
        return done["retried"]

    async def purge_dead_letters(self, subscription_id: str, numbers: list[int] | None = None) -> int:
        """Forget these dead letters, or all; returns how many."""
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
        Its return acks the message, its exception nacks it; with `ack="manual"` it calls Message.ack() or nack(). A
        batch handler is given lists; its return or exception counts for all in it. Handlers run one at a time for each
        client, unless `concurrency` is larger. At most `window` messages are delivered ahead. The lease of a message is
        renewed while it is here. Joins again by itself when the connection was lost. Raises UnknownSubscription,
        SubscriptionBusy.
        """
        return await self._handling.join(
            check_handler(plan(subscription_id, handler, batch_handler, ack, concurrency, window))
        )

    # async only

    def messages(self, subscription_id: str, *, ack: Ack = "auto", window: int | None = None) -> MessageIterator:
        """Return the messages of a subscription for `async for`; see Messages for how they are settled."""

        def nobody(message: Message) -> None:
            raise AssertionError("the loop handles the messages")

        async def join(arrival: MessageArrival) -> AsyncSubscriber:
            return await self._handling.join(plan(subscription_id, nobody, None, ack, 1, window), arrival)

        return MessageIterator(join)

    # end of async only

    async def unsubscribe_from_subscription(self, subscription_id: str) -> None:
        """Leave: finish what is in hand and hand back the rest; see AsyncSubscriber.unsubscribe(). Raises NotJoined."""
        await self._handling.find(subscription_id).unsubscribe()

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
        """Make a subscription unless it is there, and join it."""
        wanted = check_handler(plan(subscription_id, handler, batch_handler, ack, concurrency, window))
        await self.create_subscription(subscription_id, topic, start_offset, **options)
        return await self._handling.join(wanted)

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
        """Handle all messages of a topic from an offset on, by a subscription of its own, deleted when it ends."""
        name = own_name(topic)
        wanted = check_handler(plan(name, handler, batch_handler, ack, concurrency, window))
        await self.create_subscription(name, topic, offset)
        return await self._handling.join(wanted, on_end=lambda: self._delete_own(name))

    async def _delete_own(self, name: str) -> None:
        if self._link.up:
            await self.delete_subscription(name)

    async def _request(self, method: str, **arguments: Any) -> Any:
        """Call a method of the broker."""
        raise NotImplementedError
