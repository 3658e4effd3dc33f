"""What the broker says about what it holds: dicts whose keys are attributes too, with types."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

LONGEST_SHOWN = 200  # characters of a value in a repr: bodies and long lists are cut


class BrokerFacts(dict[str, Any]):
    """Facts that the broker has sent. `info.topic` is `info["topic"]`; a broker that is newer may send more of them.

    Args:
        facts: The facts by name.
    """

    _parts: ClassVar[Mapping[str, type[BrokerFacts]]] = {}  # what the lists of that name hold

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__(facts)
        for name, kind in self._parts.items():
            if isinstance(self.get(name), list):
                self[name] = [kind(each) for each in self[name]]

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}; it has {', '.join(self)}") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={_shown(value)}' for name, value in self.items())})"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


class PartitionInfo(BrokerFacts):
    """A partition of a topic.

    Attributes:
        partition: Its number.
        first_offset: The oldest offset that it holds.
        next_offset: The offset that the next message gets.
        bytes: How many bytes its log takes.
        segments: How many segments its log has.
        status: "ok", "held" (by an unfinished transaction), "poisoned" or "damaged".
        reason: Why it is not ok, or None.
    """

    partition: int
    first_offset: int
    next_offset: int
    bytes: int
    segments: int
    status: str
    reason: str | None


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
    logs: list[PartitionInfo]

    _parts: ClassVar[Mapping[str, type[BrokerFacts]]] = {"logs": PartitionInfo}


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


class GroupPartitionInfo(BrokerFacts):
    """How far a group has come in a partition.

    Attributes:
        topic: The topic.
        partition: The partition.
        member: The member that it is assigned to, or None.
        committed: The next offset to handle, or None if nothing is committed.
        end: One past the newest offset, or None if there is no such partition any more.
        lag: How many messages are not handled, or None.
        updated_ms: When that was committed, in milliseconds since 1970, or None.
    """

    topic: str
    partition: int
    member: str | None
    committed: int | None
    end: int | None
    lag: int | None
    updated_ms: int | None


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
    partitions: list[GroupPartitionInfo]
    fault: str | None

    _parts: ClassVar[Mapping[str, type[BrokerFacts]]] = {"partitions": GroupPartitionInfo}


class ServerInfo(BrokerFacts):
    """A broker.

    Attributes:
        version: Its version.
        uptime: Seconds since it started.
        connections: How many connections are open.
        topics: How many topics it has.
        data_dir: Where it keeps everything.
        durability: What its acks mean: "replicated", "fsynced" or "written".
    """

    version: str
    uptime: float
    connections: int
    topics: int
    data_dir: str
    durability: str


class OffsetInfo(BrokerFacts):
    """What a group has committed for a partition.

    Attributes:
        topic: The topic.
        partition: The partition.
        offset: The next offset to handle.
        updated_ms: When it was committed, in milliseconds since 1970.
    """

    topic: str
    partition: int
    offset: int
    updated_ms: int


class DeadLetter(BrokerFacts):
    """A message that a subscription gave up.

    Attributes:
        number: What retry_dead_letters() and purge_dead_letters() call it.
        topic: The topic of the message.
        partition: Its partition.
        offset: Its offset.
        attempts: How often it was delivered.
        reason: Why the last delivery failed.
        time_ms: When it was dead-lettered, in milliseconds since 1970.
        key: Its key, or None.
        value: Its body as text; what is not UTF-8 is replaced.
        malformed: Why it does not say which message it is about, or None; it can be purged, not retried.
    """

    number: int
    topic: str
    partition: int
    offset: int
    attempts: int
    reason: str
    time_ms: int
    key: str | None
    value: str
    malformed: str | None

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__({**facts, "malformed": facts.get("malformed")})

    @property
    def time(self) -> datetime:
        """When it was dead-lettered, in UTC."""
        return datetime.fromtimestamp(self.time_ms / 1000, UTC)


class StageInfo(BrokerFacts):
    """An open stage of a transaction.

    Attributes:
        stage: Its id.
        transaction: The name of the transaction.
        number: The transaction's number among those of the same name, or None.
        messages: How many messages it holds.
        bytes: How many bytes these take.
        idle: Seconds since something was added.
    """

    stage: str
    transaction: str
    number: int | None
    messages: int
    bytes: int
    idle: float


class TransactionList(BrokerFacts):
    """The transactions that a broker works on.

    Attributes:
        stages: The open stages.
        committing: The names of those that are being committed.
        unfinished: Those that are committed and cannot be shown yet, each with the reason.
        committed: How many committed ones the broker knows.
    """

    stages: list[StageInfo]
    committing: list[str]
    unfinished: list[dict[str, Any]]
    committed: int

    _parts: ClassVar[Mapping[str, type[BrokerFacts]]] = {"stages": StageInfo}


class TransactionInfo(BrokerFacts):
    """What a broker knows of a transaction.

    Attributes:
        transaction: Its name.
        state: How far it is, in a word.
        stages: Its open stages.
        unfinished: Why it cannot be shown yet, or None.
        receipt: What was committed, or None.
    """

    transaction: str
    state: str
    stages: list[StageInfo]
    unfinished: dict[str, Any] | None
    receipt: dict[str, Any] | None

    _parts: ClassVar[Mapping[str, type[BrokerFacts]]] = {"stages": StageInfo}
