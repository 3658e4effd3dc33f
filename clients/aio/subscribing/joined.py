"""All subscriptions that a client has joined."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.link import AsyncLink
from qb.clients.aio.subscribing.handler_pool import AsyncHandlerPool, AsyncMessageSink
from qb.clients.aio.subscribing.joined_base import wait_until_left
from qb.clients.aio.subscribing.joined_subscription import AsyncJoinedSubscription, handler_is_running_for
from qb.clients.aio.subscribing.ticker import AsyncTicker
from qb.clients.aio.waiting import AsyncGuard, now
from qb.clients.consuming.desired_membership import JoinPlan, joined_already, not_joined
from qb.clients.protocol.conversation import Conversation
from qb.core.wire.frames import Frame, MessageType

OnEnd = Callable[[], Awaitable[None]]


class AsyncClientSubscriptions:
    """Passes on to subscriptions what the link has for them, and looks after them while they hold messages.

    The handlers of all subscriptions run one at a time, in one task; one with a concurrency of its own has its own.
    """

    def __init__(
        self, link: AsyncLink, conversation: Conversation, background: AsyncBackground, patience: float
    ) -> None:
        self._link, self._conversation, self._background, self._patience = link, conversation, background, patience
        self._guard = AsyncGuard()
        self._joined: dict[str, AsyncJoinedSubscription] = {}
        self._pool: AsyncHandlerPool | None = None  # both while anything is joined
        self._ticker: AsyncTicker | None = None

    # What callers do

    async def join(
        self, plan: JoinPlan, sink: AsyncMessageSink | None = None, on_end: OnEnd | None = None
    ) -> AsyncJoinedSubscription:
        """Join; `on_end` is called after it was left, and `sink` instead of the handler when messages come.

        Raises BrokerUnavailable, RequestTimedOut, RequestRefused.
        """
        await self._wait_until_left(plan.subscription_id)
        deadline = now() + self._patience
        joined = self._register(plan, sink, on_end)
        try:
            await self._link.open(deadline, patient=True)
            await joined.send()
            await joined.wait_until_joined(deadline)
        except BaseException:
            joined.leave_soon(timeout=0)
            await wait_until_left([joined])
            raise
        return joined

    def find(self, subscription_id: str) -> AsyncJoinedSubscription:
        """Return a subscription that was joined. Raises NotJoined."""
        try:
            return self._joined[subscription_id]
        except KeyError:
            raise not_joined(subscription_id) from None

    async def close(self) -> None:
        """Leave everything."""
        everything = self._each()
        for each in everything:
            each.leave_soon()
        await wait_until_left(everything)

    @property
    def runs_the_caller(self) -> bool:
        """Is the caller a handler of ours?"""
        return handler_is_running_for() in self._each()

    async def _wait_until_left(self, subscription_id: str) -> None:
        """Let one that is being left finish."""
        known = self._joined.get(subscription_id)
        if known is not None and known.leaving and known is not handler_is_running_for():
            await known.wait_until_ended()

    def _register(self, plan: JoinPlan, sink: AsyncMessageSink | None, on_end: OnEnd | None) -> AsyncJoinedSubscription:
        name, concurrency = plan.subscription_id, plan.manner.concurrency
        with self._guard:
            if name in self._joined:
                raise joined_already(name)
            self._ticker = self._ticker or AsyncTicker(self._tick, self._background)
            own = AsyncHandlerPool(concurrency, f"qb handlers of {name}", self._background) if concurrency > 1 else None
            self._pool = self._pool or AsyncHandlerPool(1, "qb handlers", self._background)

            async def ended() -> None:
                self._forget(name, own)
                if on_end is not None:
                    await on_end()

            where = self._link, self._conversation, self._background
            joined = AsyncJoinedSubscription(plan, *where, sink or own or self._pool, ended, self._patience)
            self._joined[name] = joined
            return joined

    def _forget(self, name: str, own: AsyncHandlerPool | None) -> None:
        with self._guard:
            del self._joined[name]
            if own is not None:
                own.dismiss()
            if not self._joined:
                self._rest()

    def _rest(self) -> None:
        """End what all of them share."""
        if self._pool is not None:
            self._pool.dismiss()
        if self._ticker is not None:
            self._ticker.stop()
        self._pool = self._ticker = None

    # What the link does

    def welcomed(self) -> list[bytes]:
        """Ask to be let in again."""
        return [each.compose() for each in self._each()]

    def pushed(self, frame: Frame) -> None:
        """Hand a frame to the subscription that it is for."""
        if frame.type == MessageType.ACK:
            for each in self._each():
                each.answered(frame)
        elif addressee := self._joined.get(frame.properties.get("subscription_id", "")):
            if frame.type == MessageType.DELIVER:
                addressee.delivered(frame)
            elif frame.type == MessageType.UNSUBSCRIBE:
                addressee.removed(frame.properties.get("reason", "no reason given"))
        if (ticker := self._ticker) is not None:
            ticker.wake()

    def lost(self) -> None:
        """Notify every one that the connection is gone."""
        for each in self._each():
            each.lost()

    def _each(self) -> list[AsyncJoinedSubscription]:
        with self._guard:
            return list(self._joined.values())

    # What the ticker does

    async def _tick(self, time: float) -> float | None:
        pauses = [await each.tick(time) for each in self._each()]
        return min((pause for pause in pauses if pause is not None), default=None)
