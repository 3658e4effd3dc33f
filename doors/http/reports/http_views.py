"""Topics, messages and the rest as this door shows them."""

from __future__ import annotations

import msgspec

from qb.core.broker.outgoing_messages import StoredReceipt
from qb.core.wire.frames import Frame
from qb.doors.json_lines.json_answers import iso_time, own_properties, shown_value
from qb.storage.engine import LogState, Topic

HOUR = 3600.0


class TopicView(msgspec.Struct, frozen=True, kw_only=True):
    """A topic. A retention of null is as the broker is set, 0 is without limit."""

    name: str
    partitions: int
    retention_seconds: float | None
    retention_bytes: int | None
    replication_factor: int
    created_at: str
    messages: int  # kept
    published: int  # ever: the sum of the partitions' next offsets
    bytes: int


class PartitionView(msgspec.Struct, frozen=True, kw_only=True):
    """A partition; `status` is ok, held, poisoned or damaged, with the reason."""

    partition: int
    first_offset: int
    next_offset: int
    messages: int
    bytes: int
    segments: int
    status: str
    reason: str | None


class MessageView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message; `encoding` is base64 if its body is not UTF-8, and is left out otherwise."""

    id: str
    topic: str
    partition: int
    offset: int
    key: str | None
    value: str
    headers: dict[str, str]
    timestamp: str
    encoding: str | msgspec.UnsetType = msgspec.UNSET
    attempt: int | msgspec.UnsetType = msgspec.UNSET  # of a pushed message


class ReceiptView(msgspec.Struct, frozen=True, kw_only=True):
    """Where a message is; `acked` says that it is on stable storage."""

    id: str
    topic: str
    partition: int
    offset: int
    timestamp: str
    acked: bool


def topic_view(topic: Topic, logs: list[LogState]) -> TopicView:
    """Return a topic, given the state of its partitions."""
    hours = topic.retention_hours
    return TopicView(
        name=topic.topic,
        partitions=topic.partitions,
        retention_seconds=None if hours is None else round(hours * HOUR, 3),
        retention_bytes=topic.retention_bytes,
        replication_factor=1,
        created_at=iso_time(topic.created_ms),
        messages=sum(log.next_offset - log.first_offset for log in logs),
        published=sum(log.next_offset for log in logs),
        bytes=sum(log.bytes for log in logs),
    )


def partition_view(log: LogState) -> PartitionView:
    """Return a partition."""
    return PartitionView(messages=log.next_offset - log.first_offset, **msgspec.structs.asdict(log))


def message_view(
    message: Frame, topic: str, partition: int, attempt: int | msgspec.UnsetType = msgspec.UNSET
) -> MessageView:
    """Return a stored message."""
    return MessageView(
        id=f"{topic}/{partition}/{message.sequence_number}",
        topic=topic,
        partition=partition,
        offset=message.sequence_number,
        key=message.properties.get("key"),
        headers=own_properties(message),
        timestamp=iso_time(message.timestamp),
        attempt=attempt,
        **shown_value(message.body),
    )


def receipt_view(receipt: StoredReceipt, timestamp: str, acked: bool) -> ReceiptView:
    """Return where a message is, which has that timestamp."""
    return ReceiptView(
        id=f"{receipt.topic}/{receipt.partition}/{receipt.offset}",
        topic=receipt.topic,
        partition=receipt.partition,
        offset=receipt.offset,
        timestamp=timestamp,
        acked=acked,
    )
