"""What of a joined subscription is peculiar to threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from qb.clients.blocking.link import Link
from qb.clients.blocking.waiting import Guard
from qb.clients.consuming.desired_membership import DesiredMembership
from qb.clients.consuming.inbox import Inbox


class JoinedBase:
    """Settles messages by hand, which any thread may do."""

    _link: Link
    _membership: DesiredMembership
    _changed: Guard
    _busy: int

    def __init__(self) -> None: ...

    def _settle_manually(self, change: Callable[[Inbox], None]) -> None:
        self._membership.check_manual()
        self._link.check_process()
        with self._changed:
            inbox = self._membership.inbox
            if inbox is None:
                return
            change(inbox)
            must_send, workers = inbox.urgent or inbox.full or not self._busy, inbox.freed
        if must_send:
            self.send()
        if workers:
            self._call(workers)

    def given_to(self, threads: int) -> None:
        """Messages go to a pool of so many threads."""
        self._link.given(alone=threads == 1)

    def read_until(self, has_work: Callable[[], bool]) -> None:
        """Read the connection in place of its own thread, which is left to it, until there is work or we leave."""
        self._link.read_until(lambda: has_work() or self.leaving)

    @property
    def leaving(self) -> bool:
        """Has it begun to leave?"""
        raise NotImplementedError

    def _call(self, workers: int) -> None:
        """There is work for up to so many threads."""
        raise NotImplementedError

    def send(self) -> None:
        """Send what there is to send."""
        raise NotImplementedError


class LeavingSubscription(Protocol):
    """One that has begun to leave."""

    def wait_until_ended(self) -> None: ...


def wait_until_left(subscriptions: Sequence[LeavingSubscription]) -> None:
    """Return when all these have left."""
    for each in subscriptions:
        each.wait_until_ended()
