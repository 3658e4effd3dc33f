"""Requests that have a type of frame of their own, one method each, and the answers to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import trio

from qb.core.broker.fetching import FetchLimits, index_of, marks_of
from qb.core.broker.message_broker import MessageBroker
from qb.core.rights import needs
from qb.core.rights.needs import ANY_USER, OPEN, Needs
from qb.core.subscriptions.subscription_options import SubscriptionOptions
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BadRequest, BrokerError, QuotaExceeded
from qb.core.wire.frames import PROBE, Frame, MessageType, decode_frame, encode_frame
from qb.core.wire.runs.publish_table import FEATURE
from qb.core.wire.runs.staged_frames import frames_in
from qb.core.wire.version import __version__
from qb.doors.binary.joined_subscriptions import JoinedSubscriptions
from qb.doors.binary.methods import (
    CreateSubscriptionArguments,
    CreateTopicArguments,
    FetchArguments,
    SubscribeArguments,
    WholeStageArguments,
    WholeTransactionArguments,
    arguments_from_text,
    call,
    call_at_once,
)
from qb.doors.binary.peer_compression import PeerCompression
from qb.doors.binary.publish_runs import PublishRuns
from qb.doors.binary.replies import success, success_head
from qb.doors.peer_identity import PeerIdentity
from qb.doors.transport import Transport
from qb.storage.engine import Where
from qb.storage.stages.transaction_records import CommittedTransaction, DecidedMessages

PROTOCOL = "1"
TRANSACTION_BYTES = 65_536  # that one TRANSACTION frame carries: they lie in the metadata until they are copied
Done = Callable[[Callable[[], bytes]], None]  # called with what makes the answer, or raises why there is none
QUEUED_LIMIT = 1 << 20  # replies that a peer has not read: past this, its requests are not read either


class FrameRequests:
    """Carries out the requests of one peer."""

    def __init__(
        self,
        broker: MessageBroker,
        transport: Transport,
        publishing: PublishRuns,
        subscribing: JoinedSubscriptions,
        compression: PeerCompression,
        identity: PeerIdentity,
        name: str,
    ) -> None:
        self._broker = broker
        self._transport = transport
        self._publishing = publishing
        self._subscribing = subscribing
        self._compression = compression
        self._identity = identity
        self._fetching = trio.Lock()
        self.name = name  # how the log calls the peer; from its first request with a client id on, by that
        self.is_first = True  # is the frame that is carried out the first of its connection?
        self.ends = ""  # why the session is to end after this answer

    async def carry_out(self, frame: Frame) -> bytes:
        """Return the answer, or nothing if it has been sent or there is none. Raises BrokerError."""
        self._identity.check(NEEDS[frame.type], frame.properties, MessageType(frame.type).name)
        return await HANDLERS[frame.type](self, frame)

    def begin_at_once(self, frame: Frame, done: Done) -> bool:
        """Carry out what can be begun in this step of the event loop; `done` is called with the answer, perhaps later.

        False: nothing was done, and it is for carry_out(). Raises BrokerError, and `done` is not called.
        """
        begin = AT_ONCE.get(frame.type)
        if begin is None:
            return False
        self._identity.check(NEEDS[frame.type], frame.properties, MessageType(frame.type).name)
        return begin(self, frame, done)

    async def _hello(self, frame: Frame) -> bytes:
        if not self.is_first:
            raise BadRequest("HELLO must be the first frame of a connection")
        if frame.properties.get("protocol") != PROTOCOL:
            self.ends = "we speak different protocols"
            raise BadRequest(f"this broker speaks protocol {PROTOCOL}, not {frame.properties.get('protocol')}")
        token = frame.properties.get("token")
        try:
            if token is not None:
                await self._identity.log_in(token)
            self._identity.check(ANY_USER, {}, "HELLO")
        except QuotaExceeded as error:
            self.ends = str(error)
            raise
        answer = {
            "protocol": PROTOCOL,
            "server": f"qb/{__version__}",
            "heartbeat_interval": f"{self._broker.settings.server.heartbeat_interval:g}",
            "max_message_size": str(self._broker.settings.server.max_message_size),
            "transaction_bytes": str(min(TRANSACTION_BYTES, self._broker.settings.server.max_message_size)),
        }
        wanted = frame.properties.get("producer_id")
        if wanted is not None:
            answer |= await self._publishing.continue_as(
                wanted, frame.properties.get("producer_secret"), self._identity.principal.name
            )
        answer |= self._compression.agree(frame)
        if (ownership := self._broker.ownership) is not None:
            answer |= {
                "cluster": "true",
                "cell": ownership.cell,
                "epoch": str(ownership.epoch),
                "broker": ownership.broker,
            }
            answer["lease_ttl"] = f"{ownership.lease_ttl:g}"
        if FEATURE in frame.properties.get("features", "").split(","):
            answer["features"] = FEATURE
        self._publishing.answer_in_runs()
        self._subscribing.fast = True
        self._introduce(frame)
        return success(frame, answer)

    async def _heartbeat(self, frame: Frame) -> bytes:
        if frame.sequence_number == PROBE:
            return b""  # the answer to our own
        return encode_frame(MessageType.HEARTBEAT, frame.sequence_number, now_ms())

    async def _request(self, frame: Frame) -> bytes:
        answer = await call(self._broker, frame.properties.get("method", ""), frame.body, self._identity)
        return success(frame, body=answer)

    def _request_at_once(self, frame: Frame, done: Done) -> bool:
        answer = call_at_once(self._broker, frame.properties.get("method", ""), frame.body, self._identity)
        if answer is not None:
            done(partial(success, frame, body=answer))
        return answer is not None

    async def _create_topic(self, frame: Frame) -> bytes:
        self._introduce(frame)
        topic = await self._broker.topics.create(
            **arguments_from_text(CreateTopicArguments, frame.properties).as_keywords(),
            made_by=self._identity.principal.name,
        )
        return success(frame, {"topic": topic.topic, "partitions": str(topic.partitions)})

    async def _create_subscription(self, frame: Frame) -> bytes:
        wanted = arguments_from_text(CreateSubscriptionArguments, frame.properties)
        given = {
            name: frame.properties[name] for name in SubscriptionOptions.__struct_fields__ if name in frame.properties
        }
        options = msgspec.to_builtins(arguments_from_text(SubscriptionOptions, given))
        made = await self._broker.subscriptions.create(
            wanted.subscription_id, wanted.topic, wanted.start_offset, options, self._identity.principal.name
        )
        return success(frame, {"subscription_id": made["subscription_id"], "topic": made["topic"]})

    async def _delete_subscription(self, frame: Frame) -> bytes:
        await self._broker.subscriptions.delete(frame.properties.get("subscription_id", ""))
        return success(frame)

    async def _subscribe(self, frame: Frame) -> bytes:
        self._introduce(frame)
        wanted = arguments_from_text(SubscribeArguments, frame.properties)
        return success(
            frame, self._subscribing.join(wanted.subscription_id, self.name, wanted.window, wanted.announces)
        )

    async def _unsubscribe(self, frame: Frame) -> bytes:
        self._subscribing.leave(frame.properties.get("subscription_id", ""))
        return success(frame)

    async def _fetch(self, frame: Frame) -> bytes:
        wanted = arguments_from_text(FetchArguments, frame.properties)
        limits = FetchLimits(
            wanted.max_messages, wanted.max_bytes, wanted.max_wait, wanted.min_bytes, wanted.bulk, wanted.consistent
        )
        chunk = await self._broker.fetch(
            wanted.topic, wanted.partition, wanted.offset, limits, partial(self._turn_to_read, wanted.max_bytes)
        )
        state = {"offset": str(chunk.first_offset), "count": str(len(chunk.positions))}
        if wanted.consistent:
            state["consistent"] = "1"
        index = marks_of(chunk) if wanted.bulk else index_of(chunk) if wanted.index else b""
        frames = chunk.view
        head = success_head(frame, state, len(index) + len(frames))
        self._transport.send(*await self._compression.answered(head, index, frames))
        return b""

    async def _transaction(self, frame: Frame) -> bytes:
        wanted = _whole_transaction(frame)
        content: dict[Where, DecidedMessages] = {}
        for where, frames in _parts(frame.body):
            self._identity.check_publish(where[0])
            count = await self._broker.appends.admit_staged(where[0], frames, 0, self._identity.principal.name)
            _add(content, where, count, frames)
        receipt = await self._broker.transactions.publish(wanted.transaction, wanted.number, list(content.values()))
        return success(frame, body=msgspec.json.encode(receipt))

    def _transaction_at_once(self, frame: Frame, done: Done) -> bool:
        wanted = _whole_transaction(frame)
        content: dict[Where, DecidedMessages] = {}
        for where, frames in _parts(frame.body):
            self._identity.check_publish(where[0])
            count = self._broker.appends.admit_few(where[0], frames)
            if count is None:
                return False
            _add(content, where, count, frames)

        def committed(outcome: CommittedTransaction | BrokerError) -> None:
            done(partial(_transaction_answer, frame, outcome))

        self._broker.transactions.publish_then(wanted.transaction, wanted.number, list(content.values()), committed)
        return True

    @asynccontextmanager
    async def _turn_to_read(self, size: int) -> AsyncIterator[None]:
        """One fetch after another reads, once the peer has read the answers before it: no more is held for it."""
        async with self._fetching:
            await self._transport.wait_for_turn(QUEUED_LIMIT)
            async with self._transport.unread.reserved(size):
                yield

    def _introduce(self, frame: Frame) -> None:
        client_id = frame.properties.get("client_id") or frame.properties.get("publisher_id")
        if client_id:
            self.name = f"{client_id[:80]} ({self.name.rpartition('(')[2].rstrip(')')})"


def _transaction_answer(frame: Frame, outcome: CommittedTransaction | BrokerError) -> bytes:
    """Return the answer to a TRANSACTION frame. Raises why it was not committed."""
    if isinstance(outcome, BrokerError):
        raise outcome.with_traceback(None)
    return success(frame, body=msgspec.json.encode(outcome))


def _whole_transaction(frame: Frame) -> WholeTransactionArguments:
    """Return the arguments of a TRANSACTION frame. Raises BadRequest, also if it is too long."""
    if len(frame.body) > TRANSACTION_BYTES:
        raise BadRequest(
            f"a TRANSACTION frame carries at most {TRANSACTION_BYTES} bytes, not {len(frame.body)}: use a stage"
        )
    return arguments_from_text(WholeTransactionArguments, frame.properties)


def _parts(body: bytes) -> Iterator[tuple[Where, bytes]]:
    """Yield where the messages of each STAGE frame in a TRANSACTION go, and their frames. Raises BadRequest."""
    for at in frames_in(body):
        part = decode_frame(body, at)
        if part.type != MessageType.STAGE:
            raise BadRequest("the body of a TRANSACTION frame is a row of STAGE frames")
        to = arguments_from_text(WholeStageArguments, part.properties)
        yield (to.topic, to.partition), bytes(part.body)


def _add(content: dict[Where, DecidedMessages], where: Where, count: int, frames: bytes) -> None:
    """Add messages to those for the same partition."""
    if where in content:
        frames, count = content[where].frames + frames, content[where].messages + count
    content[where] = DecidedMessages(*where, count, frames)


AT_ONCE: dict[int, Callable[[FrameRequests, Frame, Done], bool]] = {
    MessageType.REQUEST: FrameRequests._request_at_once,
    MessageType.TRANSACTION: FrameRequests._transaction_at_once,
}

# What every frame needs that a peer may send. The methods of a REQUEST have needs of their own, and so have the STAGE
# frames in a TRANSACTION. SETTLE and UNSUBSCRIBE are about what the connection itself has joined.
NEEDS: dict[int, Needs] = {
    MessageType.HELLO: OPEN,
    MessageType.HEARTBEAT: OPEN,
    MessageType.REQUEST: ANY_USER,
    MessageType.CREATE_TOPIC: needs.create_topic(),
    MessageType.CREATE_SUBSCRIPTION: needs.all_of(needs.create_subscription(letters="dead_letter_topic"), needs.read()),
    MessageType.DELETE_SUBSCRIPTION: needs.manage_subscription(),
    MessageType.SUBSCRIBE: needs.consume(),
    MessageType.UNSUBSCRIBE: ANY_USER,
    MessageType.PUBLISH: needs.publish(),
    MessageType.PUBLISH_RUN: needs.publish(),
    MessageType.FETCH: needs.read(),
    MessageType.SETTLE: ANY_USER,
    MessageType.STAGE: needs.publish(),
    MessageType.TRANSACTION: needs.transact(),
    MessageType.COMPRESSED: OPEN,  # the frames in it have needs of their own
}

HANDLERS: dict[int, Callable[[FrameRequests, Frame], Awaitable[bytes]]] = {
    MessageType.HELLO: FrameRequests._hello,
    MessageType.HEARTBEAT: FrameRequests._heartbeat,
    MessageType.REQUEST: FrameRequests._request,
    MessageType.CREATE_TOPIC: FrameRequests._create_topic,
    MessageType.FETCH: FrameRequests._fetch,
    MessageType.TRANSACTION: FrameRequests._transaction,
    MessageType.CREATE_SUBSCRIPTION: FrameRequests._create_subscription,
    MessageType.DELETE_SUBSCRIPTION: FrameRequests._delete_subscription,
    MessageType.SUBSCRIBE: FrameRequests._subscribe,
    MessageType.UNSUBSCRIBE: FrameRequests._unsubscribe,
}
