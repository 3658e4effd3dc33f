"""What peers have sent of frames, lines and requests that are not whole yet: one budget for all of them.

How a door uses it (every transport has an `unfinished`):

- It sets `transport.unfinished.refuse` to a function that takes a BrokerError. That function must let go of the bytes,
  answer the peer with the error, and end the connection. It may be called while another peer's bytes are handled.
- Whenever it has taken apart what was received, it calls `transport.unfinished.hold(size, anew)`: `size` bytes wait for
  the rest; `anew` if something whole (a frame, a line, a request head) was taken since the last call, so that what
  waits is the beginning of another one. With `size` 0 nothing waits. A door that hands bytes on as they come holds 0.
- Bytes that are whole and wait for the broker cannot be held against the peer. A door that keeps many of them calls
  `transport.unfinished.postpone(size)`: when there is much of that, peers are read in small pieces.
- Before it inflates what a peer has sent compressed, it asks `transport.unfinished.has_room_for(size)`, and if there is
  none it awaits `transport.unfinished.wait_for_room(size)`.

The transport ends it when it is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import trio

from qb.core.wire.errors import BrokerError, LimitReached, PeerMisbehaved
from qb.storage.signals import Signal

FREE = 65_536  # bytes outside the budget, until a peer has sent its first whole frame, line or request head


class InputBudget:
    """The bytes that all peers together may hold unfinished, and the time that each has to finish what it began."""

    def __init__(self, limit: float = inf, deadline: float = inf) -> None:
        """`limit` in bytes, `deadline` in seconds."""
        self.limit = limit
        self.deadline = deadline
        self.held = 0
        self.postponed = 0
        self.room = Signal()  # set when less is held, or postponed
        self._waiting: dict[UnfinishedInput, None] = {}  # the one that began first comes first

    def is_tight(self) -> bool:
        """Say whether peers together hold so much that little should be read of each."""
        return self.held + self.postponed > self.limit

    def has_room_for(self, size: int) -> bool:
        """Say whether so many bytes more may be held."""
        return self.held + self.postponed + size <= self.limit

    def look(self, now: float) -> None:
        """Called now and then: refuse peers whose time is over. Only differences of `now` matter."""
        for peer in list(self._waiting):
            if peer.began is None:
                peer.began = now
            elif now - peer.began > self.deadline:
                what = f"what was begun was not finished within {self.deadline:g} s (QB_FRAME_DEADLINE)"
                peer.end(PeerMisbehaved(what))

    def account(self, peer: UnfinishedInput, size: int, charge: int, anew: bool) -> None:
        """A peer holds `size` bytes from now on, of which `charge` count."""
        self.held += charge - peer.charged
        if charge < peer.charged:
            self.room.set()
        peer.charged = charge
        if anew or not size:
            self._waiting.pop(peer, None)
            peer.began = None
        if size:
            self._waiting.setdefault(peer)
        if self.held > self.limit:
            self._make_room()

    def _make_room(self) -> None:
        """Refuse the peers that have held unfinished input for longest: those that mean well finish soon."""
        for peer in list(self._waiting):
            if self.held <= self.limit:
                return
            if peer.charged:
                text = "the broker holds as many bytes of unfinished input as it may, and this peer has waited longest"
                peer.end(LimitReached(text, int(self.limit), "QB_MAX_UNFINISHED_BYTES"))


class UnfinishedInput:
    """The part of one peer."""

    def __init__(self, budget: InputBudget) -> None:
        self.refuse: Callable[[BrokerError], None] = lambda error: None
        self.charged = 0  # bytes that count in the budget
        self.began: float | None = None  # when what waits began to come; known from the next look on
        self._budget = budget
        self._size = 0
        self._postponed = 0
        self._is_known = False  # has it sent anything whole?
        self._ended = False

    def hold(self, size: int, anew: bool) -> None:
        """Now `size` bytes wait for the rest; `anew`: of something that began to come since the last call.

        Cheap while nothing waits. May call `refuse`, of this peer or of others.
        """
        self._is_known = self._is_known or anew
        if self._ended or not (size or self._size):
            return
        anew = anew or not self._size
        self._size = size
        self._budget.account(self, size, size if self._is_known else max(0, size - FREE), anew)

    def excuse(self, seconds: float) -> None:
        """It was not read for so long, so it could not finish."""
        if self.began is not None:
            self.began += seconds

    def postpone(self, size: int) -> None:
        """Now `size` bytes of whole frames, lines or requests wait for the broker to handle them."""
        self._budget.postponed += size - self._postponed
        if size < self._postponed:
            self._budget.room.set()
        self._postponed = size

    def has_room_for(self, size: int) -> bool:
        """Say whether so many bytes more may be held, by this peer or others."""
        return self._budget.has_room_for(size)

    async def wait_for_room(self, size: int) -> None:
        """Return when there is room for so many bytes. Raises LimitReached if there is none for too long."""
        limit = self._budget.limit
        with trio.move_on_after(self._budget.deadline if size <= limit else 0):
            while not self.has_room_for(size):
                await self._budget.room.wait()
            return
        text = f"the broker has no room to inflate {size} bytes"
        raise LimitReached(text, int(limit), "QB_MAX_UNFINISHED_BYTES")

    def end(self, error: BrokerError) -> None:
        """Hold nothing any more, and refuse the peer."""
        self.close()
        self.refuse(error)

    def close(self) -> None:
        """Hold nothing any more."""
        self.postpone(0)
        self.hold(0, anew=False)
        self._ended = True
