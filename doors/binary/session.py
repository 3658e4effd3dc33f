"""The binary door: one peer's frames carried to the broker, and the answers carried back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf

import trio

from qb.core.broker.message_broker import MessageBroker
from qb.core.pacing import must_give_way, working_on
from qb.core.rights.needs import ANY_USER
from qb.core.wire.clock import now_ms
from qb.core.wire.compression.compressed_frames import Inflater
from qb.core.wire.errors import REPLIES, BrokerError, Internal
from qb.core.wire.frames import PROBE, Frame, MessageType, encode_frame
from qb.doors.binary.frame_requests import QUEUED_LIMIT, FrameRequests
from qb.doors.binary.joined_subscriptions import JoinedSubscriptions
from qb.doors.binary.methods import SLOW_METHODS
from qb.doors.binary.peer_compression import PeerCompression
from qb.doors.binary.publish_runs import PublishRuns
from qb.doors.binary.replies import SessionEnded, refusal
from qb.doors.binary.server_connection import InflatedPortion, PublishRun, RefusedFrame, ServerConnection, StageFrame
from qb.doors.binary.stage_requests import StageRequests
from qb.doors.peer_identity import CHANGED, PeerIdentity
from qb.doors.peer_life import PeerLife
from qb.doors.transport import Transport
from qb.storage.signals import Signal, Wait

log = logging.getLogger("qb.session")

OWN_FAULT = "internal error; the broker's log has the details"
FAULT_PATIENCE = 2.0  # seconds for the other answers of a session that ends by a fault of ours
MAX_WAITING = 64  # fetches and commits of one peer; one more is waited for before the next request is read


class Session:
    """A peer from its first byte to its last."""

    def __init__(self, broker: MessageBroker, transport: Transport, name: str) -> None:
        self._broker = broker
        self._transport = transport
        settings = broker.settings.server
        self._connection = ServerConnection(settings.max_message_size)
        self._identity = PeerIdentity(broker, "frames", transport, name)
        self._identity.changed = partial(self.drain, CHANGED)
        self._publishing = PublishRuns(broker, self._connection, transport.send, self._identity, self._fail)
        self._staging = StageRequests(broker, transport.send, self._identity, self._fail)
        self._compression = PeerCompression(broker.metrics, settings.compression, settings.max_message_size)
        self._subscribing = JoinedSubscriptions(
            broker.subscriptions,
            transport,
            self._identity,
            self._compression.pushed,
            broker.ownership.epoch if broker.ownership else 0,
        )
        self._requests = FrameRequests(
            broker, transport, self._publishing, self._subscribing, self._compression, self._identity, name
        )
        transport.has_emptied = self._subscribing.has_room
        transport.unfinished.refuse = self._break_off
        self._events = 0
        self._accounted = 1  # unread bytes that were accounted for; not 0, so that the first event makes the peer known
        self._wait: Wait | None = None  # what the events behind those handled so far wait for
        self._answers: trio.Nursery
        self._looks_for_receipts = False
        self._waiting: Counter[int] = Counter()  # requests by type that are answered by tasks of their own
        self._answered = Signal()
        self._reading = trio.CancelScope()
        self._goodbye = ""  # why we read nothing more
        self._broken_off: BrokerError | None = None  # the last answer when we break off
        self._scope = trio.CancelScope()
        interval = broker.settings.server.heartbeat_interval
        self._life = PeerLife(transport, interval, silence=2 * interval)

    @property
    def name(self) -> str:
        """How the log calls the peer."""
        return self._requests.name

    def __str__(self) -> str:
        return self.name

    # Life

    async def run(self) -> None:
        """Serve the peer until it goes, misbehaves, or is dropped. Raises nothing."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._transport.send_queued)
                    await self._read(nursery)
                    await self._finish()
                    nursery.cancel_scope.cancel()
        finally:
            await self._subscribing.leave_all(died=self._broken_off is not None or not self._reading.cancel_called)
            self._transport.close()
            self._connection.discard()  # it is out of the budget now, and we may be collected much later

    async def _read(self, answers: trio.Nursery) -> None:
        """Handle what the peer sends until it has gone, lost our trust, or we drain."""
        self._answers = answers
        try:
            with self._reading:
                while await self._listen():
                    while self._wait is not None:
                        await self._wait()
                        if must_give_way():
                            await trio.lowlevel.checkpoint()
                        self._wait = self._handle_received()
            if self._broken_off is not None:
                raise self._broken_off
        except SessionEnded:
            pass
        except BrokerError as error:  # one that the connection does not survive
            self._transport.send(refusal(self._connection.peek_number(), error))
        except Exception:
            self._broken_off = self._own_fault()
            self._transport.send(refusal(self._connection.peek_number(), self._broken_off))

    async def _listen(self) -> bool:
        """Handle what the peer says until `_wait` says what to wait for; False when it has gone.

        Only while we listen can it be called silent.
        """
        self._life.listening = True
        try:
            return await self._transport.attend(self._take)
        finally:
            self._life.listening = False

    def _take(self, data: memoryview) -> bool:
        """Handle what has come; False if something must be waited for."""
        self._life.heard = True
        working_on(self)
        self._connection.receive(data)
        self._wait = self._handle_received()
        return self._wait is None

    async def _finish(self) -> None:
        """Wait until everything received is answered and the answers are sent, then say goodbye if we drain."""
        with trio.move_on_after(FAULT_PATIENCE if isinstance(self._broken_off, Internal) else inf):
            await self._publishing.wait_until_settled()
            await self._staging.wait_until_settled()
            while self._waiting[MessageType.REQUEST] or self._waiting[MessageType.TRANSACTION]:
                await self._answered.wait()
        if self._reading.cancel_called and self._broken_off is None:
            self._transport.send(encode_frame(MessageType.GOODBYE, 0, now_ms(), self._farewell()))
        await self._transport.wait_for_room(0)
        if self._broken_off is not None:
            await self._transport.linger()

    def _farewell(self) -> dict[str, str]:
        ownership = self._broker.ownership
        return {
            "reason": self._goodbye,
            **({"owner": ownership.successor} if ownership and ownership.successor else {}),
        }

    def drain(self, reason: str = "the broker is shutting down") -> None:
        """Read nothing more, answer what was received, say goodbye."""
        self._goodbye = reason
        self._reading.cancel()

    def _break_off(self, error: BrokerError) -> None:
        """Read nothing more, and end the session with an error."""
        log.info("ended the session of %s: %s", self.name, error)
        self._connection.discard()
        self._broken_off = error
        self._reading.cancel()

    def _fail(self, fault: Exception) -> None:
        """End the session, since something of ours failed outside of its own tasks."""
        log.error("session with %s ended by a fault of ours", self.name, exc_info=fault)
        self._break_off(Internal(OWN_FAULT))

    def drop(self, why: str) -> None:
        """End the session at once."""
        log.info("dropped %s: %s", self.name, why)
        self._transport.abort()
        self._scope.cancel()

    def check_life(self, now: float) -> None:
        """Called now and then: probe a silent peer once, drop one that stays silent or does not read."""
        why = self._life.look(now)
        if why is not None:
            self.drop(why)
        elif self._life.probe_is_due(now):
            self._transport.send(encode_frame(MessageType.HEARTBEAT, PROBE, now_ms()))

    # Events

    def _handle_received(self) -> Wait | None:
        """Handle what has been received, as far as that is possible now; what is not whole yet is accounted for."""
        before = self._events
        wait = self._handle_events()
        unread = self._connection.unread
        if unread or self._accounted:
            self._accounted = unread
            self._transport.unfinished.hold(unread if wait is None else 0, anew=self._events != before)
            self._transport.unfinished.postpone(unread if wait is not None else 0)
        return wait

    def _handle_events(self) -> Wait | None:
        """Handle what has been received, up to what must be waited for before the rest is handled."""
        while self._transport.queued <= QUEUED_LIMIT:
            event = self._connection.next_event()
            if event is None:
                return None
            self._events += 1
            wait = self._publishing.publish(event) if isinstance(event, PublishRun) else self._handle(event)
            if wait is not None:
                return wait
            if not self._connection.unread:
                return None
            if must_give_way():
                return trio.lowlevel.checkpoint
        return partial(self._transport.wait_for_room, QUEUED_LIMIT)

    def _handle(self, event: Frame | StageFrame | RefusedFrame | InflatedPortion) -> Wait | None:
        """Handle one event; returns what must be waited for, if anything."""
        if isinstance(event, RefusedFrame):
            self._transport.send(refusal(event.number, event.error))
        elif isinstance(event, StageFrame):
            return partial(self._staging.stage, event)
        elif isinstance(event, InflatedPortion):
            return None
        elif event.type == MessageType.SETTLE:
            return self._settle(event)
        elif event.type == MessageType.COMPRESSED:
            return self._inflate(event)
        elif self._begin_at_once(event):
            return None
        elif _may_take_long(event) and self._waiting.total() < MAX_WAITING:
            self._waiting[event.type] += 1
            self._answers.start_soon(self._answer_apart, event)
        else:
            return partial(self._answer, event)
        return None

    def _inflate(self, frame: Frame) -> Wait | None:
        """Have the frames in a COMPRESSED frame come next; returns the wait for room, if there is none."""
        try:
            inflater = self._compression.inflater(frame)
        except BrokerError as error:
            self._refuse(frame, error)
            return None
        if not self._transport.unfinished.has_room_for(inflater.left):
            return partial(self._inflate_when_there_is_room, inflater)
        self._connection.inflate(inflater)
        return None

    async def _inflate_when_there_is_room(self, inflater: Inflater) -> None:
        await self._transport.unfinished.wait_for_room(inflater.left)
        self._connection.inflate(inflater)
        self._transport.unfinished.postpone(self._connection.unread)

    def _begin_at_once(self, frame: Frame) -> bool:
        """Carry out a request in this step, if it can be; it may be answered later. False: a task is needed."""
        if self._waiting.total() >= MAX_WAITING:
            return False
        self._waiting[frame.type] += 1
        begun = False
        try:
            begun = self._requests.begin_at_once(frame, partial(self._answer_later, frame))
        except BrokerError as error:
            self._refuse(frame, error)
            return True
        except Exception:
            self._refuse(frame, self._own_fault())
            return True
        finally:
            self._waiting[frame.type] -= not begun
        return begun

    def _answer_later(self, frame: Frame, answer: Callable[[], bytes]) -> None:
        """Answer what was begun in an earlier step, or in this one. Raises nothing."""
        self._waiting[frame.type] -= 1
        self._answered.set()
        try:
            try:
                self._transport.send(answer())
            except BrokerError as error:
                self._refuse(frame, error)
        except SessionEnded as last:
            self.drain(str(last))
        except Exception as fault:
            self._fail(fault)

    async def _answer_apart(self, frame: Frame) -> None:
        """Answer in a task of its own what may take long: the requests behind it shall not wait."""
        try:
            await self._answer(frame)
        except SessionEnded as last:
            self.drain(str(last))
        finally:
            self._waiting[frame.type] -= 1
            self._answered.set()

    async def _answer(self, frame: Frame) -> None:
        """Carry out a request and answer it. Raises Answered if that was the last answer."""
        working_on(self, MessageType(frame.type).name, frame.properties.get("method", ""))
        try:
            self._requests.is_first = self._events == 1
            answer = await self._requests.carry_out(frame)
        except BrokerError as error:
            self._refuse(frame, error)
        except Exception:
            self._refuse(frame, self._own_fault())
        else:
            if answer:
                self._transport.send(answer)
                await self._transport.wait_for_turn(QUEUED_LIMIT, len(answer))
        if self._requests.ends:
            self.drain(self._requests.ends)
        if self._subscribing.wants_receipts and not self._looks_for_receipts:
            self._looks_for_receipts = True
            self._answers.start_soon(self._subscribing.receipts.run)

    def _refuse(self, frame: Frame, error: BrokerError) -> None:
        self._transport.send(refusal(frame.sequence_number, error))
        if not REPLIES[type(error)].survives:
            raise SessionEnded(str(error))

    def _own_fault(self) -> Internal:
        """Log the exception that is being handled; returns the answer to the peer."""
        log.exception("session with %s ended by a fault of ours", self.name)
        return Internal(OWN_FAULT)

    def _settle(self, frame: Frame) -> Wait | None:
        """Carry out a SETTLE at once, since deliveries wait for it; returns the wait for the rest of a large one."""
        try:
            self._identity.check(ANY_USER, frame.properties, "SETTLE")
            rest = self._subscribing.settle(frame)
        except BrokerError as error:
            self._refuse(frame, error)
        except Exception:
            self._refuse(frame, self._own_fault())
        else:
            return rest and partial(self._go_on_settling, frame, rest)
        return None

    async def _go_on_settling(self, frame: Frame, rest: Wait) -> None:
        try:
            await rest()
        except BrokerError as error:
            self._refuse(frame, error)
        except Exception:
            self._refuse(frame, self._own_fault())


def _may_take_long(request: Frame) -> bool:
    """Say whether the requests behind this one should not wait for it."""
    commits = request.type == MessageType.REQUEST and request.properties.get("method") in SLOW_METHODS
    return commits or request.type in (MessageType.FETCH, MessageType.TRANSACTION)
