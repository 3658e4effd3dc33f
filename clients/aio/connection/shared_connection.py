"""What the callers and the task of a link share: the stream, calls on their way, and what is read.

A write is never cancelled halfway: half a frame would spoil the connection for every other task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import anyio

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.event_loops.running_loop import Stream, running_loop
from qb.clients.aio.waiting import AsyncAnswers, AsyncGuard, AsyncTurn, one_answer, shielded
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.connection_phases import Phase, PhaseEvent, next_phase
from qb.clients.protocol.conversation import (
    BytesToSend,
    Conversation,
    Event,
    Goodbye,
    PublishesSettled,
    PushedFrame,
    RequestAnswered,
    TurnedAway,
    Welcome,
)
from qb.clients.protocol.push_listener import PushListener
from qb.clients.protocol.reconnecting import ConnectionTrouble
from qb.clients.protocol.unacked_publishes import UnackedBatch
from qb.core.wire.addresses import BrokerAddress
from qb.core.wire.frames import Frame, Frames

MOST_GATHERED = 64 * 1024  # bytes that are worth waiting for others, and that they may fill up
TURN_TIMEOUT = 1.0  # how long the reader waits for a caller that writes before it goes on reading


class AsyncPendingCall:
    """One request on its way, and what its caller waits for."""

    __slots__ = ("answer", "number", "waiter")

    def __init__(self) -> None:
        self.number = 0  # until it is sent
        self.answer: Frame | QBError | None = None
        self.waiter: AsyncAnswers = one_answer()

    def finish(self, answer: Frame | QBError) -> None:
        self.answer = answer
        self.waiter.release()


class AsyncSharedConnection:
    """One address, and the connection to it while there is one."""

    listener: PushListener

    def __init__(
        self,
        servers: Sequence[BrokerAddress],
        conversation: Conversation,
        background: AsyncBackground,
        heartbeat_interval: float,
    ) -> None:
        self.heartbeat_interval = heartbeat_interval
        self.conversation, self.background = conversation, background
        self.sending = AsyncTurn()  # the right to write; a task may pass it on to another
        self.changed = AsyncGuard()
        self.phase = Phase.DOWN
        self.stream: Stream | None = None
        self.calls: dict[int, AsyncPendingCall] = {}
        self._gathered: list[Frames] | None = None  # what a task is about to write, while others may add to it
        self._gathered_size = 0
        self._in_company = False  # did others add to what was gathered last?
        self.trouble = ConnectionTrouble(servers)
        self._disowned = False

    @property
    def up(self) -> bool:
        """May callers send?"""
        return self.phase is Phase.UP

    # The phases

    def advance(self, event: PhaseEvent) -> None:
        """Take note of an event."""
        self.phase = next_phase(self.phase, event)
        self.changed.notify_all()

    def connected(self, stream: Stream) -> None:
        """There is a stream."""
        self.stream = stream
        self.advance(PhaseEvent.CONNECTED)

    async def resume(self, stream: Stream) -> None:
        """Open the link to callers, once everything unanswered is on its way again."""
        await self.sending.acquire()
        stream.early = self._take_acks
        self.advance(PhaseEvent.WELCOMED)
        unanswered = [*self.conversation.unanswered(), *self.listener.welcomed()]
        self.background.start("qb sends again", self._write_again, stream, unanswered)  # this one reads the answers

    async def _write_again(self, stream: Stream, unanswered: Iterable[Frames]) -> None:
        try:
            with shielded():  # ends when the stream is closed
                for frames in unanswered:
                    await self.write(stream, frames)
        finally:
            self.sending.release()

    def lost(self) -> None:
        """The attempt has failed, or the connection has ended."""
        if self._disowned:  # by a child of fork(), which unwinds the event loop of its parent
            return
        stream, self.stream = self.stream, None
        self.advance(PhaseEvent.LOST)
        if stream is not None:
            stream.close()
        self.listener.lost()
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.finish(self.trouble.lost())
        release(self.conversation.lost())
        self.changed.notify_all()

    def disown(self) -> None:
        """In a child of fork(): let go of the parent's connection, without a word to the broker."""
        self._disowned = True
        stream, self.stream, self.phase = self.stream, None, Phase.DOWN
        if stream is not None:
            stream.let_go()

    # Writing

    async def write(self, stream: Stream, data: Frames) -> None:
        """Write all of it. A failure is left to the reader, who sees the connection end."""
        if not await stream.send(data, self.heartbeat_interval):
            stream.hang_up()

    async def write_gathered(self, stream: Stream, data: Frames) -> None:
        """As write(), with what other tasks add before they wait: tasks that publish at a time share a system call."""
        if len(data) > MOST_GATHERED:
            await self.write(stream, data)
            return
        gathered = self._gathered = [data]
        self._gathered_size = len(data)
        try:
            await running_loop().give_way()
        finally:
            self._gathered, self._in_company = None, len(gathered) > 1
            await self.write(stream, data if len(gathered) == 1 else b"".join(gathered))

    @property
    def expects_company(self) -> bool:
        """Are other tasks likely to publish in the same pass of the event loop? A lone publish is not held up."""
        return self._in_company or self.conversation.awaits_acks

    @property
    def gathers(self) -> bool:
        """May a task that does not hold the turn add() what it has to send?"""
        return self._gathered is not None and self._gathered_size < MOST_GATHERED

    def add(self, data: Frames) -> None:
        """Have it written behind what is gathered."""
        assert self._gathered is not None
        self._gathered.append(data)
        self._gathered_size += len(data)

    async def show_life(self, stream: Stream, data: bytes) -> None:
        """Write a heartbeat, unless a caller is busy writing: that is a sign of life too."""
        with anyio.move_on_after(TURN_TIMEOUT):
            async with self.sending:
                await self.write(stream, data)

    # Reading

    async def receive(self, stream: Stream, seconds: float = inf) -> bool:
        """Receive once; False if nothing comes for so many seconds. Raises EOFError, OSError."""
        data = await stream.receive(seconds)
        if data is None:
            return False
        if not data:
            raise EOFError
        self.conversation.receive(data)
        return True

    def _take_acks(self, data: bytes) -> bytes:
        """Wake those whose publishes are acked, at once; returns the bytes that are left for the link's task."""
        settled, left = self.conversation.take_acks(data)
        if settled:
            release(settled)
            self.changed.notify_all()  # there may be room now
        return left

    async def handle_events(self, stream: Stream) -> None:
        """Handle what was received. Raises what ends the connection."""
        while (event := self.conversation.next_event()) is not None:
            await self._handle(stream, event)

    async def _handle(self, stream: Stream, event: Event) -> None:
        match event:
            case PublishesSettled(batches):
                release(batches)
                self.changed.notify_all()  # there may be room now
            case RequestAnswered(number, frame):
                if call := self.calls.pop(number, None):
                    call.finish(frame)
                else:
                    self.listener.pushed(frame)
            case BytesToSend(data):
                await self.show_life(stream, data)
            case PushedFrame(frame):
                self.listener.pushed(frame)
            case Welcome(_, uncertain):
                self.trouble.welcomed()
                release(uncertain)
                await self.resume(stream)
            case Goodbye(reason, owner):
                self.trouble.moved(owner)
                raise ConnectionError(reason)
            case TurnedAway(error):
                raise error


def release(batches: Iterable[UnackedBatch]) -> None:
    """Wake the callers that wait for these batches."""
    for batch in batches:
        batch.waiter.release()
