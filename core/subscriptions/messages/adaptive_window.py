"""The width of a window that follows the pace of its subscriber."""

from __future__ import annotations

LEAST = 1_000  # messages: with these it begins, and it is never narrower
MOST = 10_000  # messages: a kill brings again no more than these
MOST_BY_KEY = 6_000  # messages: the same in key_shared, where one failure may take back all that are behind it
MOST_BYTES = 4 * 2**20  # of messages in flight in a window that has grown
AHEAD = 0.02  # seconds: a window holds what its subscriber acks in this time


class AdaptiveWindow:
    """As many messages as the subscriber acks in a moment, within bounds.

    A narrow window makes a quick handler wait for the network and the disk; a wide one keeps messages from other
    subscribers, and a kill brings all of it again. Both are measured in time, so the pace decides. But a subscriber
    that has handled a full window before its acks are saved is not slow, however long that took: its window grows. It
    is looked at once in a window of acks, and changes the width by a factor of two at most.
    """

    __slots__ = ("_acked", "_most", "_ran_dry", "_since", "size")

    def __init__(self, most: int = MOST) -> None:
        self.size = LEAST
        self._most = most
        self._acked = 0  # since the last look
        self._since: float | None = None  # when that was
        self._ran_dry = False  # has the whole window been acked and not saved since?

    def acked(self, count: int, message_bytes: float, now: float, *, ran_dry: bool = False) -> None:
        """So many messages were acked, and one of them takes about so many bytes.

        `ran_dry`: the window is full of acks that are not saved yet, and nothing is left to handle.
        """
        self._ran_dry = self._ran_dry or ran_dry
        if self._since is None:
            self._since = now  # the time before the first ack says nothing about the pace
            return
        self._acked += count
        if self._acked < self.size:
            return
        seconds = now - self._since
        pace = self._acked * AHEAD / seconds if seconds > 0 and not self._ran_dry else self._most
        most = max(LEAST, min(self._most, MOST_BYTES / max(1.0, message_bytes)))
        self.size = int(min(max(pace, self.size / 2, LEAST), self.size * 2, most))
        self._acked, self._since, self._ran_dry = 0, now, False
