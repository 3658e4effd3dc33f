"""gateways.json_methods: the types of request, one row each, and how they are carried out.

May import: core.broker, core.consumers, core.errors, core.frames, core.groups, core.names, core.reading, core.replies,
    core.subscribing, core.transport, gateways.json_answers, gateways.json_outlet, gateways.json_requests, trio,
    the standard library.
Never: sockets, files.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import trio

from core.broker import MessageBroker
from core.consumers import GroupCommit
from core.errors import BadRequest, TopicExists
from core.frames import Frame, MessageType
from core.groups import Standing
from core.names import check_name
from core.reading import Limits, messages
from core.replies import now_ms
from core.subscribing import Subscribing
from core.transport import Transport
from gateways import json_requests as wants
from gateways.json_answers import record
from gateways.json_outlet import JsonOutlet

Data = dict[str, Any]


class Patience:
    """What a peer may wait for, until the broker drains."""

    def __init__(self) -> None:
        self.ended = False
        self._scope = trio.CancelScope()

    def waiting(self) -> trio.CancelScope:
        """Return a scope to wait in, one at a time; end() cancels it."""
        self._scope = trio.CancelScope()
        if self.ended:
            self._scope.cancel()
        return self._scope

    def end(self) -> None:
        self.ended = True
        self._scope.cancel()


class Methods:
    """Carries out the requests of one peer, one after the other."""

    def __init__(self, broker: MessageBroker, transport: Transport, name: str, patience: Patience) -> None:
        self._broker = broker
        self._transport = transport
        self._name = name
        self._patience = patience
        self.subscribing = Subscribing(broker.subscriptions, transport)

    async def carry_out(self, line: bytes) -> Data:
        """Do what a line asks for and return the data of the answer. Raises BrokerError."""
        name = wants.type_of(line)
        row = ROWS.get(name)
        if row is None:
            raise BadRequest(f"Unknown type: {name[: wants.SHOWN]}")
        return await row.carry_out(self, wants.parse(line, row.fields, row.missing))

    # Topics and messages

    async def create_topic(self, wanted: wants.CreateTopic) -> Data:
        try:
            topic = await self._broker.create_topic(wanted.topic, wanted.partitions)
        except TopicExists:
            topic = self._broker.topic(wanted.topic)
            if topic.partitions != wanted.partitions:
                raise BadRequest(f"topic {topic.topic!r} exists already with partitions {topic.partitions}") from None
        return {"topic": topic.topic, "partitions": topic.partitions}

    async def produce(self, wanted: wants.Produce) -> Data:
        body, timestamp_ms = _body(wanted), now_ms()
        receipt = await self._broker.publish(
            wanted.topic,
            body,
            partition=wanted.partition,
            key=wanted.key,
            properties=wanted.properties,
            timestamp_ms=timestamp_ms,
        )
        properties = {**(wanted.properties or {}), **({} if wanted.key is None else {"key": wanted.key})}
        stored = Frame(MessageType.DATA, receipt.offset, timestamp_ms, properties, body)
        return {**record(stored), "partition": receipt.partition}

    async def fetch(self, wanted: wants.Fetch) -> Data:
        self._check_place(wanted.topic, wanted.partition, wanted.offset)
        limits = Limits(max_messages=wanted.max, max_wait=wanted.max_wait_ms / 1000)
        with self._patience.waiting() as waiting:
            chunk = await self._broker.fetch(wanted.topic, wanted.partition, wanted.offset, limits)
        if waiting.cancelled_caught:
            at_once = limits._replace(max_wait=0.0)
            chunk = await self._broker.fetch(wanted.topic, wanted.partition, wanted.offset, at_once)
        return {"records": [record(message) for message in messages(chunk)]}

    async def metrics(self, wanted: wants.Metrics) -> Data:
        log = self._broker.log(wanted.topic, wanted.partition)
        committed = None
        if wanted.group_id is not None:
            group = check_name("group", wanted.group_id)
            committed = self._broker.groups.committed_offset(group, wanted.topic, wanted.partition)
        return {
            "beginOffset": log.first_offset,
            "endOffset": log.end_offset,
            "size": log.end_offset - log.first_offset,
            "committedOffset": committed,
            "lag": log.end_offset - (committed or 0),
        }

    async def list_topics(self, wanted: wants.ListTopics) -> Data:
        return {"topics": [topic.topic for topic in await self._broker.list_topics()]}

    # Groups

    async def commit(self, wanted: wants.Commit) -> Data:
        self._check_place(wanted.topic, wanted.partition, wanted.offset)
        commit = GroupCommit(wanted.topic, wanted.partition, wanted.offset)
        await self._broker.groups.commit(wanted.group_id, [commit])
        return {"groupId": wanted.group_id}

    async def join_group(self, wanted: wants.JoinGroup) -> Data:
        standing = await self._broker.groups.join(
            wanted.group_id,
            wanted.consumer_id,
            [wanted.topic],
            session_timeout=wanted.session_timeout_ms / 1000,
            simple=True,
        )
        return {"partitions": _partitions(standing)}

    async def heartbeat(self, wanted: wants.NameMember) -> Data:
        standing = await self._broker.groups.heartbeat(wanted.group_id, wanted.consumer_id)
        return {"groupId": wanted.group_id, "partitions": _partitions(standing)}

    async def leave_group(self, wanted: wants.NameMember) -> Data:
        await self._broker.groups.leave(wanted.group_id, wanted.consumer_id)
        return {"groupId": wanted.group_id}

    # Subscriptions

    async def create_subscription(self, wanted: wants.CreateSubscription) -> Data:
        if isinstance(wanted.start_offset, int):
            _check_offset(wanted.start_offset)
        made = await self._broker.subscriptions.create(wanted.subscription, wanted.topic, wanted.start_offset)
        return {"subscription": made["subscription_id"], "topic": made["topic"]}

    async def subscribe(self, wanted: wants.Subscribe) -> Data:
        outlet = JsonOutlet(self._name, self._transport, settles_at_once=wanted.auto_ack)
        live = self.subscribing.join_with(outlet, wanted.subscription, wanted.window)
        return {"subscription": live.name, "topic": live.topic}

    async def unsubscribe(self, wanted: wants.NameSubscription) -> Data:
        self.subscribing.leave(wanted.subscription)
        return {"subscription": wanted.subscription}

    async def ack(self, wanted: wants.Ack) -> Data:
        _check_offset(wanted.offset)
        held = self.subscribing.ack(wanted.subscription, wanted.partition, wanted.offset)
        return _settled(wanted, held)

    async def nack(self, wanted: wants.Nack) -> Data:
        _check_offset(wanted.offset)
        delay = None if wanted.delay_ms is None else wanted.delay_ms / 1000
        held = self.subscribing.nack(wanted.subscription, wanted.partition, wanted.offset, wanted.reason, delay)
        return _settled(wanted, held)

    def _check_place(self, topic: str, partition: int, offset: int) -> None:
        """Raises UnknownTopic, UnknownPartition, or BadRequest for a negative offset."""
        self._broker.log(topic, partition)
        _check_offset(offset)


def _check_offset(offset: int) -> None:
    if offset < 0:
        raise BadRequest(f"InvalidOffset: {offset}")


def _body(wanted: wants.Produce) -> bytes:
    if wanted.encoding is None:
        return wanted.value.encode()
    try:
        return b64decode(wanted.value, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("value must be base64, as encoding says") from None


def _partitions(standing: Standing) -> list[int]:
    """A member that joins by this door consumes one topic, so the numbers alone say it."""
    return [each.partition for each in standing.partitions]


def _settled(wanted: wants.Ack, held: bool) -> Data:
    place = {"subscription": wanted.subscription, "partition": wanted.partition, "offset": wanted.offset}
    return {**place, "held": held}


class Row(NamedTuple):
    """A type of request: its fields, what is said when a required one is missing, what carries it out."""

    fields: type[wants.Request]
    missing: str
    carry_out: Callable[[Methods, Any], Awaitable[Data]]


ROWS: dict[str, Row] = {
    "createTopic": Row(wants.CreateTopic, "Missing topic", Methods.create_topic),
    "produce": Row(wants.Produce, "Missing topic or value", Methods.produce),
    "fetch": Row(wants.Fetch, "Missing topic/partition/offset", Methods.fetch),
    "commit": Row(wants.Commit, "Missing groupId/topic/partition/offset", Methods.commit),
    "metrics": Row(wants.Metrics, "Missing topic/partition", Methods.metrics),
    "listTopics": Row(wants.ListTopics, "", Methods.list_topics),
    "joinGroup": Row(wants.JoinGroup, "Missing groupId/topic/consumerId", Methods.join_group),
    "leaveGroup": Row(wants.NameMember, "Missing groupId/consumerId", Methods.leave_group),
    "heartbeat": Row(wants.NameMember, "Missing groupId/consumerId", Methods.heartbeat),
    "createSubscription": Row(wants.CreateSubscription, "Missing subscription/topic", Methods.create_subscription),
    "subscribe": Row(wants.Subscribe, "Missing subscription", Methods.subscribe),
    "unsubscribe": Row(wants.NameSubscription, "Missing subscription", Methods.unsubscribe),
    "ack": Row(wants.Ack, "Missing subscription/partition/offset", Methods.ack),
    "nack": Row(wants.Nack, "Missing subscription/partition/offset", Methods.nack),
}
