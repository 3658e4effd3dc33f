"""What of a joined subscription is peculiar to tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.event_loops.running_loop import running_loop
from qb.clients.aio.link import AsyncLink
from qb.clients.consuming.desired_membership import DesiredMembership
from qb.clients.consuming.inbox import Inbox

FAREWELL = 1.0  # seconds that a cancelled task grants its subscriptions for leaving in good order


class AsyncJoinedBase:
    """Settles messages by hand, which tasks may do and the threads of handlers that are not async."""

    _link: AsyncLink
    _membership: DesiredMembership
    _background: AsyncBackground

    def __init__(self) -> None:
        self._sending_soon = False
        self._loop = running_loop().handle()

    def _settle_manually(self, change: Callable[[Inbox], None]) -> None:
        self._membership.check_manual()
        self._link.check_process()
        if self._loop.runs_here():
            self._settle(change)
        else:  # the thread of a handler that is not async
            self._loop.call_soon(self._settle, change)

    def _settle(self, change: Callable[[Inbox], None]) -> None:
        inbox = self._membership.inbox
        if inbox is None:
            return
        change(inbox)
        if not self._sending_soon:
            self._sending_soon = True
            self._background.start("qb settles", self._send_soon)
        if inbox.freed:
            self._call(inbox.freed)

    async def _send_soon(self) -> None:
        self._sending_soon = False
        await self.send()

    def abandon(self) -> None:
        """Leave, from any thread, even if the event loop is over."""
        if self.leaving or self._link.inherited:
            return
        if self._loop.runs_here():
            self.leave_soon()
        else:
            self._loop.call_soon(self.leave_soon)

    @property
    def leaving(self) -> bool:
        """Has it begun to leave?"""
        raise NotImplementedError

    def leave_soon(self, timeout: float | None = None) -> None:
        """Begin to leave."""
        raise NotImplementedError

    def _call(self, workers: int) -> None:
        """There is work for up to so many tasks."""
        raise NotImplementedError

    async def send(self) -> None:
        """Send what there is to send."""
        raise NotImplementedError


class AsyncLeavingSubscription(Protocol):
    """One that has begun to leave."""

    async def wait_until_ended(self) -> None: ...

    def cancel_handlers(self) -> None: ...


async def wait_until_left(subscriptions: Sequence[AsyncLeavingSubscription]) -> None:
    """Return when all these have left. If cancelled, give them a moment to hurry."""
    try:
        for each in subscriptions:
            await each.wait_until_ended()
    except anyio.get_cancelled_exc_class():
        with anyio.move_on_after(FAREWELL, shield=True):
            for each in subscriptions:
                each.cancel_handlers()
                await each.wait_until_ended()
        raise
