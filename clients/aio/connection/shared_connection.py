"""What the callers and the task of a link share: the stream, calls on their way, and what is read.

A write is never cancelled halfway: half a frame would spoil the connection for every other task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import trio

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.connection.streams import hang_up, let_go
from qb.clients.aio.waiting import AsyncGuard, now
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

RECEIVE_SIZE = 64 * 1024
TURN_TIMEOUT = 1.0  # how long the reader waits for a caller that writes before it goes on reading


class AsyncPendingCall:
    """One request on its way, and what its caller waits for."""

    __slots__ = ("answer", "number", "waiter")

    def __init__(self) -> None:
        self.number = 0  # until it is sent
        self.answer: Frame | QBError | None = None
        self.waiter = trio.Semaphore(0)

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
        self.sending = trio.Semaphore(1, max_value=1)  # the right to write; a task may pass it on to another
        self.changed = AsyncGuard()
        self.phase = Phase.DOWN
        self.stream: trio.SocketStream | None = None
        self.calls: dict[int, AsyncPendingCall] = {}
        self.trouble = ConnectionTrouble(servers)

    @property
    def up(self) -> bool:
        """May callers send?"""
        return self.phase is Phase.UP

    # The phases

    def advance(self, event: PhaseEvent) -> None:
        """Take note of an event."""
        self.phase = next_phase(self.phase, event)
        self.changed.notify_all()

    def connected(self, stream: trio.SocketStream) -> None:
        """There is a stream."""
        self.stream = stream
        self.advance(PhaseEvent.CONNECTED)

    async def resume(self, stream: trio.SocketStream) -> None:
        """Open the link to callers, once everything unanswered is on its way again."""
        await self.sending.acquire()
        self.advance(PhaseEvent.WELCOMED)
        unanswered = [*self.conversation.unanswered(), *self.listener.welcomed()]
        self.background.start("qb sends again", self._write_again, stream, unanswered)  # this one reads the answers

    async def _write_again(self, stream: trio.SocketStream, unanswered: Iterable[Frames]) -> None:
        try:
            with trio.CancelScope(shield=True):  # ends when the stream is closed
                for frames in unanswered:
                    await self.write(stream, frames)
        finally:
            self.sending.release()

    def lost(self) -> None:
        """The attempt has failed, or the connection has ended."""
        stream, self.stream = self.stream, None
        self.advance(PhaseEvent.LOST)
        if stream is not None:
            stream.socket.close()
        self.listener.lost()
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.finish(self.trouble.lost())
        release(self.conversation.lost())
        self.changed.notify_all()

    def disown(self) -> None:
        """In a child of fork(): let go of the parent's connection, without a word to the broker."""
        stream, self.stream, self.phase = self.stream, None, Phase.DOWN
        if stream is not None:
            let_go(stream)

    # Writing

    async def write(self, stream: trio.SocketStream, data: Frames) -> None:
        """Write all of it. A failure is left to the reader, who sees the connection end."""
        with trio.CancelScope(shield=True, deadline=now() + self.heartbeat_interval):
            try:
                await stream.send_all(data)
                return
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        hang_up(stream)

    async def show_life(self, stream: trio.SocketStream, data: bytes) -> None:
        """Write a heartbeat, unless a caller is busy writing: that is a sign of life too."""
        with trio.move_on_after(TURN_TIMEOUT):
            async with self.sending:
                await self.write(stream, data)

    # Reading

    async def receive(self, stream: trio.SocketStream) -> None:
        """Receive once. Raises EOFError."""
        data = await stream.receive_some(RECEIVE_SIZE)
        if not data:
            raise EOFError
        self.conversation.receive(data)

    async def handle_events(self, stream: trio.SocketStream) -> None:
        """Handle what was received. Raises what ends the connection."""
        while (event := self.conversation.next_event()) is not None:
            await self._handle(stream, event)

    async def _handle(self, stream: trio.SocketStream, event: Event) -> None:
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
            case Goodbye(reason):
                raise ConnectionError(reason)
            case TurnedAway(error):
                raise error


def release(batches: Iterable[UnackedBatch]) -> None:
    """Wake the callers that wait for these batches."""
    for batch in batches:
        batch.waiter.release()
