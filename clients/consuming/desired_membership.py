"""Desired membership of a subscription, kept across reconnects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

from qb.clients.consuming.inbox import HandlingOptions, Inbox, JoinTerms
from qb.clients.protocol.client_errors import BadRequest, NotJoined, QBError, SubscriptionRemoved, UnknownSubscription
from qb.clients.protocol.conversation import Conversation, answer_of
from qb.clients.protocol.message import DeliveredFrames, Message, Settler
from qb.clients.protocol.reconnecting import ReconnectBackoff
from qb.core.wire.errors import Code, PeerMisbehaved
from qb.core.wire.frames import Frame, MessageType

TICK = 0.02  # seconds between two looks at what is done, while anything is held


class JoinPlan(NamedTuple):
    """What a caller wants: which subscription, which handler, and how."""

    subscription_id: str
    handler: Callable[[Any], Any]
    manner: HandlingOptions
    window: int | None = None


def plan(
    subscription_id: str,
    handler: Callable[[Message], Any] | None,
    batch_handler: Callable[[list[Message]], Any] | None,
    ack: str,
    concurrency: int,
    window: int | None,
) -> JoinPlan:
    """Return a plan that makes sense. Raises TypeError, ValueError."""
    chosen = handler if batch_handler is None else batch_handler
    if chosen is None or (handler is not None and batch_handler is not None):
        raise TypeError("give either handler or batch_handler")
    if not callable(chosen):
        raise TypeError(f"a handler is a function of one message, not {type(chosen).__name__}")
    if ack not in ("auto", "manual"):
        raise ValueError(f"ack must be 'auto' or 'manual', not {ack!r}")
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    return JoinPlan(
        subscription_id, chosen, HandlingOptions(concurrency, ack == "manual", batch_handler is not None), window
    )


class JoinedSettler:
    """Settles messages in the subscription that they came from, as long as that exists.

    The garbage collector does not walk messages. So those that a program keeps must not keep the subscription, whose
    handler may be a part of what keeps them.
    """

    def __init__(self, joined: Settler) -> None:
        self._joined = ref(joined)

    def ack(self, message: Message) -> None:
        if joined := self._joined():
            joined.ack(message)

    def nack(self, message: Message, delay: float | None, reason: str) -> None:
        if joined := self._joined():
            joined.nack(message, delay, reason)

    def extend(self, message: Message, seconds: float) -> None:
        if joined := self._joined():
            joined.extend(message, seconds)


class DesiredMembership:
    """One subscription of one client. Not safe to share between threads without a lock."""

    def __init__(self, plan: JoinPlan, settler: Settler) -> None:
        self.plan = plan
        self.inbox: Inbox | None = None  # while we are in
        self.joined = False  # have we ever been in?
        self.error: BaseException | None = None  # why it has ended, unless we left
        self.leaving = False
        self._settler = JoinedSettler(settler)
        self._asked: int | None = None  # the number of a SUBSCRIBE on its way
        self._retry_at = 0.0
        self._backoff = ReconnectBackoff()
        self._came = self._goes_on = False  # have messages come since the last tick, or in the time before it?

    @property
    def over(self) -> bool:
        """Will it never be joined again?"""
        return self.leaving or self.error is not None

    def ask(self, conversation: Conversation, now: float) -> bytes:
        """Return the SUBSCRIBE to send on this connection, if it is time for one."""
        if self.over or self.inbox is not None or self._asked is not None or now < self._retry_at:
            return b""
        properties = {"subscription_id": self.plan.subscription_id, "announces": "true"}
        if self.plan.window is not None:
            properties["window"] = str(self.plan.window)
        self._asked, frame = conversation.compose(MessageType.SUBSCRIBE, properties)
        return frame

    def answered(self, frame: Frame, now: float) -> None:
        """An answer has come: if it is ours, we are in, or out for good, or have to ask again later."""
        if frame.sequence_number != self._asked:
            return
        self._asked = None
        if self.leaving:  # it was our UNSUBSCRIBE
            self.lost()
            return
        try:
            answer_of(frame)
            self.inbox = Inbox(_terms(frame), self.plan.manner)
            self.joined = True
            self._backoff.reset()
        except UnknownSubscription as error:
            self.error = SubscriptionRemoved(error.text) if self.joined else error
        except QBError as error:
            if not self.joined:
                self.error = error
            self._retry_at = now + self._backoff.pause()

    def delivered(self, frame: Frame) -> int:
        """Take in a DELIVER; returns how many messages there are more."""
        if self.inbox is None:
            return 0
        delivery = DeliveredFrames(frame, self._settler)
        self.inbox.deliver(delivery)
        self._came = True
        return delivery.count

    def check_manual(self) -> None:
        """Raise RuntimeError if messages are not settled by hand."""
        if not self.plan.manner.manual:
            raise RuntimeError("this subscriber acks by itself; settle messages by hand with ack='manual'")

    def removed(self, reason: str) -> None:
        """The broker has put an end to the subscription."""
        self.end(SubscriptionRemoved(f"subscription {self.plan.subscription_id!r} is no more: {reason}"))
        self.lost()

    def end(self, error: BaseException) -> None:
        """It is over, and this is why; the first reason counts."""
        self.error = self.error or error
        self.stop()

    def stop(self) -> None:
        """Take no more messages, for good."""
        self.leaving = True
        if self.inbox is not None:
            self.inbox.stop()

    def leave(self, conversation: Conversation) -> bytes:
        """Return the UNSUBSCRIBE to send, unless we are out; call stop() before."""
        if self.out:
            return b""
        self._asked, frame = conversation.compose(
            MessageType.UNSUBSCRIBE, {"subscription_id": self.plan.subscription_id}
        )
        return frame

    @property
    def out(self) -> bool:
        """Does the broker not count us in, nor is about to?"""
        return self.inbox is None and self._asked is None

    def lost(self) -> None:
        """The connection is gone, and with it the leases."""
        self._asked, self._retry_at = None, 0.0
        if self.inbox is not None:
            self.inbox.close()
            self.inbox = None

    def settle(self, conversation: Conversation) -> bytes:
        """Return the SETTLEs with all that is unsent, or nothing."""
        frames = b""
        while self.inbox is not None and (body := self.inbox.settle()):
            about = {"subscription_id": self.plan.subscription_id}
            number, frame = conversation.compose(MessageType.SETTLE, about, body)
            self.inbox.sent(number)
            frames += frame
        return frames

    def tick(self, now: float) -> bool:
        """Look what is due; returns whether there is something to send."""
        self._came, self._goes_on = False, self._came
        if self.inbox is not None:
            return self.inbox.tick(now)
        return self._retries and now >= self._retry_at

    def pause(self, now: float) -> float | None:
        """Return after how many seconds to tick again, or None if nothing is to be expected.

        While messages come one after another it is not None, even if each is handled at once: to be called again for
        each of them would take longer than the handling.
        """
        if self.inbox is not None:
            is_busy = self.inbox.held or self._goes_on
            return min(TICK, self.inbox.terms.ack_deadline / 6) if is_busy else None
        return max(self._retry_at - now, TICK) if self._retries else None

    @property
    def _retries(self) -> bool:
        """Were we refused, on this connection, and do we mean to ask again?"""
        return self._retry_at > 0 and self._asked is None and not self.over


def _terms(frame: Frame) -> JoinTerms:
    about = frame.properties
    try:
        return JoinTerms(int(about["window"]), float(about["ack_deadline"]), about["mode"] == "key_shared")
    except (KeyError, ValueError) as error:
        raise PeerMisbehaved(f"the answer to SUBSCRIBE has no proper {error}") from None


def joined_already(subscription_id: str) -> QBError:
    """For a second join of one client."""
    return BadRequest(Code.BAD_REQUEST, f"this client has joined subscription {subscription_id!r} already")


def not_joined(subscription_id: str) -> QBError:
    """For leaving what was not joined."""
    return NotJoined(Code.NOT_JOINED, f"this client has not joined subscription {subscription_id!r}")
