"""One subscription that a trio client has joined.

The same shape as qb.clients.blocking.subscriber, with tasks for threads.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol

import trio

from qb.clients.aio.handler_calls import handle_in_task, handle_in_thread, is_asynchronous
from qb.clients.aio.handler_pool import AsyncHandlerWork
from qb.clients.aio.link import AsyncLink
from qb.clients.blocking.handler_calls import reason_of
from qb.clients.consuming.desired_membership import DesiredMembership, JoinPlan
from qb.clients.consuming.inbox import Inbox, MessageBatch
from qb.clients.protocol.client_errors import QBError, RequestTimedOut
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.message import Message
from qb.core.wire.frames import Frame

log = logging.getLogger("qb.client")

FAREWELL = 1.0  # seconds that a cancelled task grants its subscribers for leaving in good order

_here: ContextVar[AsyncSubscriber | None] = ContextVar("qb_subscriber", default=None)  # whose handler is running


def handler_is_running_for() -> AsyncSubscriber | None:
    """Return whose handler has called."""
    return _here.get()


class ArrivalBell(Protocol):
    """Who is told that there are messages."""

    def call(self, work: AsyncHandlerWork, hands: int) -> None: ...


async def _nothing() -> None:
    pass


class AsyncSubscriber:
    """As Subscriber, on trio. Leaving an `async with` block over it unsubscribes."""

    def __init__(
        self, plan: JoinPlan, link: AsyncLink, conversation: Conversation, bell: ArrivalBell, patience: float
    ) -> None:
        self.subscription_id = plan.subscription_id
        self.check_process = link.check_process  # raises UsedAfterFork in a child of fork()
        self.on_end: Callable[[], Awaitable[None]] = _nothing  # called once, when it has left
        self.membership = DesiredMembership(plan, self)
        self.leaving = False
        self._plan, self._link, self._conversation, self._bell = plan, link, conversation, bell
        self._patience = patience
        self._call = handle_in_task if is_asynchronous(plan.handler) else handle_in_thread
        self._running: set[trio.CancelScope] = set()  # one for each handler
        self._changed = trio.Event()
        self._ended = trio.Event()
        self._sending_soon = False
        self._token = trio.lowlevel.current_trio_token()

    # What callers do

    @property
    def error(self) -> BaseException | None:
        """Why it has ended by itself, such as SubscriptionRemoved."""
        return self.membership.error

    async def wait(self) -> None:
        """Return when it has ended. Raises `error` if it ended by itself."""
        self.check_process()
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    async def unsubscribe(self, timeout: float | None = None) -> None:
        """Leave: finish what is in hand, for up to `timeout` seconds (the client's by default), hand back the rest.

        A handler that takes longer is cancelled, as is one that is running when this call is cancelled. Returns when
        the broker knows. Called by a handler of this subscription it returns at once, and the rest happens when that
        handler has returned.
        """
        if self._link.inherited:
            return
        self.leave_soon(timeout)
        if handler_is_running_for() is not self:
            await wait_until_left([self])

    async def __aenter__(self) -> AsyncSubscriber:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.unsubscribe()

    # What messages do

    def ack(self, message: Message) -> None:
        """For Message.ack()."""
        self._by_hand(lambda inbox: inbox.ack(message))

    def nack(self, message: Message, delay: float | None, reason: str) -> None:
        """For Message.nack()."""
        self._by_hand(lambda inbox: inbox.nack(message, delay, reason))

    def extend(self, message: Message, seconds: float) -> None:
        """For Message.extend()."""
        self._by_hand(lambda inbox: inbox.extend(message, seconds))

    def _by_hand(self, change: Callable[[Inbox], None]) -> None:
        self.membership.check_manual()
        self.check_process()
        if trio.lowlevel.in_trio_task():
            self._settle(change)
        else:  # a thread of a handler that is not async
            self._token.run_sync_soon(self._settle, change)

    def _settle(self, change: Callable[[Inbox], None]) -> None:
        inbox = self.membership.inbox
        if inbox is None:
            return
        change(inbox)
        if not self._sending_soon:
            self._sending_soon = True
            trio.lowlevel.spawn_system_task(self.send)
        if inbox.freed:
            self._bell.call(self, inbox.freed)

    # What the crew does

    async def work(self) -> bool:
        """Handle a portion; False if there is none."""
        portion = await self.take()
        if portion is None:
            return False
        _here.set(self)
        with trio.CancelScope() as scope:
            self._running.add(scope)
            try:
                await self._handle(portion)
                await trio.lowlevel.checkpoint()
            finally:
                _here.set(None)
                self._running.discard(scope)
                self._change()
        if hands := portion.inbox.call_back():
            self._bell.call(self, hands)
        return True

    async def take(self) -> MessageBatch | None:
        """Return what to handle, with everything said that has to be said first."""
        inbox = self.membership.inbox
        if inbox is None:
            return None
        portion = inbox.take()
        if inbox.urgent or (portion is None and inbox.has_words):
            with trio.CancelScope(shield=True):  # what was taken must reach its handler
                await self.send()
        return portion

    async def _handle(self, portion: MessageBatch) -> None:
        inbox, more = portion.inbox, True
        while more:
            try:
                error = await self._call(portion, self._plan.handler, self._plan.manner.batches)
            except BaseException:  # cancelled: what is done is done
                inbox.returned(portion)
                raise
            if error is None:
                inbox.returned(portion)
            more = error is not None and inbox.raised(portion, reason_of(error))
            if error is not None:
                self._note(error)
            if inbox.full:
                await self.send()

    def _note(self, error: BaseException) -> None:
        log.warning("a handler of subscription %s failed: %s", self.subscription_id, reason_of(error), exc_info=error)
        if not isinstance(error, Exception):  # such as SystemExit: whoever waits for us shall get it
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End, because of this."""
        self.membership.end(error)
        self.leave_soon()

    async def speak(self) -> None:
        """Send words that cannot wait."""
        if self.membership.inbox is not None and self.membership.inbox.urgent:
            await self.send()

    async def send(self) -> None:
        """Send whatever there is to send."""
        self._sending_soon = False
        await self._link.post(self.compose)

    def compose(self) -> bytes:
        """Return whatever there is to send."""
        asked = self.membership.ask(self._conversation, trio.current_time())
        return asked or self.membership.words(self._conversation)

    # What the link's task does

    def answered(self, frame: Frame) -> None:
        """The broker has answered a request; perhaps one of ours."""
        self.membership.answered(frame, trio.current_time())
        self._change()
        if self.membership.error is not None:
            self.leave_soon()

    def delivered(self, frame: Frame) -> None:
        """Messages have come."""
        self._bell.call(self, self.membership.delivered(frame))

    def removed(self, reason: str) -> None:
        """The subscription is no more."""
        self.membership.removed(reason)
        self.leave_soon()

    def lost(self) -> None:
        """The connection is gone."""
        self.membership.lost()
        self._change()

    # What the ticker does

    async def tick(self, now: float) -> None:
        """Send what is due."""
        if self.membership.tick(now):
            await self.send()

    # Coming and going

    async def wait_until_ended(self) -> None:
        """Return when it has been left, whatever the reason."""
        await self._ended.wait()

    def abandon(self) -> None:
        """Leave, from any thread, even if the trio run is over."""
        if self.leaving or self._link.inherited:
            return
        if trio.lowlevel.in_trio_task() and trio.lowlevel.current_trio_token() is self._token:
            self.leave_soon()
            return
        try:
            self._token.run_sync_soon(self.leave_soon)
        except trio.RunFinishedError:
            pass

    async def wait_until_joined(self, deadline: float) -> None:
        """Raises why the broker does not let us in, or RequestTimedOut."""
        membership = self.membership
        await self._wait_for(lambda: membership.joined or membership.over, deadline - trio.current_time())
        if membership.error is not None and not membership.joined:
            raise membership.error
        if not membership.joined:
            raise RequestTimedOut(f"subscription {self.subscription_id!r} could not be joined in time")

    def cancel_handlers(self) -> None:
        """What is in hand will be handed back."""
        for scope in self._running:
            scope.cancel()

    def leave_soon(self, timeout: float | None = None) -> None:
        """Begin to leave, in a task of its own."""
        self.membership.stop()
        self._bell.call(self, 1)  # whoever waits for messages shall see that none will come
        if not self.leaving:
            self.leaving = True
            trio.lowlevel.spawn_system_task(self._leave, self._patience if timeout is None else timeout)

    async def _leave(self, patience: float) -> None:
        try:
            await self._wait_for(lambda: not self._running, patience)
            self.cancel_handlers()
            await self._link.post(self._compose_farewell)
            await self._wait_for(lambda: self.membership.out, self._patience)
            self.membership.lost()  # what is handled late is told to nobody
            await self.on_end()
        except QBError as error:
            log.warning("after leaving subscription %s: %s", self.subscription_id, error)
        finally:
            self._ended.set()

    def _compose_farewell(self) -> bytes:
        return self.membership.words(self._conversation) + self.membership.leave(self._conversation)

    async def _wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        with trio.move_on_after(max(seconds, 0)):
            while not condition():
                await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


async def wait_until_left(subscribers: Sequence[AsyncSubscriber]) -> None:
    """Return when all these, which have begun to leave, have left. If cancelled, give them a moment to hurry."""
    try:
        for subscriber in subscribers:
            await subscriber.wait_until_ended()
    except trio.Cancelled:
        with trio.move_on_after(FAREWELL, shield=True):
            for subscriber in subscribers:
                subscriber.cancel_handlers()
                await subscriber.wait_until_ended()
        raise
