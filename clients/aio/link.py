"""A connection to the broker that one task keeps up, for any number of calling tasks.

The same shape as qb.clients.blocking.link. Callers write, the link's task reads. It lives in the nursery of the client
and shields itself, so that a client that is cancelled can still leave in good order; close() ends it. A write is never
cancelled halfway: half a frame would spoil the connection for every other task.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import trio

from qb.clients.aio.background import AsyncBackground
from qb.clients.protocol.client_errors import ConnectionLost, QBError
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
from qb.clients.protocol.forking import call_in_child, used_after_fork
from qb.clients.protocol.publish_frames import PublishForm
from qb.clients.protocol.push_listener import PushListener
from qb.clients.protocol.reconnecting import CONNECT_TIMEOUT, ConnectionTrouble, ReconnectBackoff
from qb.clients.protocol.unacked_publishes import UnackedBatch
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import Frame, Frames

RECEIVE_SIZE = 64 * 1024
TURN_TIMEOUT = 1.0  # how long the reader waits for a caller that writes before it goes on reading

# What ends a connection, and is answered with another one; anything else is a fault of ours, and the caller's to see.
ENDS = (
    OSError,
    EOFError,
    PeerMisbehaved,
    QBError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
)

T = TypeVar("T")


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


class LinkLifetime:
    """One span from open() to close()."""

    def __init__(self, scope: trio.CancelScope) -> None:
        self.scope = scope  # close() ends it, not the caller's cancellation: a cancelled client says goodbye before
        self.ended = trio.Event()


class AsyncLink:
    """The way to one broker. Give it a `listener` before the first use."""

    listener: PushListener

    def __init__(
        self,
        host: str,
        port: int,
        conversation: Conversation,
        background: AsyncBackground,
        *,
        heartbeat_interval: float,
    ) -> None:
        self._host, self._port = host, port
        self._conversation, self._background = conversation, background
        self._heartbeat_interval = heartbeat_interval
        self._sending = trio.Semaphore(1, max_value=1)  # the right to write; a task may pass it on to another
        self._changed = trio.lowlevel.ParkingLot()
        self._calls: dict[int, AsyncPendingCall] = {}
        self._stream: trio.SocketStream | None = None
        self._up = False  # has the broker welcomed us on this stream?
        self._life: LinkLifetime | None = None
        self._trouble = ConnectionTrouble(host, port)
        self._opened = False  # ever?
        self._inherited = False
        call_in_child(self, AsyncLink._disown)

    def _disown(self) -> None:
        """In a child of fork(): let go of the parent's connection, without a word to the broker or to trio.

        trio's own close() would reach the parent's loop, whose epoll the child shares.
        """
        self._inherited = self._opened
        stream, self._stream, self._up = self._stream, None, False
        if stream is not None:
            os.close(stream.socket.detach())

    # What callers do

    @property
    def inherited(self) -> bool:
        """Was it opened by the parent of this process? Then close() does nothing, and all else raises."""
        return self._inherited

    @property
    def may_begin_anew(self) -> bool:
        """May another link take its place in a child of fork()? Not if it was opened: the child shares trio's loop."""
        return not self._inherited

    def check_process(self) -> None:
        """Raise UsedAfterFork if it was opened by the parent of this process."""
        if self._inherited:
            raise used_after_fork()

    @property
    def started(self) -> bool:
        """Is a connection kept up, or at least tried for?"""
        return self._life is not None

    @property
    def up(self) -> bool:
        """Is there a connection now?"""
        return self._up

    async def open(self, deadline: float, *, patient: bool) -> None:
        """Return when connected. Raises BrokerUnavailable at the first failure, or if `patient` at the deadline."""
        failures = self._trouble.failures
        await self._wait_for(lambda: self._up or (not patient and self._trouble.failures > failures), deadline)
        if not self._up:
            raise self._trouble.unavailable()

    async def close(self) -> None:
        """End the connection and the task. Calls on their way raise; a later call connects anew."""
        if self._inherited:
            return
        life, self._life, self._up = self._life, None, False
        _release(self._conversation.give_up("this client was disconnected"))
        self._changed.unpark_all()
        if life is not None:
            life.scope.cancel()
            await life.ended.wait()

    async def publish(
        self,
        form: PublishForm,
        bodies: Sequence[bytes],
        waiter: trio.Semaphore,
        deadline: float,
        check: Callable[[], None] = lambda: None,
    ) -> UnackedBatch:
        """Send the bodies; `waiter.release()` is called when all are answered. Waits for connection and room.

        Raises BrokerUnavailable, RequestTimedOut, or what `check` raises when the turn has come; nothing was sent
        then, nor if cancelled.
        """

        def compose() -> tuple[UnackedBatch, Frames]:
            check()
            batch = self._conversation.publish(form, bodies, waiter)
            return batch, batch.data

        return await self.transmit(compose, deadline)

    def abandon(self, batch: UnackedBatch) -> None:
        """Stop waiting for a batch: it is not sent again, and no answer reaches it any more."""
        self._conversation.abandon(batch)

    async def post(self, compose: Callable[[], bytes]) -> None:
        """Send what compose() returns, which no caller waits for; without a connection it is not even called."""
        async with self._sending:
            if self._stream is not None and self._up and (data := compose()):
                await self._write(self._stream, data)

    async def ask(self, compose: Callable[[], tuple[int, bytes]], deadline: float) -> Frame:
        """Send a request and return its reply. Raises BrokerUnavailable, RequestTimedOut, ConnectionLost."""
        return await self.answer(await self.begin(compose, deadline), deadline)

    async def begin(self, compose: Callable[[], tuple[int, bytes]], deadline: float) -> AsyncPendingCall:
        """Send a request, whose reply answer() returns; several may be on their way. Raises as ask()."""
        call = AsyncPendingCall()

        def compose_call() -> tuple[AsyncPendingCall, bytes]:
            call.number, data = compose()
            self._calls[call.number] = call
            return call, data

        return await self.transmit(compose_call, deadline)

    async def answer(self, call: AsyncPendingCall, deadline: float) -> Frame:
        """Wait for the reply to a request that was begun. Raises as ask()."""
        self.check_process()
        try:
            await self.wait(call.waiter, deadline)
        finally:
            self.forget(call)
        if call.answer is None:
            raise self._trouble.unanswered()
        if isinstance(call.answer, QBError):
            raise call.answer
        return call.answer

    def forget(self, call: AsyncPendingCall) -> None:
        """Do not wait for the reply to a request that was begun."""
        self._calls.pop(call.number, None)

    async def wait(self, waiter: trio.Semaphore, deadline: float) -> bool:
        """Return True when the waiter is released, False at the deadline."""
        with trio.move_on_at(deadline) as waiting:
            await waiter.acquire()
        return not waiting.cancelled_caught

    def attended(self) -> AbstractContextManager[None]:
        """For callers that wait for many answers: the link's task reads all the while anyway."""
        return nullcontext()

    async def transmit(self, compose: Callable[[], tuple[T, Frames]], deadline: float) -> T:
        """Compose and write in one turn, so that bytes leave in the order of their numbers.

        Waits for connection and room. Raises BrokerUnavailable, RequestTimedOut, or what `compose` raises when the turn
        has come; nothing was sent then.
        """
        self.check_process()  # before the first wait: a child must not turn the parent's loop
        while True:
            async with self._sending:
                if self._stream is not None and self._up and self._conversation.has_room:
                    result, data = compose()
                    await self._write(self._stream, data)
                    return result
            await self._wait_until_ready(deadline)

    async def _wait_until_ready(self, deadline: float) -> None:
        ready = await self._wait_for(lambda: self._up and self._conversation.has_room, deadline)
        if not self._up:
            raise self._trouble.unavailable()
        if not ready:
            raise self._trouble.stalled()

    async def _wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait, with the task at work. Raises ConnectionLost if the link is closed."""
        life = self._start()
        with trio.CancelScope(deadline=deadline):
            while not condition() and self._life is life:
                await self._changed.park()
        if self._life is not life:
            raise ConnectionLost("this client was disconnected by another task")
        return condition()

    def _start(self) -> LinkLifetime:
        self.check_process()
        if self._life is None:
            life = LinkLifetime(self._background.shield())
            self._background.start(f"qb {self._host}:{self._port}", self._run, life)
            self._life, self._opened = life, True
        return self._life

    # What the link's task does

    async def _run(self, life: LinkLifetime) -> None:
        backoff = ReconnectBackoff()
        try:
            with life.scope:
                while True:
                    await self._live(backoff)
                    await trio.sleep(backoff.pause())
        finally:
            life.ended.set()
            if self._life is life:  # it failed, by a fault of ours
                self._life = None
                self._changed.unpark_all()

    async def _live(self, backoff: ReconnectBackoff) -> None:
        """One connection, from the attempt to the end."""
        try:
            with trio.fail_after(CONNECT_TIMEOUT):
                stream = await trio.open_tcp_stream(self._host, self._port)
                self._stream = stream
                await self._greet(stream)
            backoff.reset()
            await self._converse(stream)
        except ENDS as error:
            self._trouble.note(_plain(error))
        finally:
            self._disconnected()

    async def _greet(self, stream: trio.SocketStream) -> None:
        """Return when the broker has welcomed us."""
        await stream.send_all(self._conversation.open())
        while not self._up:
            await self._receive(stream)
            await self._handle_events(stream)

    async def _converse(self, stream: trio.SocketStream) -> None:
        """Read until the connection ends, which always raises."""
        silent = False
        while True:
            with trio.move_on_after(self._heartbeat_interval) as patience:
                await self._receive(stream)
            if patience.cancelled_caught:
                if silent:
                    raise ConnectionError("it was silent for two heartbeat intervals")
                await self._show_life(stream, self._conversation.heartbeat())
            silent = patience.cancelled_caught
            await self._handle_events(stream)

    async def _receive(self, stream: trio.SocketStream) -> None:
        data = await stream.receive_some(RECEIVE_SIZE)
        if not data:
            raise EOFError
        self._conversation.receive(data)

    async def _handle_events(self, stream: trio.SocketStream) -> None:
        while (event := self._conversation.next_event()) is not None:
            await self._handle(stream, event)

    async def _handle(self, stream: trio.SocketStream, event: Event) -> None:
        match event:
            case PublishesSettled(batches):
                _release(batches)
                self._changed.unpark_all()  # there may be room now
            case RequestAnswered(number, frame):
                if call := self._calls.pop(number, None):
                    call.finish(frame)
                else:
                    self.listener.pushed(frame)
            case BytesToSend(data):
                await self._show_life(stream, data)
            case PushedFrame(frame):
                self.listener.pushed(frame)
            case Welcome(_, uncertain):
                _release(uncertain)
                await self._resume(stream)
            case Goodbye(reason):
                raise ConnectionError(reason)
            case TurnedAway(error):
                raise error

    async def _write(self, stream: trio.SocketStream, data: Frames) -> None:
        """Write all of it. A failure is left to the reader, who sees the connection end."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._heartbeat_interval):
            try:
                await stream.send_all(data)
                return
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        _hang_up(stream)

    async def _show_life(self, stream: trio.SocketStream, data: bytes) -> None:
        """Write a heartbeat, unless a caller is busy writing: that is a sign of life too."""
        with trio.move_on_after(TURN_TIMEOUT):
            async with self._sending:
                await self._write(stream, data)

    async def _resume(self, stream: trio.SocketStream) -> None:
        """Open the link to callers, once everything unanswered is on its way again."""
        await self._sending.acquire()
        self._up = True
        self._changed.unpark_all()
        unanswered = [*self._conversation.unanswered(), *self.listener.welcomed()]
        self._background.start("qb sends again", self._write_again, stream, unanswered)  # this one reads the answers

    async def _write_again(self, stream: trio.SocketStream, unanswered: Iterable[Frames]) -> None:
        try:
            with trio.CancelScope(shield=True):  # ends when the stream is closed
                for frames in unanswered:
                    await self._write(stream, frames)
        finally:
            self._sending.release()

    def _disconnected(self) -> None:
        stream, self._stream, self._up = self._stream, None, False
        if stream is not None:
            stream.socket.close()
        self.listener.lost()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.finish(self._trouble.lost())
        _release(self._conversation.lost())
        self._changed.unpark_all()


def _plain(error: Exception) -> BaseException:
    """Return the standard library's name for a failure that trio has a name of its own for."""
    if isinstance(error, trio.TooSlowError):
        return TimeoutError()
    if isinstance(error, trio.BrokenResourceError | trio.ClosedResourceError):
        return ConnectionError(str(error))
    return error


def _hang_up(stream: trio.SocketStream) -> None:
    """Make every task that uses the stream notice that it is over."""
    try:
        stream.socket.shutdown(socket.SHUT_RDWR)
    except (OSError, trio.ClosedResourceError):
        pass


def _release(batches: Iterable[UnackedBatch]) -> None:
    for batch in batches:
        batch.waiter.release()
