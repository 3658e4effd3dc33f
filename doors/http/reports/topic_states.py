"""Topics with the state of their partitions, in portions between which other peers are served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from qb.core.broker.message_broker import MessageBroker
from qb.core.pacing import portions, spend
from qb.core.wire.errors import UnknownTopic
from qb.storage.engine import LogState, PartitionLog, Topic

AT_ONCE = 4  # topics between two checkpoints, as each may have a thousand partitions


class TopicState(NamedTuple):
    """A topic and the state of its partitions at one moment."""

    topic: Topic
    logs: list[PartitionLog]
    states: list[LogState]


async def topic_states(broker: MessageBroker, topics: Sequence[Topic]) -> AsyncIterator[TopicState]:
    """Yield topics with their partitions; one that is deleted meanwhile is left out."""
    async for portion in portions(topics, AT_ONCE):
        for topic in portion:
            spend(topic.partitions)
            try:
                logs = [broker.topics.log(topic.topic, number) for number in range(topic.partitions)]
            except UnknownTopic:
                continue
            yield TopicState(topic, logs, [log.state() for log in logs])
