"""All subscriptions that a trio client has joined.

The same shape as qb.clients.blocking.joined, with tasks for threads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from qb.clients.aio.handler_pool import AsyncHandlerPool
from qb.clients.aio.link import AsyncLink
from qb.clients.aio.subscriber import ArrivalBell, AsyncSubscriber, handler_is_running_for, wait_until_left
from qb.clients.consuming.desired_membership import JoinPlan, joined_already, not_joined
from qb.clients.protocol.conversation import Conversation
from qb.core.wire.frames import Frame, MessageType

OnEnd = Callable[[], Awaitable[None]]


class AsyncJoinedSubscribers:
    """Tells subscribers what the link has for them, and looks after them while they hold messages.

    The handlers of all subscriptions run one at a time, in one task; one with a concurrency of its own has its own.
    """

    def __init__(self, link: AsyncLink, conversation: Conversation, patience: float) -> None:
        self._link, self._conversation, self._patience = link, conversation, patience
        self._subscribers: dict[str, AsyncSubscriber] = {}
        self._crew = AsyncHandlerPool(1)
        self._ticking = False

    # What callers do

    async def join(
        self, plan: JoinPlan, bell: ArrivalBell | None = None, on_end: OnEnd | None = None
    ) -> AsyncSubscriber:
        """Join; `on_end` is called after it was left, and `bell` instead of the handler when messages come.

        Raises BrokerUnavailable, RequestTimedOut, RequestRefused.
        """
        await self._wait_until_left(plan.subscription_id)
        deadline = trio.current_time() + self._patience
        subscriber = self._register(plan, bell, on_end)
        try:
            await self._link.open(deadline, patient=True)
            await subscriber.send()
            await subscriber.wait_until_joined(deadline)
        except BaseException:
            subscriber.leave_soon(timeout=0)
            await wait_until_left([subscriber])
            raise
        return subscriber

    def find(self, subscription_id: str) -> AsyncSubscriber:
        """Return who has joined a subscription. Raises NotJoined."""
        try:
            return self._subscribers[subscription_id]
        except KeyError:
            raise not_joined(subscription_id) from None

    async def close(self) -> None:
        """Leave everything."""
        subscribers = list(self._subscribers.values())
        for subscriber in subscribers:
            subscriber.leave_soon()
        await wait_until_left(subscribers)

    @property
    def runs_the_caller(self) -> bool:
        """Is the caller a handler of ours?"""
        return handler_is_running_for() in self._subscribers.values()

    async def _wait_until_left(self, subscription_id: str) -> None:
        """Let a subscriber that is leaving finish."""
        known = self._subscribers.get(subscription_id)
        if known is not None and known.leaving and known is not handler_is_running_for():
            await known.wait_until_ended()

    def _register(self, plan: JoinPlan, bell: ArrivalBell | None, on_end: OnEnd | None) -> AsyncSubscriber:
        if plan.subscription_id in self._subscribers:
            raise joined_already(plan.subscription_id)
        concurrency = plan.manner.concurrency
        bell = bell or (AsyncHandlerPool(concurrency) if concurrency > 1 else self._crew)
        subscriber = AsyncSubscriber(plan, self._link, self._conversation, bell, self._patience)

        async def ended() -> None:
            del self._subscribers[plan.subscription_id]
            if on_end is not None:
                await on_end()

        subscriber.on_end = ended
        self._subscribers[plan.subscription_id] = subscriber
        return subscriber

    # What the link's task does

    def welcomed(self) -> list[bytes]:
        """Ask to be let in again."""
        return [subscriber.compose() for subscriber in self._subscribers.values()]

    def pushed(self, frame: Frame) -> None:
        """Hand a frame to the subscriber that it is for."""
        if frame.type == MessageType.ACK:
            for subscriber in self._subscribers.values():
                subscriber.answered(frame)
        elif addressee := self._subscribers.get(frame.properties.get("subscription_id", "")):
            if frame.type == MessageType.DELIVER:
                addressee.delivered(frame)
            elif frame.type == MessageType.UNSUBSCRIBE:
                addressee.removed(frame.properties.get("reason", "no reason given"))
        if not self._ticking:
            self._ticking = True
            trio.lowlevel.spawn_system_task(self._tick)

    def lost(self) -> None:
        """Tell everybody that the connection is gone."""
        for subscriber in self._subscribers.values():
            subscriber.lost()

    # What the ticker does

    async def _tick(self) -> None:
        """Look what is due, for as long as anything may be."""
        try:
            while pauses := self._pauses():
                await trio.sleep(min(pauses))
                for subscriber in list(self._subscribers.values()):
                    await subscriber.tick(trio.current_time())
        finally:
            self._ticking = False

    def _pauses(self) -> list[float]:
        now = trio.current_time()
        pauses = [subscriber.membership.pause(now) for subscriber in self._subscribers.values()]
        return [pause for pause in pauses if pause is not None]
