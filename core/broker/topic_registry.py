"""The topics of the broker: created, grown, deleted, found and described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import trio

from qb.core.groups.group_manager import GroupManager
from qb.core.pacing import portions, spend
from qb.core.push.subscription_manager import SubscriptionManager
from qb.core.rights.known_users import KnownUsers
from qb.core.settings import ServerSettings
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BadRequest, LimitReached, TopicExists, UnknownPartition, UnknownTopic
from qb.core.wire.names import check_name
from qb.storage.engine import Engine, LogState, PartitionLog, Topic

DESCRIBED_AT_ONCE = 10_000  # topics that one request may name
LIGHT = 16  # to read the ends of a log takes about this part of the time of an item (qb.core.pacing)


class TopicRegistry:
    """Every topic. Its methods are what doors call; a rule about topics is written once, here."""

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        subscriptions: SubscriptionManager,
        groups: GroupManager,
        deleted: Callable[[str], None],
        users: KnownUsers,
    ) -> None:
        """`deleted` is called with the name of each topic that was deleted."""
        self._engine = engine
        self._settings = settings
        self._subscriptions = subscriptions
        self._groups = groups
        self._deleted = deleted
        self._users = users
        self._growing = trio.Lock()  # held while a topic is created or grows, so that the limits are exact

    # Finding

    def get(self, name: str) -> Topic:
        """Return a topic. Raises UnknownTopic, or BadName when no topic could be called that."""
        known = self._engine.topics().get(name)
        if known is None:
            raise UnknownTopic(check_name("topic", name))
        return known

    def log(self, topic: str, partition: int) -> PartitionLog:
        """Return a partition's log. Raises UnknownTopic, UnknownPartition, BadName."""
        known = self.get(topic)
        if not 0 <= partition < known.partitions:
            raise UnknownPartition(topic, partition, known.partitions)
        return self._engine.log(topic, partition)

    async def list_all(self) -> list[Topic]:
        """Return every topic, sorted by name."""
        return [topic for _, topic in sorted(self._engine.topics().items())]

    # Creating, growing, deleting

    async def create(
        self,
        topic: str,
        partitions: int = 1,
        retention_hours: float | None = None,
        retention_bytes: int | None = None,
        made_by: str = "",
    ) -> Topic:
        """Create a topic; returns when it is durable.

        Args:
            topic: Its name.
            partitions: How many logs it has, from 1 to `max_partitions`.
            retention_hours: How long messages are kept; 0: for ever; None: as the broker is set.
            retention_bytes: How much of each partition is kept; 0: all; None: as the broker is set.
            made_by: The user in whose quotas it counts; empty: in none.

        Raises BadName, BadRequest, TopicExists, LimitReached, QuotaExceeded, DiskFull.
        """
        check_name("topic", topic)
        most = self._settings.max_partitions
        if not 1 <= partitions <= most:
            raise BadRequest(f"partitions must be from 1 to {most}, not {partitions}")
        for name, value in (("retention_hours", retention_hours), ("retention_bytes", retention_bytes)):
            if value is not None and not 0 <= value < 2**53:
                raise BadRequest(f"{name} must not be negative or beyond reason: {value}")
        wanted = Topic(
            topic=topic,
            partitions=partitions,
            retention_hours=retention_hours,
            retention_bytes=retention_bytes,
            created_ms=now_ms(),
            made_by=made_by or msgspec.UNSET,
        )
        async with self._growing:
            if topic in self._engine.topics():
                raise TopicExists(topic)
            self._check_room(made_by, topics=1, partitions=partitions)
            made = await self._engine.create_topic(wanted)
        self._groups.topic_changed(topic, partitions)
        return made

    async def ensure(self, topic: str, made_by: str = "") -> None:
        """Create a topic with one partition unless it exists. Raises as create() does."""
        try:
            await self.create(topic, made_by=made_by)
        except TopicExists:
            pass

    async def add_partitions(self, topic: str, partitions: int) -> Topic:
        """Give a topic that many partitions in all; returns when they are durable.

        They count in the quotas of the user that has made the topic. Raises UnknownTopic, LimitReached, QuotaExceeded,
        DiskFull, BadRequest for fewer than it has.
        """
        async with self._growing:
            known, most = self.get(topic), self._settings.max_partitions
            if not known.partitions <= partitions <= most:
                raise BadRequest(
                    f"topic {topic!r} has {known.partitions} partitions; it can have more, up to {most}, "
                    "but never fewer"
                )
            self._check_room(known.maker, partitions=partitions - known.partitions)
            self._subscriptions.check_growth(topic, partitions - known.partitions)
            grown = await self._engine.add_partitions(topic, partitions)
        self._subscriptions.partitions_added(topic)
        self._groups.topic_changed(topic, grown.partitions)
        return grown

    def _check_room(self, made_by: str, topics: int = 0, partitions: int = 0) -> None:
        """Raises LimitReached, or QuotaExceeded for the user, if there would be more than they may have."""
        known, settings = self._engine.topics(), self._settings
        if topics and len(known) + topics > settings.max_topics:
            raise LimitReached(f"the broker has {len(known)} topics", settings.max_topics, "QB_MAX_TOPICS")
        in_all = sum(topic.partitions for topic in known.values())
        if partitions and in_all + partitions > settings.max_partitions_in_all:
            raise LimitReached(
                f"all topics of the broker together have {in_all} partitions, and {partitions} more are too many",
                settings.max_partitions_in_all,
                "QB_MAX_PARTITIONS_IN_ALL",
            )
        if made_by:
            made = [topic for topic in known.values() if topic.maker == made_by]
            allowance = self._users.of_user(made_by)
            allowance.check("topics", len(made), topics)
            allowance.check("partitions", sum(topic.partitions for topic in made), partitions)

    async def delete(self, topic: str, if_unused: bool = False) -> dict[str, Any]:
        """Remove a topic with its messages and subscriptions. Raises UnknownTopic.

        With `if_unused`, raises TopicInUse if it has subscriptions.
        """
        self.get(topic)
        await self._subscriptions.delete_topic(topic, if_unused)
        await self._groups.topic_deleted(topic)
        self._deleted(topic)
        return {}

    # Describing

    async def describe(self, topic: str) -> dict[str, Any]:
        """Return a topic with the state of its partitions. Raises UnknownTopic."""
        (described,) = await self.describe_many([topic])
        return described

    async def describe_many(self, topics: list[str]) -> list[dict[str, Any]]:
        """Return topics as describe() does, with the offsets of all of them as they are at one moment.

        Raises UnknownTopic, and BadRequest for a name that comes twice or for too many names.
        """
        if len(topics) > DESCRIBED_AT_ONCE:
            raise BadRequest(f"{len(topics)} topics are too many for one request: name at most {DESCRIBED_AT_ONCE}")
        if len(set(topics)) < len(topics):
            raise BadRequest("name each topic once")
        known = [self.get(topic) for topic in topics]
        logs = [self._engine.log(topic.topic, number) for topic in known for number in range(topic.partitions)]
        ends = [(log.first_offset, log.end_offset) for log in logs]
        spend(len(topics) + len(logs) // LIGHT)
        states: list[LogState] = []
        async for portion in portions(zip(logs, ends, strict=True)):
            for log, (first, end) in portion:
                states.append(msgspec.structs.replace(log.state(), first_offset=first, next_offset=end))
        remaining = iter(states)
        return [_described(topic, [next(remaining) for _ in range(topic.partitions)]) for topic in known]


def _described(topic: Topic, logs: list[LogState]) -> dict[str, Any]:
    return {
        **{name: value for name, value in msgspec.to_builtins(topic).items() if name != "uid"},
        "messages": sum(log.next_offset - log.first_offset for log in logs),
        "bytes": sum(log.bytes for log in logs),
        "logs": logs,
    }
