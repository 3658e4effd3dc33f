"""All subscriptions that a blocking client has joined."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from qb.clients.blocking.handler_pool import HandlerPool
from qb.clients.blocking.link import BlockingLink
from qb.clients.blocking.subscriber import Subscriber, handler_is_running_for
from qb.clients.blocking.ticker import Ticker
from qb.clients.consuming.desired_membership import JoinPlan, joined_already, not_joined
from qb.clients.protocol.conversation import Conversation
from qb.core.wire.frames import Frame, MessageType


class JoinedSubscribers:
    """Tells subscribers what the link has for them, and looks after them while they hold messages.

    The handlers of all subscriptions run one at a time, in one thread; one with a concurrency of its own has its own.
    """

    def __init__(self, link: BlockingLink, conversation: Conversation, patience: float) -> None:
        self._link, self._conversation, self._patience = link, conversation, patience
        self._lock = threading.Lock()
        self._subscribers: dict[str, Subscriber] = {}
        self._crew = HandlerPool(1, "qb handlers")
        self._ticker: Ticker | None = None  # while there are subscribers

    # What callers do

    def join(self, plan: JoinPlan, on_end: Callable[[], None] = lambda: None) -> Subscriber:
        """Join; `on_end` is called after it was left. Raises BrokerUnavailable, RequestTimedOut, RequestRefused."""
        self._wait_until_left(plan.subscription_id)
        deadline = monotonic() + self._patience
        subscriber = self._register(plan, on_end)
        try:
            self._link.open(deadline, patient=True)
            subscriber.send()
            subscriber.wait_until_joined(deadline)
        except BaseException:
            subscriber.unsubscribe(timeout=0)
            raise
        return subscriber

    def find(self, subscription_id: str) -> Subscriber:
        """Return who has joined a subscription. Raises NotJoined."""
        try:
            return self._subscribers[subscription_id]
        except KeyError:
            raise not_joined(subscription_id) from None

    def close(self) -> None:
        """Leave everything."""
        subscribers = list(self._subscribers.values())
        for subscriber in subscribers:
            subscriber.leave_soon()
        for subscriber in subscribers:
            subscriber.wait_until_ended()

    @property
    def runs_the_caller(self) -> bool:
        """Is the caller a handler of ours?"""
        return handler_is_running_for() in self._subscribers.values()

    def _wait_until_left(self, subscription_id: str) -> None:
        """Let a subscriber that is leaving finish."""
        known = self._subscribers.get(subscription_id)
        if known is not None and known.leaving and known is not handler_is_running_for():
            known.wait_until_ended()

    def _register(self, plan: JoinPlan, on_end: Callable[[], None]) -> Subscriber:
        with self._lock:
            if plan.subscription_id in self._subscribers:
                raise joined_already(plan.subscription_id)
            alone = plan.manner.concurrency > 1
            crew = (
                HandlerPool(plan.manner.concurrency, f"qb handlers of {plan.subscription_id}") if alone else self._crew
            )
            subscriber = Subscriber(plan, self._link, self._conversation, crew, self._patience)
            subscriber.on_end = lambda: self._ended(subscriber, crew, on_end)
            self._subscribers[plan.subscription_id] = subscriber
            self._ticker = self._ticker or Ticker(self._tick)
            return subscriber

    def _ended(self, subscriber: Subscriber, crew: HandlerPool, on_end: Callable[[], None]) -> None:
        with self._lock:
            del self._subscribers[subscriber.subscription_id]
            if crew is not self._crew:
                crew.dismiss()
            if not self._subscribers:
                self._rest()
        on_end()

    def _rest(self) -> None:
        """End the threads that all subscribers share."""
        self._crew.dismiss()
        self._crew = HandlerPool(1, "qb handlers")
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None

    # What the link's thread does

    def welcomed(self) -> list[bytes]:
        """Ask to be let in again."""
        return [subscriber.compose() for subscriber in self._each()]

    def pushed(self, frame: Frame) -> None:
        """Hand a frame to the subscriber that it is for."""
        if frame.type == MessageType.ACK:
            for subscriber in self._each():
                subscriber.answered(frame)
        elif addressee := self._subscribers.get(frame.properties.get("subscription_id", "")):
            if frame.type == MessageType.DELIVER:
                addressee.delivered(frame)
            elif frame.type == MessageType.UNSUBSCRIBE:
                addressee.removed(frame.properties.get("reason", "no reason given"))
        if (ticker := self._ticker) is not None:
            ticker.wake()

    def lost(self) -> None:
        """Tell everybody that the connection is gone."""
        for subscriber in self._each():
            subscriber.lost()

    def _each(self) -> list[Subscriber]:
        with self._lock:
            return list(self._subscribers.values())

    # What the ticker does

    def _tick(self, now: float) -> float | None:
        pauses = [subscriber.tick(now) for subscriber in self._each()]
        return min((pause for pause in pauses if pause is not None), default=None)
