"""One subscription that a blocking client has joined.

The link's thread files what arrives, threads of a crew call the handler, the client's ticker looks what is due.
Locks are taken in this order: those of the link, then the subscriber's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic
from types import TracebackType

from qb.clients.blocking.handler_calls import handle, reason_of
from qb.clients.blocking.handler_pool import HandlerPool
from qb.clients.blocking.link import BlockingLink
from qb.clients.consuming.desired_membership import DesiredMembership, JoinPlan
from qb.clients.consuming.inbox import Inbox, MessageBatch
from qb.clients.protocol.client_errors import QBError, RequestTimedOut
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.forking import call_in_child
from qb.clients.protocol.message import Message
from qb.core.wire.frames import Frame

log = logging.getLogger("qb.client")

_here = threading.local()  # .subscriber: whose handler this thread is running


def handler_is_running_for() -> Subscriber | None:
    """Return whose handler has called."""
    return getattr(_here, "subscriber", None)


class Subscriber:
    """A subscription that this client has joined, and joins again after every lost connection.

    It ends when unsubscribe() is called or the client disconnects; or by itself, and then `error` says why. Leaving a
    `with` block over it unsubscribes. In a child of os.fork() it is the parent's: its use raises UsedAfterFork,
    unsubscribe() does nothing.
    """

    def __init__(
        self, plan: JoinPlan, link: BlockingLink, conversation: Conversation, crew: HandlerPool, patience: float
    ) -> None:
        self.subscription_id = plan.subscription_id
        self.on_end: Callable[[], None] = lambda: None  # called once, when it has left
        self._plan, self._link, self._conversation, self._crew = plan, link, conversation, crew
        self._patience = patience
        self._changed = threading.Condition(threading.Lock())  # guards everything below
        self._membership = DesiredMembership(plan, self)
        self._busy = 0  # handlers that are running
        self._leaver: threading.Thread | None = None
        self._ended = threading.Event()
        call_in_child(self, Subscriber._disown)

    def _disown(self) -> None:
        """In a child of fork(): handle nothing more; only a handler that forked may still be running."""
        self._changed = threading.Condition(threading.Lock())
        self._membership.stop()
        self._membership.lost()

    # What callers do

    @property
    def error(self) -> BaseException | None:
        """Why it has ended by itself, such as SubscriptionRemoved."""
        return self._membership.error

    def wait(self, timeout: float | None = None) -> bool:
        """Return True when it has ended, False after `timeout` seconds. Raises `error` if it ended by itself."""
        self._link.check_process()
        if not self._ended.wait(timeout):
            return False
        if self.error is not None:
            raise self.error
        return True

    def unsubscribe(self, timeout: float | None = None) -> None:
        """Leave: finish what is in hand, for up to `timeout` seconds (the client's by default), hand back the rest.

        Returns when the broker knows. Called by a handler of this subscription it returns at once, and the rest
        happens when that handler has returned.
        """
        self.leave_soon(timeout)
        if handler_is_running_for() is not self and not self._link.inherited:
            self._ended.wait()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.unsubscribe()

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
        self._membership.check_manual()
        self._link.check_process()
        with self._changed:
            inbox = self._membership.inbox
            if inbox is None:
                return
            change(inbox)
            speak, hands = inbox.urgent or inbox.full or not self._busy, inbox.freed
        if speak:
            self.send()
        if hands:
            self._crew.call(self, hands)

    # What the crew does

    def work(self) -> bool:
        """Handle a portion; False if there is none."""
        portion = self._take()
        if portion is None:
            return False
        _here.subscriber = self
        try:
            self._handle(portion)
        finally:
            _here.subscriber = None
            with self._changed:
                self._busy -= 1
                hands = portion.inbox.call_back()
                self._changed.notify_all()
        if hands:
            self._crew.call(self, hands)
        return True

    def _take(self) -> MessageBatch | None:
        """Return what to handle, with everything said that has to be said first."""
        with self._changed:
            inbox = self._membership.inbox
            if inbox is None:
                return None
            portion = inbox.take()
            self._busy += portion is not None
            speak = inbox.urgent or (portion is None and inbox.has_words)
        if speak:
            self.send()
        return portion

    def _handle(self, portion: MessageBatch) -> None:
        inbox, more = portion.inbox, True
        while more:
            error = handle(portion, self._plan.handler, self._plan.manner.batches)
            with self._changed:
                if error is None:
                    inbox.returned(portion)
                more = error is not None and inbox.raised(portion, reason_of(error))
                full = inbox.full
            if error is not None:
                self._note(error)
            if full:
                self.send()

    def _note(self, error: BaseException) -> None:
        log.warning("a handler of subscription %s failed: %s", self.subscription_id, reason_of(error), exc_info=error)
        if not isinstance(error, Exception):  # such as SystemExit: whoever waits for us shall get it
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End, because of this."""
        with self._changed:
            self._membership.end(error)
        self.leave_soon()

    def speak(self) -> None:
        """Send words that cannot wait."""
        with self._changed:
            urgent = self._membership.inbox is not None and self._membership.inbox.urgent
        if urgent:
            self.send()

    def send(self) -> None:
        """Send whatever there is to send."""
        self._link.post(self.compose)

    def compose(self) -> bytes:
        """Return whatever there is to send; called with the link's locks held."""
        with self._changed:
            asked = self._membership.ask(self._conversation, monotonic())
            return asked or self._membership.words(self._conversation)

    # What the link's thread does

    def answered(self, frame: Frame) -> None:
        """The broker has answered a request; perhaps one of ours."""
        with self._changed:
            self._membership.answered(frame, monotonic())
            self._changed.notify_all()
        if self._membership.error is not None:
            self.leave_soon()

    def delivered(self, frame: Frame) -> None:
        """Messages have come."""
        with self._changed:
            count = self._membership.delivered(frame)
        self._crew.call(self, count)

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

    # What the ticker does

    def tick(self, now: float) -> float | None:
        """Send what is due; returns after how many seconds to look again, if at all."""
        with self._changed:
            speak = self._membership.tick(now)
        if speak:
            self.send()
        with self._changed:
            return self._membership.pause(now)

    # Coming and going

    @property
    def leaving(self) -> bool:
        """Has it begun to leave?"""
        return self._leaver is not None

    def wait_until_ended(self) -> None:
        """Return when it has been left, whatever the reason."""
        self._ended.wait()

    def wait_until_joined(self, deadline: float) -> None:
        """Raises why the broker does not let us in, or RequestTimedOut."""
        membership = self._membership
        with self._changed:
            self._changed.wait_for(lambda: membership.joined or membership.over, max(deadline - monotonic(), 0))
            if membership.error is not None and not membership.joined:
                raise membership.error
            if not membership.joined:
                raise RequestTimedOut(f"subscription {self.subscription_id!r} could not be joined in time")

    def leave_soon(self, timeout: float | None = None) -> None:
        """Begin to leave, in a thread of its own."""
        if self._link.inherited:
            return
        with self._changed:
            self._membership.stop()
            if self._leaver is None:
                patience = self._patience if timeout is None else timeout
                name = f"qb leaves {self.subscription_id}"
                self._leaver = threading.Thread(target=self._leave, args=(patience,), name=name, daemon=True)
                self._leaver.start()

    def _leave(self, patience: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, patience)
        self._link.post(self._compose_farewell)
        with self._changed:
            self._changed.wait_for(lambda: self._membership.out, self._patience)
            self._membership.lost()  # what is handled late is told to nobody
        try:
            self.on_end()
        except QBError as error:
            log.warning("after leaving subscription %s: %s", self.subscription_id, error)
        finally:
            self._ended.set()

    def _compose_farewell(self) -> bytes:
        with self._changed:
            return self._membership.words(self._conversation) + self._membership.leave(self._conversation)
