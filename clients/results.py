"""What the broker says about topics, subscriptions and groups: dicts whose keys are attributes too, with types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class BrokerFacts(dict[str, Any]):
    """Facts that the broker has sent. `info.topic` is `info["topic"]`; a broker that is newer may send more of them.

    Args:
        facts: The facts by name.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__(facts)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}; it has {', '.join(self)}") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"


class TopicInfo(BrokerFacts):
    """A topic.

    Attributes:
        topic: Its name.
        partitions: How many partitions it has.
        retention_hours: Messages older than this may be dropped; None keeps them.
        retention_bytes: The oldest messages are dropped when a partition is larger than this; None keeps them.
        created_ms: When it was created, in milliseconds since 1970.
        messages: How many messages it holds; when one topic is described.
        bytes: How many bytes these take; when one topic is described.
        logs: Its partitions, each with offsets, size and status; when one topic is described.
    """

    topic: str
    partitions: int
    retention_hours: float | None
    retention_bytes: int | None
    created_ms: int
    messages: int
    bytes: int
    logs: list[dict[str, Any]]


class SubscriptionInfo(BrokerFacts):
    """A subscription.

    Attributes:
        subscription_id: Its name.
        topic: The topic that it delivers.
        created_ms: When it was created, in milliseconds since 1970.
        paused: Is it paused?
        options: Its mode, deadlines and limits.
        lag: How many messages are not done; when one subscription is described.
        in_flight: How many are delivered and not settled; when one subscription is described.
        waiting: How many wait to be delivered again; when one subscription is described.
        redelivered: How many deliveries were not the first; when one subscription is described.
        dead_lettered: How many messages were dead-lettered; when one subscription is described.
        fault: Why it stands still, or None; when one subscription is described.
    """

    subscription_id: str
    topic: str
    created_ms: int
    paused: bool
    options: dict[str, Any]
    lag: int
    in_flight: int
    waiting: int
    redelivered: int
    dead_lettered: int
    fault: str | None


class GroupInfo(BrokerFacts):
    """A consumer group.

    Attributes:
        group: Its name.
        state: How far it is with giving out partitions.
        members: How many members it has; when one group is described, the members themselves.
        topics: The topics of its members; in a list of groups.
        generation: How often partitions were given out anew; when one group is described.
        partitions: Each partition with its member, committed offset and lag; when one group is described.
        fault: Why it stands still, or None; when one group is described.
    """

    group: str
    state: str
    members: Any
    topics: list[str]
    generation: int
    partitions: list[dict[str, Any]]
    fault: str | None


class ServerInfo(BrokerFacts):
    """A broker.

    Attributes:
        version: Its version.
        uptime: Seconds since it started.
        connections: How many connections are open.
        topics: How many topics it has.
        data_dir: Where it keeps everything.
        durability: What its acks mean: "fsynced" or "written".
    """

    version: str
    uptime: float
    connections: int
    topics: int
    data_dir: str
    durability: str
