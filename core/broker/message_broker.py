"""What can be asked of the broker, whichever door it comes through."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import msgspec
import trio

from qb.core.broker.append_service import AppendService
from qb.core.broker.broker_metrics import BrokerMetrics
from qb.core.broker.fetching import FetchLimits, Turn, fetch
from qb.core.broker.producer_secrets import ProducerSecrets
from qb.core.broker.producers import Producers
from qb.core.groups.group_manager import GroupManager
from qb.core.push.subscription_manager import SubscriptionManager
from qb.core.settings import Settings
from qb.core.transactions.transaction_manager import TransactionManager
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import (
    BadRequest,
    ShuttingDown,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from qb.core.wire.names import check_name
from qb.core.wire.version import __version__
from qb.storage.engine import Engine, PartitionLog, StoredChunk, Topic
from qb.storage.faults import keep_running


class MessageBroker:
    """Topics and their messages. Every door calls these methods, so a rule is written once."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.appends = AppendService(engine, settings.server, self.ensure_topic)
        # First: it holds what readers may not see yet.
        self.transactions = TransactionManager(engine, settings.server, self.appends.append)
        self.producers = Producers()
        self.producer_secrets = ProducerSecrets(engine.metadata)
        self.subscriptions = SubscriptionManager(engine, self.ensure_topic, self.appends.store_dead_letter)
        self.groups = GroupManager(engine)
        self.metrics = BrokerMetrics()
        self.connections = 0
        self.draining = False
        self._started = trio.current_time()
        self.producers.restore(
            engine.log(topic.topic, partition)
            for topic in engine.topics().values()
            for partition in range(topic.partitions)
        )

    async def run(self) -> None:
        """Serve subscriptions, groups and transactions until cancelled; the engine must outlive this."""
        async with trio.open_nursery() as keepers:
            keepers.start_soon(self.subscriptions.deliveries.run)
            keepers.start_soon(keep_running, "consumer groups", self.groups.run)
            keepers.start_soon(self.transactions.run)

    # Topics

    async def create_topic(
        self,
        topic: str,
        partitions: int = 1,
        retention_hours: float | None = None,
        retention_bytes: int | None = None,
    ) -> Topic:
        """Make a topic; returns when it is durable. Raises BadName, BadRequest, TopicExists."""
        check_name("topic", topic)
        most = self.settings.server.max_partitions
        if not 1 <= partitions <= most:
            raise BadRequest(f"partitions must be from 1 to {most}, not {partitions}")
        for name, value in (("retention_hours", retention_hours), ("retention_bytes", retention_bytes)):
            if value is not None and not 0 <= value < 2**53:
                raise BadRequest(f"{name} must not be negative or beyond reason: {value}")
        if topic in self.engine.topics():
            raise TopicExists(topic)
        made = await self.engine.create_topic(
            Topic(
                topic=topic,
                partitions=partitions,
                retention_hours=retention_hours,
                retention_bytes=retention_bytes,
                created_ms=now_ms(),
            )
        )
        self.groups.topic_changed(topic, partitions)
        return made

    async def add_partitions(self, topic: str, partitions: int) -> Topic:
        """Give a topic that many partitions in all. Raises UnknownTopic, BadRequest for fewer than it has."""
        known, most = self.topic(topic), self.settings.server.max_partitions
        if not known.partitions <= partitions <= most:
            raise BadRequest(
                f"topic {topic!r} has {known.partitions} partitions; it can have more, up to {most}, but never fewer"
            )
        grown = await self.engine.add_partitions(topic, partitions)
        self.subscriptions.partitions_added(topic)
        self.groups.topic_changed(topic, grown.partitions)
        return grown

    async def delete_topic(self, topic: str, if_unused: bool = False) -> dict[str, Any]:
        """Remove a topic and everything in it. Raises UnknownTopic, TopicInUse."""
        self.topic(topic)
        await self.subscriptions.delete_topic(topic, if_unused)
        await self.groups.topic_deleted(topic)
        self.appends.topic_deleted(topic)
        return {}

    async def list_topics(self) -> list[Topic]:
        """Return every topic, sorted by name."""
        return [topic for _, topic in sorted(self.engine.topics().items())]

    async def describe_topic(self, topic: str) -> dict[str, Any]:
        """Return a topic with the state of its partitions. Raises UnknownTopic."""
        return self._described(topic)

    async def describe_topics(self, topics: list[str]) -> list[dict[str, Any]]:
        """Return these topics as describe_topic() does, all of them as they are at one moment. Raises UnknownTopic."""
        return [self._described(topic) for topic in topics]

    def _described(self, topic: str) -> dict[str, Any]:
        known = self.topic(topic)
        logs = [self.engine.log(topic, partition).state() for partition in range(known.partitions)]
        return {
            **msgspec.structs.asdict(known),
            "messages": sum(log.next_offset - log.first_offset for log in logs),
            "bytes": sum(log.bytes for log in logs),
            "logs": logs,
        }

    async def server_info(self) -> dict[str, Any]:
        """Return who is answering."""
        return {
            "version": __version__,
            "uptime": round(trio.current_time() - self._started, 3),
            "connections": self.connections,
            "topics": len(self.engine.topics()),
            "data_dir": self.settings.storage.data_dir,
            "durability": self.engine.durability,
        }

    def topic(self, name: str) -> Topic:
        """Return a topic. Raises UnknownTopic, or BadName when no topic could be called that."""
        known = self.engine.topics().get(name)
        if known is None:
            raise UnknownTopic(check_name("topic", name))
        return known

    # Reading

    async def fetch(
        self, topic: str, partition: int, offset: int, limits: FetchLimits, turn: Turn = nullcontext
    ) -> StoredChunk:
        """Return stored messages from `offset` on, read in a `turn()`.

        Raises UnknownTopic, UnknownPartition, OffsetOutOfRange, LogDamaged.
        """
        return await fetch(self.log(topic, partition), offset, limits, turn)

    async def offsets(self, topic: str, partition: int = 0, time_ms: int | None = None) -> dict[str, Any]:
        """Return the first and the next offset of a partition and, if a time is given, the first one from then on."""
        log = self.log(topic, partition)
        found = {"first": log.first_offset, "next": log.end_offset}
        if time_ms is not None:
            found["offset_for_time"] = await log.offset_for_time(time_ms)
        return found

    def log(self, topic: str, partition: int) -> PartitionLog:
        """Return a partition's log. Raises UnknownTopic, UnknownPartition."""
        known = self.topic(topic)
        if not 0 <= partition < known.partitions:
            raise UnknownPartition(topic, partition, known.partitions)
        return self.engine.log(topic, partition)

    async def ensure_topic(self, topic: str) -> None:
        """Make the topic unless it exists. Raises as create_topic() does."""
        try:
            await self.create_topic(topic)
        except TopicExists:
            pass

    def check_open(self) -> None:
        """Raises ShuttingDown once the broker drains."""
        if self.draining:
            raise ShuttingDown("the broker is shutting down")
