"""A connection to the broker that one task keeps up, for any number of calling tasks.

The same shape as qb.clients.blocking.link: callers write, the link's task reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.connection.link_task import AsyncLinkTask
from qb.clients.aio.connection.shared_connection import AsyncPendingCall, AsyncSharedConnection, release
from qb.clients.aio.waiting import AsyncAnswers, now
from qb.clients.protocol.client_errors import ConnectionLost, QBError
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.forking import call_in_child, used_after_fork
from qb.clients.protocol.publish_frames import PublishForm
from qb.clients.protocol.push_listener import PushListener
from qb.clients.protocol.reconnecting import SILENT_FOR
from qb.clients.protocol.unacked_publishes import UnackedBatch
from qb.core.wire.addresses import BrokerAddress
from qb.core.wire.frames import Frame, Frames

__all__ = ["AsyncLink", "AsyncPendingCall"]

T = TypeVar("T")


class AsyncLink:
    """The way to one broker. Give it a `listener` before the first use."""

    def __init__(
        self,
        servers: Sequence[BrokerAddress],
        conversation: Conversation,
        background: AsyncBackground,
        *,
        heartbeat_interval: float,
    ) -> None:
        self._connection = AsyncSharedConnection(servers, conversation, background, heartbeat_interval)
        self._conversation = conversation
        self._task: AsyncLinkTask | None = None  # from open() to close()
        self._before: AsyncLinkTask | None = None  # the one that close() has ended
        self._opened = False  # ever?
        self._inherited = False
        call_in_child(self, AsyncLink._disown)

    def _disown(self) -> None:
        self._inherited = self._opened
        self._connection.disown()

    @property
    def listener(self) -> PushListener:
        """Takes what the broker pushes."""
        return self._connection.listener

    @listener.setter
    def listener(self, listener: PushListener) -> None:
        self._connection.listener = listener

    @property
    def server(self) -> BrokerAddress:
        """The broker that it is connected to, or tries next."""
        return self._connection.trouble.server

    @property
    def inherited(self) -> bool:
        """Was it opened by the parent of this process? Then close() does nothing, and all else raises."""
        return self._inherited

    @property
    def may_begin_anew(self) -> bool:
        """May another link take its place in a child of fork()? Not if it was opened: they share the event loop."""
        return not self._inherited

    def check_process(self) -> None:
        """Raise UsedAfterFork if it was opened by the parent of this process."""
        if self._inherited:
            raise used_after_fork()

    @property
    def started(self) -> bool:
        """Is a connection kept up, or at least tried for?"""
        return self._task is not None

    @property
    def up(self) -> bool:
        """Is there a connection now, which is not being closed?"""
        return self._task is not None and self._connection.up

    # Coming and going

    async def open(self, deadline: float, *, patient: bool) -> None:
        """Return when connected. Raises BrokerUnavailable at the first failure, or if `patient` at the deadline."""
        trouble, failures = self._connection.trouble, self._connection.trouble.failures
        await self._wait_for(lambda: self.up or (not patient and trouble.failures > failures), deadline)
        if not self.up:
            raise trouble.unavailable()

    async def close(self) -> None:
        """End the connection and the task. Calls on their way raise; a later call connects anew."""
        if self._inherited:
            return
        task, self._task = self._task, None
        release(self._conversation.give_up("this client was disconnected"))
        self._connection.changed.notify_all()
        if task is not None:
            self._before = task
            task.close()
            await task.join()

    def _start(self) -> AsyncLinkTask:
        self.check_process()
        if self._task is None:
            self._task = AsyncLinkTask(self._connection, self._before, self._failed)
            self._before, self._opened = None, True
        return self._task

    def _failed(self, task: AsyncLinkTask) -> None:
        """A task has ended by a fault of ours, unless it was closed."""
        if self._task is task:
            self._task = None
            self._connection.changed.notify_all()

    # Sending and asking

    async def publish(
        self,
        form: PublishForm,
        bodies: Sequence[bytes],
        waiter: AsyncAnswers,
        deadline: float,
        check: Callable[[], None] = lambda: None,
        codec: str | None = None,
    ) -> UnackedBatch:
        """Send the bodies; `waiter.release()` is called when all are answered. Waits for connection and room.

        `codec`: what they are compressed with, in place of the one of the conversation.
        Raises BrokerUnavailable, RequestTimedOut, or what `check` raises when the turn has come; nothing was sent
        then, nor if cancelled.
        """

        def compose() -> tuple[UnackedBatch, Frames]:
            check()
            batch = self._conversation.publish(form, bodies, waiter, codec)
            return batch, self._conversation.to_send(batch)

        return await self.transmit(compose, deadline)

    def abandon(self, batch: UnackedBatch) -> None:
        """Stop waiting for a batch: it is not sent again, and no answer reaches it any more."""
        self._conversation.abandon(batch)

    async def post(self, compose: Callable[[], bytes]) -> None:
        """Send what compose() returns, which no caller waits for; without a connection it is not even called."""
        connection = self._connection
        async with connection.sending:
            if connection.stream is not None and self.up and (data := compose()):
                await connection.write(connection.stream, data)

    async def ask(self, compose: Callable[[], tuple[int, bytes]], deadline: float) -> Frame:
        """Send a request and return its reply. Raises BrokerUnavailable, RequestTimedOut, ConnectionLost."""
        return await self.answer(await self.begin(compose, deadline), deadline)

    async def begin(self, compose: Callable[[], tuple[int, bytes]], deadline: float) -> AsyncPendingCall:
        """Send a request, whose reply answer() returns; several may be on their way. Raises as ask()."""
        call = AsyncPendingCall()

        def compose_call() -> tuple[AsyncPendingCall, bytes]:
            call.number, data = compose()
            self._connection.calls[call.number] = call
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
            raise self._connection.trouble.unanswered()
        if isinstance(call.answer, QBError):
            raise call.answer
        return call.answer

    def forget(self, call: AsyncPendingCall) -> None:
        """Do not wait for the reply to a request that was begun."""
        self._connection.calls.pop(call.number, None)

    async def wait(self, waiter: AsyncAnswers, deadline: float) -> bool:
        """Return True when the waiter is released, False at the deadline."""
        return await waiter.take(deadline - now())

    def attended(self) -> AbstractContextManager[None]:
        """For callers that wait for many answers: the link's task reads all the while anyway."""
        return nullcontext()

    async def transmit(self, compose: Callable[[], tuple[T, Frames]], deadline: float) -> T:
        """Compose and write in one turn, so that bytes leave in the order of their numbers.

        Waits for connection and room. Raises BrokerUnavailable, RequestTimedOut, or what `compose` raises when the turn
        has come; nothing was sent then.
        """
        self.check_process()  # before the first wait: a child must not turn the parent's loop
        connection = self._connection
        while True:
            if connection.gathers and self.up and self._conversation.has_room:
                result, data = compose()
                connection.add(data)
                return result
            async with connection.sending:
                if connection.stream is not None and self.up and self._conversation.has_room:
                    gather = connection.expects_company
                    result, data = compose()
                    await (connection.write_gathered if gather else connection.write)(connection.stream, data)
                    return result
            await self._wait_until_ready(deadline)

    async def _wait_until_ready(self, deadline: float) -> None:
        trouble = self._connection.trouble
        ready = await self._wait_for(lambda: self.up and self._conversation.has_room, deadline)
        if not self.up:
            raise trouble.unavailable()
        if not ready:
            raise trouble.stalled()

    async def _wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait, with the task at work. Raises ConnectionLost if the link is closed."""
        task = self._start()
        await self._wait_and_say(lambda: condition() or self._task is not task, deadline)
        if self._task is not task:
            raise ConnectionLost("this client was disconnected by another task")
        return condition()

    async def _wait_and_say(self, condition: Callable[[], bool], deadline: float) -> None:
        """Wait, and log what for if there is no connection after a second."""
        changed, seconds = self._connection.changed, deadline - now()
        if not await changed.wait_for(condition, min(seconds, SILENT_FOR)) and seconds > SILENT_FOR:
            self._connection.trouble.waited()
            await changed.wait_for(condition, deadline - now())
