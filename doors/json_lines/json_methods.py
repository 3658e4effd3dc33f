"""The types of request, one row each, and how they are carried out."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import trio

from qb.core.broker.fetching import FetchLimits
from qb.core.broker.message_broker import MessageBroker
from qb.core.broker.outgoing_messages import OutgoingMessage
from qb.core.groups.group_coordinator import MemberStanding
from qb.core.groups.group_manager import GroupCommit
from qb.core.pacing import portions
from qb.core.rights import needs
from qb.core.rights.needs import Needs
from qb.core.wire.errors import BadRequest, BrokerError, TopicExists
from qb.core.wire.frames import decode_frame
from qb.core.wire.names import check_name
from qb.doors.binary.joined_subscriptions import JoinedSubscriptions, narrow
from qb.doors.json_lines import json_requests as wants
from qb.doors.json_lines.json_answers import record
from qb.doors.json_lines.json_sink import JsonSink
from qb.doors.json_lines.produce_runs import ProduceRun
from qb.doors.peer_identity import PeerIdentity
from qb.doors.transport import Transport

Data = dict[str, Any]


class JsonWaits:
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


class JsonMethods:
    """Carries out the requests of one peer, one after the other."""

    def __init__(self, broker: MessageBroker, transport: Transport, name: str, waits: JsonWaits) -> None:
        self._broker = broker
        self._transport = transport
        self._name = name
        self._waits = waits
        self.identity = PeerIdentity(broker, "json", transport, name.removeprefix("json "))
        self.subscribing = JoinedSubscriptions(broker.subscriptions, transport, self.identity)
        self._lines = 0

    async def read(self, line: bytes) -> JsonRequest:
        """Return what a line asks for, checked. Raises BrokerError."""
        name = wants.type_of(line)
        row = ROWS.get(name)
        if row is None:
            raise BadRequest(f"Unknown type: {name[: wants.SHOWN]}")
        wants.check_long(line, name)
        if len(line) > wants.LONG:
            await trio.lowlevel.checkpoint()  # each decoding of a long line is a step of its own
        request = JsonRequest(row, wants.parse(line, row.fields, row.missing))
        self._lines += 1
        self.identity.check(row.needs, request.wanted, name)
        return request

    async def carry_out(self, request: JsonRequest) -> Data:
        """Do what a request asks for and return the data of the answer. Raises BrokerError."""
        return await request.row.carry_out(self, request.wanted)

    async def auth(self, wanted: wants.AuthLine) -> Data:
        if self._lines > 1:
            raise BadRequest("auth must be the first line of a connection")
        await self.identity.log_in(wanted.token)
        return {"user": self.identity.principal.name}

    # Topics and messages

    async def create_topic(self, wanted: wants.CreateTopicLine) -> Data:
        try:
            topic = await self._broker.topics.create(
                wanted.topic, wanted.partitions, made_by=self.identity.principal.name
            )
        except TopicExists:
            topic = self._broker.topics.get(wanted.topic)
            if topic.partitions != wanted.partitions:
                raise BadRequest(f"topic {topic.topic!r} exists already with partitions {topic.partitions}") from None
        return {"topic": topic.topic, "partitions": topic.partitions}

    async def produce(self, wanted: wants.ProduceLine) -> Data:
        run = ProduceRun(self._broker.appends)
        run.add(wanted.topic, outgoing(wanted))
        (outcome,) = await run.store(self.identity.principal.name)
        if isinstance(outcome, BrokerError):
            raise outcome
        return outcome

    async def fetch(self, wanted: wants.FetchLine) -> Data:
        self._check_position(wanted.topic, wanted.partition, wanted.offset)
        limits = FetchLimits(max_messages=wanted.max, max_wait=wanted.max_wait_ms / 1000)
        with self._waits.waiting() as waiting:
            chunk = await self._broker.fetch(wanted.topic, wanted.partition, wanted.offset, limits)
        if waiting.cancelled_caught:
            at_once = limits._replace(max_wait=0.0)
            chunk = await self._broker.fetch(wanted.topic, wanted.partition, wanted.offset, at_once)
        records: list[Data] = []
        async for positions in portions(chunk.positions):
            records += [record(decode_frame(chunk.data, position)) for position in positions]
        return {"records": records}

    async def metrics(self, wanted: wants.MetricsLine) -> Data:
        log = self._broker.topics.log(wanted.topic, wanted.partition)
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

    async def list_topics(self, wanted: wants.ListTopicsLine) -> Data:
        seen = self.identity.principal.sees_topic
        return {"topics": [topic.topic for topic in await self._broker.topics.list_all() if seen(topic.topic)]}

    # Groups

    async def commit(self, wanted: wants.CommitLine) -> Data:
        self._check_position(wanted.topic, wanted.partition, wanted.offset)
        commit = GroupCommit(wanted.topic, wanted.partition, wanted.offset)
        await self._broker.groups.commit(wanted.group_id, [commit])
        return {"groupId": wanted.group_id}

    async def join_group(self, wanted: wants.JoinGroupLine) -> Data:
        standing = await self._broker.groups.join(
            wanted.group_id,
            wanted.consumer_id,
            [wanted.topic],
            session_timeout=wanted.session_timeout_ms / 1000,
            simple=True,
        )
        return {"partitions": _partitions(standing)}

    async def heartbeat(self, wanted: wants.MemberLine) -> Data:
        standing = await self._broker.groups.heartbeat(wanted.group_id, wanted.consumer_id)
        return {"groupId": wanted.group_id, "partitions": _partitions(standing)}

    async def leave_group(self, wanted: wants.MemberLine) -> Data:
        await self._broker.groups.leave(wanted.group_id, wanted.consumer_id)
        return {"groupId": wanted.group_id}

    # Subscriptions

    async def create_subscription(self, wanted: wants.CreateSubscriptionLine) -> Data:
        if isinstance(wanted.start_offset, int):
            _check_offset(wanted.start_offset)
        made = await self._broker.subscriptions.create(
            wanted.subscription, wanted.topic, wanted.start_offset, made_by=self.identity.principal.name
        )
        return {"subscription": made["subscription_id"], "topic": made["topic"]}

    async def subscribe(self, wanted: wants.SubscribeLine) -> Data:
        sink = JsonSink(self._name, self._transport, settles_at_once=wanted.auto_ack)
        active = self.subscribing.join_with(sink, wanted.subscription, narrow(wanted.window))
        return {"subscription": active.name, "topic": active.topic}

    async def unsubscribe(self, wanted: wants.SubscriptionLine) -> Data:
        self.subscribing.leave(wanted.subscription)
        return {"subscription": wanted.subscription}

    async def ack(self, wanted: wants.AckLine) -> Data:
        _check_offset(wanted.offset)
        held = self.subscribing.ack(wanted.subscription, wanted.partition, wanted.offset)
        return _settled(wanted, held)

    async def nack(self, wanted: wants.NackLine) -> Data:
        _check_offset(wanted.offset)
        delay = None if wanted.delay_ms is None else wanted.delay_ms / 1000
        held = self.subscribing.nack(wanted.subscription, wanted.partition, wanted.offset, wanted.reason, delay)
        return _settled(wanted, held)

    def _check_position(self, topic: str, partition: int, offset: int) -> None:
        """Raises UnknownTopic, UnknownPartition, or BadRequest for a negative offset."""
        self._broker.topics.log(topic, partition)
        _check_offset(offset)


def _check_offset(offset: int) -> None:
    if offset < 0:
        raise BadRequest(f"InvalidOffset: {offset}")


def _body(wanted: wants.ProduceLine) -> bytes:
    if wanted.encoding is None:
        return wanted.value.encode()
    try:
        return b64decode(wanted.value, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("value must be base64, as encoding says") from None


def _partitions(standing: MemberStanding) -> list[int]:
    """A member that joins by this door consumes one topic, so the numbers alone say it."""
    return [each.partition for each in standing.partitions]


def _settled(wanted: wants.AckLine, held: bool) -> Data:
    named = {"subscription": wanted.subscription, "partition": wanted.partition, "offset": wanted.offset}
    return {**named, "held": held}


def outgoing(wanted: wants.ProduceLine) -> OutgoingMessage:
    """Return the message of a `produce`. Raises BadRequest."""
    return OutgoingMessage(_body(wanted), wanted.partition, wanted.key, wanted.properties)


class JsonRow(NamedTuple):
    """A type of request: its fields, what is said when a required one is missing, what carries it out."""

    fields: type[wants.RequestLine]
    missing: str
    carry_out: Callable[[JsonMethods, Any], Awaitable[Data]]
    needs: Needs


class JsonRequest(NamedTuple):
    """A line, checked: its row and its fields."""

    row: JsonRow
    wanted: wants.RequestLine


MEMBER = needs.member_of("group_id", "consumer_id")

ROWS: dict[str, JsonRow] = {
    "auth": JsonRow(wants.AuthLine, "Missing token", JsonMethods.auth, needs.OPEN),
    "createTopic": JsonRow(wants.CreateTopicLine, "Missing topic", JsonMethods.create_topic, needs.create_topic()),
    "produce": JsonRow(wants.ProduceLine, "Missing topic or value", JsonMethods.produce, needs.publish()),
    "fetch": JsonRow(wants.FetchLine, "Missing topic/partition/offset", JsonMethods.fetch, needs.read()),
    "commit": JsonRow(
        wants.CommitLine,
        "Missing groupId/topic/partition/offset",
        JsonMethods.commit,
        needs.all_of(needs.consume_group("group_id"), needs.read()),
    ),
    "metrics": JsonRow(
        wants.MetricsLine,
        "Missing topic/partition",
        JsonMethods.metrics,
        needs.all_of(needs.read(), needs.see_group("group_id")),
    ),
    "listTopics": JsonRow(wants.ListTopicsLine, "", JsonMethods.list_topics, needs.ANY_USER),
    "joinGroup": JsonRow(
        wants.JoinGroupLine,
        "Missing groupId/topic/consumerId",
        JsonMethods.join_group,
        needs.all_of(needs.consume_group("group_id"), needs.read(), owns=MEMBER),
    ),
    "leaveGroup": JsonRow(
        wants.MemberLine,
        "Missing groupId/consumerId",
        JsonMethods.leave_group,
        needs.all_of(needs.consume_group("group_id"), owns=MEMBER),
    ),
    "heartbeat": JsonRow(
        wants.MemberLine,
        "Missing groupId/consumerId",
        JsonMethods.heartbeat,
        needs.all_of(needs.consume_group("group_id"), owns=MEMBER),
    ),
    "createSubscription": JsonRow(
        wants.CreateSubscriptionLine,
        "Missing subscription/topic",
        JsonMethods.create_subscription,
        needs.all_of(needs.create_subscription("subscription"), needs.read()),
    ),
    "subscribe": JsonRow(
        wants.SubscribeLine, "Missing subscription", JsonMethods.subscribe, needs.consume("subscription")
    ),
    "unsubscribe": JsonRow(wants.SubscriptionLine, "Missing subscription", JsonMethods.unsubscribe, needs.ANY_USER),
    "ack": JsonRow(wants.AckLine, "Missing subscription/partition/offset", JsonMethods.ack, needs.ANY_USER),
    "nack": JsonRow(wants.NackLine, "Missing subscription/partition/offset", JsonMethods.nack, needs.ANY_USER),
}
