"""All that AsyncBrokerClient can do with topics."""

from __future__ import annotations

from collections.abc import Iterable

from qb.clients.aio.methods.client_base import AsyncClientBase
from qb.clients.aio.waiting import now
from qb.clients.results import TopicInfo


class AsyncTopicMethods(AsyncClientBase):
    """The part of AsyncBrokerClient that makes and describes topics."""

    async def create_topic(
        self,
        topic: str,
        partitions: int = 1,
        retention_hours: float | None = None,
        retention_bytes: int | None = None,
    ) -> TopicInfo:
        """Create a topic.

        Args:
            topic: Its name: up to 200 characters of A-Z a-z 0-9 . _ -
            partitions: How many partitions it has.
            retention_hours: Messages older than this may be dropped; None keeps them.
            retention_bytes: The oldest messages are dropped when a partition is larger than this; None keeps them.

        Returns:
            The topic as the broker describes it.

        Raises:
            TopicExists: There is one with that name already.
            BadName: The name breaks the rule for names.
            BadRequest: A number makes no sense.
            LimitReached: The broker has as many partitions as its settings allow.

        Example:
            >>> await client.create_topic("orders", partitions=4)
        """
        created = await self._request(
            "create_topic",
            topic=topic,
            partitions=partitions,
            retention_hours=retention_hours,
            retention_bytes=retention_bytes,
        )
        return TopicInfo(created)

    async def delete_topic(self, topic: str, if_unused: bool = False) -> None:
        """Delete a topic with all its messages.

        Args:
            topic: The topic.
            if_unused: Only if it has no subscriptions.

        Raises:
            UnknownTopic: There is no such topic.
            TopicInUse: It has subscriptions, and `if_unused` was given.
        """
        await self._request("delete_topic", topic=topic, if_unused=if_unused)

    async def add_partitions(self, topic: str, partitions: int) -> TopicInfo:
        """Give a topic more partitions. Keys may belong to another partition afterwards.

        Args:
            topic: The topic.
            partitions: How many it has afterwards.

        Returns:
            The topic as it is now.

        Raises:
            UnknownTopic: There is no such topic.
            BadRequest: It has as many already, or more.
        """
        return TopicInfo(await self._request("add_partitions", topic=topic, partitions=partitions))

    async def list_topics(self) -> list[TopicInfo]:
        """List all topics.

        Returns:
            The topics as the broker describes them.

        Raises:
            BrokerUnavailable: There is no broker; nothing was asked.
            RequestTimedOut: The broker did not answer within `request_timeout` seconds.
        """
        return [TopicInfo(each) for each in await self._request("list_topics")]

    async def describe_topic(self, topic: str) -> TopicInfo:
        """Describe a topic.

        Args:
            topic: The topic.

        Returns:
            The topic with its partitions, offsets and sizes.

        Raises:
            UnknownTopic: There is no such topic.
        """
        return TopicInfo(await self._request("describe_topic", topic=topic))

    async def describe_topics(self, topics: Iterable[str]) -> list[TopicInfo]:
        """Describe several topics, all as they are at one moment.

        Args:
            topics: The names of the topics.

        Returns:
            What describe_topic() returns for each.

        Raises:
            UnknownTopic: One of them does not exist.
        """
        return [TopicInfo(each) for each in await self._request("describe_topics", topics=list(topics))]

    async def _count_partitions(self, topic: str, expected: int = 1) -> int:
        """Return how many partitions a topic has; if fewer than expected were known, the broker is asked again."""
        count = self._routes.partitions(topic, now())
        if count is None or count < expected:
            described = await self.describe_topic(topic)
            count = int(described.get("partitions", 1))
            self._routes.learn(topic, count, now())
        return count
