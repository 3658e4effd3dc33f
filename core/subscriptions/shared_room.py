"""What all subscriptions of a broker share: how many messages may be open, and the notes for explain().

A message is open from its first delivery, or, in key_shared, from being passed over, until it is settled. Each open one
takes memory, also while it waits for a subscriber that never comes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from qb.core.subscriptions.messages.settlements import SettlementNotes

MOST_OPEN = 1_000_000  # messages of all subscriptions together
LEAST = 100  # messages that a subscription may have open, however many the others have: so each of them goes on
WOKEN_AT_ONCE = 3  # subscriptions that go on when there is room again


class SharedRoom:
    """The open messages of all subscriptions. If there are too many, nothing fresh is delivered until some are settled.

    Those with open messages have equal shares of the limit. What came back is delivered again in any case, and each
    may have a few open: so nothing waits for ever.
    """

    def __init__(self, most: int = MOST_OPEN, settlements: SettlementNotes | None = None) -> None:
        self.most = most
        self.open = 0  # messages
        self.sharing = 0  # subscriptions that have any
        self.settlements = SettlementNotes() if settlements is None else settlements
        self.has_room: Callable[[str], None] = lambda name: None  # called with a subscription that may go on
        self._waiting: dict[OpenMessages, None] = {}  # subscriptions that go on when there is room, in turn

    def wait(self, share: OpenMessages) -> None:
        """A subscription has something fresh, and room in its windows, and may open nothing more."""
        self._waiting[share] = None

    def leave(self, share: OpenMessages) -> None:
        """A subscription is no more."""
        self._waiting.pop(share, None)

    def note_less(self) -> None:
        """Messages were settled: let others go on, those first that wait longest."""
        if self._waiting and self.open < self.most:
            for share in list(islice(self._waiting, WOKEN_AT_ONCE)):
                del self._waiting[share]
                if share.room:
                    self.has_room(share.name)
                else:
                    self._waiting[share] = None  # it has its share, and waits behind the others


class OpenMessages:
    """How many messages of one subscription are open: in flight, or waiting."""

    __slots__ = ("_closed", "_shared", "count", "name")

    def __init__(self, name: str, shared: SharedRoom) -> None:
        self.name = name
        self.count = 0
        self._shared = shared
        self._closed = False

    def add(self, change: int) -> None:
        """So many more are open, or, if it is negative, fewer."""
        before = self.count
        self.count += change
        if self._closed:
            return
        self._shared.open += change
        if not before and self.count:
            self._shared.sharing += 1
        elif before and not self.count:
            self._shared.sharing -= 1
        if change < 0:
            self._shared.note_less()

    @property
    def room(self) -> int:
        """How many more may be opened now; at least 0."""
        shared = self._shared
        share = shared.most // max(1, shared.sharing + (not self.count))
        ours = max(LEAST, share) - self.count
        return max(0, LEAST - self.count, min(ours, shared.most - shared.open))

    @property
    def why_none(self) -> str:
        """In words, why there is no room."""
        shared = self._shared
        of_all = f"all subscriptions together have {shared.open} messages in flight or waiting, and {shared.sharing} of"
        return f"{of_all} them share {shared.most}; it has {self.count}"

    def wait(self) -> None:
        """Something fresh was left for lack of room: the subscription goes on when there is some."""
        self._shared.wait(self)

    def close(self) -> None:
        """The subscription is no more: its messages do not count."""
        if not self._closed:
            self.add(-self.count)
            self._closed = True
            self._shared.leave(self)
