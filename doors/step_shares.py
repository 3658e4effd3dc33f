"""How much of each peer is received in one pass of the event loop, when several of them are being served. Pure.

A pass is shared by accounts: a user with all of its connections is one; without users, each connection is. One that
sends without a pause has its share, and what it sent beyond that waits in its sockets. The next pass takes it in a step
of its own, behind that of the others. So a small publish of another one waits for a part of a pass, not for megabytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

SERVED = 0.1  # seconds for which a peer that has spoken is being served: no sync of another one holds the event loop
LEAST_SHARE = 16_384  # bytes: below that, a step costs more than what is received in it


class ActiveAccounts:
    """Whether more than one account is being served."""

    def __init__(self) -> None:
        self._last: Hashable = None  # the one that has spoken last
        self._spoke = self._others_spoke = -inf  # when it did, and when another one did

    def heard(self, account: Hashable, now: float) -> None:
        """This one has spoken."""
        if account != self._last:
            self._last, self._others_spoke = account, self._spoke
        self._spoke = now

    def is_alone(self, now: float) -> bool:
        """Return whether no account but the last one has spoken within SERVED."""
        return now - self._others_spoke > SERVED


class StepShares:
    """What each account may still bring in one pass: its bytes in equal parts."""

    def __init__(self, pass_bytes: int, accounts: int) -> None:
        self._share = max(LEAST_SHARE, pass_bytes // max(1, accounts))
        self._brought: dict[Hashable, int] = {}

    def left(self, account: Hashable) -> int:
        """Return how many bytes an account may still bring; 0: it has had its share."""
        return max(0, self._share - self._brought.get(account, 0))

    def take(self, account: Hashable, size: int) -> None:
        """It has brought so many."""
        self._brought[account] = self._brought.get(account, 0) + size

    @property
    def used_up(self) -> set[Hashable]:
        """The accounts that have had their whole share: they probably have more to bring."""
        return {account for account, brought in self._brought.items() if brought >= self._share}
