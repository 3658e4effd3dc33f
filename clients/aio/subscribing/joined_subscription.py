"""One subscription that a client has joined.

The link hands in what arrives, a handler pool calls the handler, the client's ticker looks what is due. Guards are
entered in this order: those of the link, then the subscriber's own, which is therefore never held while the link is
called.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from math import inf

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.link import AsyncLink
from qb.clients.aio.subscribing.handler_calls import AsyncHandlerCalls
from qb.clients.aio.subscribing.handler_pool import AsyncMessageSink
from qb.clients.aio.subscribing.joined_base import AsyncJoinedBase, wait_until_left
from qb.clients.aio.waiting import AsyncGuard, now, shielded
from qb.clients.consuming.desired_membership import DesiredMembership, JoinPlan
from qb.clients.consuming.handling import reason_of
from qb.clients.consuming.inbox import MessageBatch
from qb.clients.protocol.client_errors import QBError, RequestTimedOut
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.forking import call_in_child
from qb.clients.protocol.message import Message
from qb.core.wire.frames import Frame

log = logging.getLogger("qb.client")

_here: ContextVar[AsyncJoinedSubscription | None] = ContextVar(
    "qb_subscriber", default=None
)  # whose handler is running


def handler_is_running_for() -> AsyncJoinedSubscription | None:
    """Return the subscription whose handler is the caller, if any."""
    return _here.get()


class AsyncJoinedSubscription(AsyncJoinedBase):
    """Keeps one subscription joined, and joins it again after every lost connection, until it is left."""

    def __init__(
        self,
        plan: JoinPlan,
        link: AsyncLink,
        conversation: Conversation,
        background: AsyncBackground,
        sink: AsyncMessageSink,
        on_end: Callable[[], Awaitable[None]],
        patience: float,
    ) -> None:
        super().__init__()
        self.subscription_id = plan.subscription_id
        self._link, self._conversation, self._background = link, conversation, background
        self._sink, self._patience = sink, patience
        self._on_end = on_end  # called once, when it has left
        self._calls = AsyncHandlerCalls(plan)
        self._changed = AsyncGuard()  # guards everything below
        self._membership = DesiredMembership(plan, self)
        self._busy = 0  # portions that were taken, and whose handlers have not returned
        self._leaving = self._ended = False
        call_in_child(self, AsyncJoinedSubscription._disown)

    def _disown(self) -> None:
        """In a child of fork(): handle nothing more; only a handler that forked may still be running."""
        self._changed = AsyncGuard()
        self._membership.stop()
        self._membership.lost()

    # What callers do

    @property
    def error(self) -> BaseException | None:
        """Why it has ended by itself."""
        return self._membership.error

    @property
    def has_ended(self) -> bool:
        """Has it ended, by itself or because it was left?"""
        return self._ended

    async def wait(self, timeout: float | None) -> bool:
        """Return True when it has ended, False after `timeout` seconds. Raises `error` if it ended by itself."""
        self._link.check_process()
        if not await self._wait_for(lambda: self._ended, inf if timeout is None else timeout):
            return False
        if self.error is not None:
            raise self.error
        return True

    async def leave(self, timeout: float | None = None) -> None:
        """Leave, and return when the broker knows; a handler of this subscription does not wait for that."""
        if self._link.inherited:
            return
        self.leave_soon(timeout)
        if handler_is_running_for() is not self:
            await wait_until_left([self])

    # What messages do

    def ack(self, message: Message) -> None:
        """For Message.ack()."""
        self._settle_manually(lambda inbox: inbox.ack(message))

    def nack(self, message: Message, delay: float | None, reason: str) -> None:
        """For Message.nack()."""
        self._settle_manually(lambda inbox: inbox.nack(message, delay, reason))

    def extend(self, message: Message, seconds: float) -> None:
        """For Message.extend()."""
        self._settle_manually(lambda inbox: inbox.extend(message, seconds))

    # What the handler pool does

    async def work(self) -> bool:
        """Handle a portion; False if there is none."""
        portion = await self.take()
        if portion is None:
            return False
        _here.set(self)
        try:
            await self._handle(portion)
        finally:
            _here.set(None)
            self.put_down(portion)
        return True

    async def take(self) -> MessageBatch | None:
        """Return what to handle, after sending what must be sent first; put_down() follows."""
        with self._changed:
            inbox = self._membership.inbox
            if inbox is None:
                return None
            portion = inbox.take()
            self._busy += portion is not None
            must_send = inbox.urgent or (portion is None and inbox.has_unsent)
        if must_send:
            with shielded():  # what was taken must reach its handler
                await self.send()
        return portion

    def put_down(self, portion: MessageBatch) -> None:
        """Its handler has returned."""
        with self._changed:
            self._busy -= 1
            workers = portion.inbox.call_back()
            self._changed.notify_all()
        if workers:
            self._call(workers)

    async def _handle(self, portion: MessageBatch) -> None:
        more = True
        while more:
            began = now()
            error = await self._calls.handle(portion)
            more, full = self.handled(portion, error, now() - began)
            if error is not None:
                self._note(error)
            if full:
                await self.send()

    def handled(self, portion: MessageBatch, error: BaseException | None, seconds: float = inf) -> tuple[bool, bool]:
        """The handler has returned or raised, after so long.

        Returns whether there is more in the portion, and whether to send what is unsent.
        """
        inbox = portion.inbox
        with self._changed:
            if error is None:
                inbox.returned(portion, seconds)
            return error is not None and inbox.raised(portion, reason_of(error)), inbox.full

    def _note(self, error: BaseException) -> None:
        log.warning("a handler of subscription %s failed: %s", self.subscription_id, reason_of(error), exc_info=error)
        if not isinstance(error, Exception):  # such as SystemExit: it is raised by wait()
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End, because of this."""
        with self._changed:
            self._membership.end(error)
        self.leave_soon()

    async def send_urgent(self) -> None:
        """Send what cannot wait."""
        with self._changed:
            urgent = self._membership.inbox is not None and self._membership.inbox.urgent
        if urgent:
            await self.send()

    async def send(self) -> None:
        """Send what there is to send."""
        await self._link.post(self.compose)

    def compose(self) -> bytes:
        """Return what there is to send; called with the link's guards held."""
        with self._changed:
            asked = self._membership.ask(self._conversation, now())
            return asked or self._membership.settle(self._conversation)

    # What the link does

    def answered(self, frame: Frame) -> None:
        """The broker has answered a request; perhaps one of ours."""
        with self._changed:
            self._membership.answered(frame, now())
            self._changed.notify_all()
        if self._membership.error is not None:
            self.leave_soon()

    def delivered(self, frame: Frame) -> None:
        """Messages have come."""
        with self._changed:
            count = self._membership.delivered(frame)
        self._call(count)

    def removed(self, reason: str) -> None:
        """The subscription is no more."""
        with self._changed:
            self._membership.removed(reason)
        self.leave_soon()

    def lost(self) -> None:
        """The connection is gone."""
        with self._changed:
            self._membership.lost()
            self._changed.notify_all()

    def _call(self, workers: int) -> None:
        self._sink.call(self, workers)

    # What the ticker does

    async def tick(self, time: float) -> float | None:
        """Send what is due; returns after how many seconds to look again, if at all."""
        with self._changed:
            must_send = self._membership.tick(time)
        if must_send:
            await self.send()
        with self._changed:
            return self._membership.pause(time)

    # Coming and going

    @property
    def over(self) -> bool:
        """Will no more messages come?"""
        return self._membership.over

    @property
    def leaving(self) -> bool:
        """Has it begun to leave?"""
        return self._leaving

    def check_process(self) -> None:
        """Raise UsedAfterFork in a child of fork()."""
        self._link.check_process()

    async def wait_until_ended(self) -> None:
        """Return when it has been left, whatever the reason."""
        await self._wait_for(lambda: self._ended)

    async def wait_until_joined(self, deadline: float) -> None:
        """Raises why the broker does not let us in, or RequestTimedOut."""
        membership = self._membership
        await self._wait_for(lambda: membership.joined or membership.over, deadline - now())
        if membership.error is not None and not membership.joined:
            raise membership.error
        if not membership.joined:
            raise RequestTimedOut(f"subscription {self.subscription_id!r} could not be joined in time")

    def cancel_handlers(self) -> None:
        """What is in hand will be handed back."""
        self._calls.cancel()

    def leave_soon(self, timeout: float | None = None) -> None:
        """Begin to leave, in the background."""
        if self._link.inherited:
            return
        with self._changed:
            self._membership.stop()
            begun, self._leaving = self._leaving, True
        self._sink.stop()
        if not begun:
            patience = self._patience if timeout is None else timeout
            self._background.start(f"qb leaves {self.subscription_id}", self._leave, patience)

    async def _leave(self, patience: float) -> None:
        try:
            with shielded():  # it leaves in good order in any case
                await self._wait_for(lambda: not self._busy, patience)
                self.cancel_handlers()
                await self._link.post(self._compose_farewell)
                await self._wait_for(lambda: self._membership.out, self._patience)
                with self._changed:
                    self._membership.lost()  # what is handled late is not reported any more
                await self._on_end()
        except QBError as error:
            log.warning("after leaving subscription %s: %s", self.subscription_id, error)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _compose_farewell(self) -> bytes:
        with self._changed:
            return self._membership.settle(self._conversation) + self._membership.leave(self._conversation)

    async def _wait_for(self, condition: Callable[[], object], seconds: float = inf) -> bool:
        with self._changed:
            return await self._changed.wait_for(condition, seconds)
