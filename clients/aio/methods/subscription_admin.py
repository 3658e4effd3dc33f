"""All that AsyncBrokerClient can do with subscriptions without joining them."""

from __future__ import annotations

from typing import Any

from qb.clients.aio.methods.client_base import AsyncClientBase
from qb.clients.consuming.start_positions import Place, options_of, place_of
from qb.clients.results import DeadLetter, SubscriptionInfo


class AsyncSubscriptionAdminMethods(AsyncClientBase):
    """The part of AsyncBrokerClient that makes, describes and moves subscriptions."""

    async def create_subscription(
        self, subscription_id: str, topic: str, start_offset: Place = 0, **options: Any
    ) -> SubscriptionInfo:
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
        created = await self._request(
            "create_subscription",
            subscription_id=subscription_id,
            topic=topic,
            start_offset=place_of(start_offset),
            options=options_of(options),
        )
        return SubscriptionInfo(created)

    async def delete_subscription(self, subscription_id: str) -> None:
        """Delete a subscription; its subscribers end with SubscriptionRemoved.

        Args:
            subscription_id: The subscription.

        Raises:
            UnknownSubscription: There is no such subscription.
        """
        await self._request("delete_subscription", subscription_id=subscription_id)

    async def list_subscriptions(self, topic: str | None = None) -> list[SubscriptionInfo]:
        """List the subscriptions.

        Args:
            topic: Only those of this topic; None lists all.

        Returns:
            The subscriptions as the broker describes them.

        Raises:
            BrokerUnavailable: There is no broker; nothing was asked.
            RequestTimedOut: The broker did not answer within `request_timeout` seconds.
        """
        return [SubscriptionInfo(each) for each in await self._request("list_subscriptions", topic=topic)]

    async def describe_subscription(self, subscription_id: str) -> SubscriptionInfo:
        """Describe a subscription.

        Args:
            subscription_id: The subscription.

        Returns:
            Its options, lag, subscribers, messages in flight, and counts.

        Raises:
            UnknownSubscription: There is no such subscription.
        """
        described = await self._request("describe_subscription", subscription_id=subscription_id)
        return SubscriptionInfo(described)

    async def seek(self, subscription_id: str, to: Place, partition: int | None = None) -> SubscriptionInfo:
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
        changed = await self._request("seek", subscription_id=subscription_id, to=place_of(to), partition=partition)
        return SubscriptionInfo(changed)

    async def pause(self, subscription_id: str) -> SubscriptionInfo:
        """Deliver nothing more until resume().

        Args:
            subscription_id: The subscription.

        Returns:
            The subscription as it is now.

        Raises:
            UnknownSubscription: There is no such subscription.
        """
        changed = await self._request("pause", subscription_id=subscription_id)
        return SubscriptionInfo(changed)

    async def resume(self, subscription_id: str) -> SubscriptionInfo:
        """Deliver again after pause().

        Args:
            subscription_id: The subscription.

        Returns:
            The subscription as it is now.

        Raises:
            UnknownSubscription: There is no such subscription.
        """
        changed = await self._request("resume", subscription_id=subscription_id)
        return SubscriptionInfo(changed)

    async def fork(self, subscription_id: str, new_id: str) -> SubscriptionInfo:
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
        forked = await self._request("fork", subscription_id=subscription_id, new_id=new_id)
        return SubscriptionInfo(forked)

    async def explain(self, subscription_id: str, offset: int, partition: int = 0) -> str:
        """Explain in words why a message of a subscription is where it is.

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

    async def dead_letters(self, subscription_id: str, max: int = 100) -> list[DeadLetter]:
        """List the dead letters of a subscription that are neither retried nor purged, oldest first.

        Args:
            subscription_id: The subscription.
            max: The most that are returned.

        Returns:
            The dead letters, each with its number, where it came from, and why it failed.

        Raises:
            UnknownSubscription: There is no such subscription.
        """
        letters = await self._request("dead_letters", subscription_id=subscription_id, max=max)
        return [DeadLetter(each) for each in letters]

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
