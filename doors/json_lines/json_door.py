"""The JSON-lines door: one JSON object a line, one line in answer, for any language and for `nc`.

docs/JSON_LINES.md is the contract.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import trio

from qb.core.broker.message_broker import MessageBroker
from qb.core.broker.outgoing_messages import OutgoingMessage
from qb.core.pacing import must_give_way, working_on
from qb.core.wire.errors import REPLIES, BadRequest, BrokerError, PeerMisbehaved, Unauthenticated
from qb.doors.json_lines.json_answers import failure, success, words
from qb.doors.json_lines.json_methods import JsonMethods, JsonWaits, outgoing
from qb.doors.json_lines.json_requests import ProduceLine
from qb.doors.json_lines.line_splitter import LineSplitter
from qb.doors.json_lines.produce_runs import ProduceRun
from qb.doors.peer_identity import CHANGED
from qb.doors.peer_life import PeerLife
from qb.doors.transport import Transport

log = logging.getLogger("qb.json_lines")

LINE_ROOM = 65_536  # what a line may have beside a message of the largest size
AT_ONCE = 65_536  # bytes of lines that are received and not carried out yet
QUEUED_LIMIT = 1 << 20  # answers that a peer has not read: past this, its lines are not read either


class JsonDoor:
    """Opens a session for each peer."""

    name = "json"
    urgent = None

    def __init__(self, broker: MessageBroker) -> None:
        self._broker = broker

    def open(self, transport: Transport, address: str) -> JsonSession:
        return JsonSession(self._broker, transport, f"json {address}")

    def refuse(self, error: BrokerError) -> bytes:
        return failure(words(error))


class JsonSession:
    """A peer from its first line to its last."""

    def __init__(self, broker: MessageBroker, transport: Transport, name: str) -> None:
        self._transport = transport
        self._lines = LineSplitter(broker.settings.server.max_message_size + LINE_ROOM)
        self._waits = JsonWaits()
        self._run = ProduceRun(broker.appends)
        self._methods = JsonMethods(broker, transport, name, self._waits)
        self._scope = trio.CancelScope()
        idle = broker.settings.json.idle_timeout or inf
        self._life = PeerLife(transport, broker.settings.server.heartbeat_interval, silence=idle)
        self._broken_off: BrokerError | None = None  # the last answer when we break off
        self.name = name
        transport.has_emptied = self._methods.subscribing.has_room
        transport.unfinished.refuse = self._break_off
        self._methods.identity.changed = partial(self._break_off, Unauthenticated(CHANGED))

    async def run(self) -> None:
        """Serve the peer until it goes or is dropped. Raises nothing."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._transport.send_queued)
                    await self._converse()
                    await self._transport.wait_for_room(0)
                    if self._broken_off is not None:
                        await self._transport.linger()
                    nursery.cancel_scope.cancel()
        finally:
            self._transport.close()
            self._lines.discard()  # they are out of the budget now, and we may be collected much later

    async def _converse(self) -> None:
        """Answer every line until the peer sends no more, has lost our trust, or we drain."""
        try:
            while data := await self._receive():
                whole = False
                for line in self._lines.feed(data):
                    whole = True
                    await self._answer(line)
                await self._store()
                self._transport.unfinished.hold(self._lines.unfinished, anew=whole)
            if self._broken_off is not None:
                raise self._broken_off
            for line in () if self._waits.ended else self._lines.finish():
                await self._answer(line)
            await self._store()
        except BrokerError as error:  # one that the connection does not survive
            self._transport.send(failure(words(error)))
        except Exception:
            log.exception("session with %s ended by a fault of ours", self.name)
            self._transport.send(failure("internal error"))
        finally:
            await self._methods.subscribing.leave_all(died=self._broken_off is not None or not self._waits.ended)

    async def _receive(self) -> bytes:
        """Return what the peer has sent; b"" when no more will come or be read."""
        data = b""
        self._life.listening = not self._methods.subscribing.any  # one that is pushed to need not speak
        with self._waits.waiting():
            data = await self._transport.receive(AT_ONCE)
        self._life.listening = False
        self._life.heard = True
        return data

    async def _answer(self, line: bytes | None) -> None:
        """Carry out one line and send the answer, or keep a `produce` for the run that _store() stores."""
        if line is None:
            await self._refuse(BadRequest(f"Line too long: more than {self._lines.limit} bytes"))
        elif line and not line.isspace():
            working_on(self.name, b"auth" if b"token" in line[:80] else line[:80])  # no token may reach the log
            try:
                request = await self._methods.read(line)
                if isinstance(request.wanted, ProduceLine):
                    await self._keep(request.wanted.topic, outgoing(request.wanted))
                else:
                    await self._store()
                    await self._send([await self._methods.carry_out(request)])
            except BrokerError as error:
                await self._refuse(error)
        elif must_give_way():
            await trio.lowlevel.checkpoint()

    async def _keep(self, topic: str, message: OutgoingMessage) -> None:
        """Keep a message for the next run. One that cannot join the others waits until they are stored."""
        if not self._run.takes(topic):
            await self._store()
        self._run.add(topic, message)

    async def _store(self) -> None:
        """Store the messages that were kept, and answer their lines."""
        await self._send(await self._run.store(self._methods.identity.principal.name))

    async def _refuse(self, error: BrokerError) -> None:
        await self._store()  # the lines before this one are answered first
        await self._send([error])

    async def _send(self, outcomes: Sequence[Mapping[str, Any] | BrokerError]) -> None:
        """Send answers in this order; returns when the peer has read enough. Raises an error that ends the session."""
        if not outcomes:
            return
        ends = next((number for number, each in enumerate(outcomes) if _ends_session(each)), None)
        answers = b"".join([_line(each) for each in outcomes[:ends]])
        self._transport.send(answers)
        if ends is not None and isinstance(last := outcomes[ends], BrokerError):
            raise last
        await trio.lowlevel.checkpoint()  # a peer that pastes a thousand lines does not hold up the others
        await self._transport.wait_for_turn(QUEUED_LIMIT, len(answers))

    def _break_off(self, error: BrokerError) -> None:
        """Read nothing more, and end the session with an error."""
        log.info("ended the session of %s: %s", self.name, error)
        self._lines.discard()
        self._broken_off = error
        self._waits.end()

    def drain(self) -> None:
        """Read nothing more, answer what was received."""
        self._waits.end()

    def check_life(self, now: float) -> None:
        """Called now and then: drop a peer that does not read, or says nothing for long. People type slowly."""
        why = self._life.look(now)
        if why is None:
            return
        if self._transport.queued:
            log.info("dropped %s: %s", self.name, why)
            self._transport.abort()
            self._scope.cancel()
        else:
            self._break_off(PeerMisbehaved(f"{why}; a line now and then keeps the connection (QB_JSON_IDLE_TIMEOUT)"))


def _ends_session(outcome: Mapping[str, Any] | BrokerError) -> bool:
    return isinstance(outcome, BrokerError) and not REPLIES[type(outcome)].survives


def _line(outcome: Mapping[str, Any] | BrokerError) -> bytes:
    return failure(words(outcome)) if isinstance(outcome, BrokerError) else success(outcome)
