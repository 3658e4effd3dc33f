"""Whether one peer still lives: it speaks while it is listened to, and reads what it is sent.

Pure: the session sets flags as things happen, without asking for the time; `look` is called now and then with the time.
That time stands still while the event loop is held, so a stall of the broker is never counted as a peer's silence.
"""

from __future__ import annotations

from math import inf
from typing import Protocol


class Outgoing(Protocol):
    """What is on its way to the peer."""

    queued: int  # bytes that wait for the peer to read
    moved: bool  # has the peer taken some of them since this was last set to False?

    @property
    def is_held(self) -> bool:
        """Is the peer not read, since it was too fast?"""


class PeerLife:
    """The signs of life of one peer."""

    def __init__(self, outgoing: Outgoing, interval: float, silence: float = inf) -> None:
        """The peer must read within two heartbeat intervals, and say something within `silence` seconds."""
        self.heard = False  # set by the session: something has come
        self.listening = False  # set by the session: only while it reads can the peer be called silent
        self._outgoing = outgoing
        self._interval = interval
        self._silence = silence
        self._heard_at: float | None = None
        self._took_at: float | None = None
        self._probed = False

    def look(self, now: float) -> str | None:
        """Return why the peer is to be dropped, or None. Only differences of `now` matter."""
        if self.heard:
            self.heard = self._probed = False
            self._heard_at = now
        elif not self.listening or self._heard_at is None:
            self._heard_at = now
        if self._outgoing.is_held:  # it is asked for a sign of life, and has time to give it when it is read again
            self._heard_at = max(self._heard_at, now - 1.5 * self._interval)
        if not self._outgoing.queued or self._outgoing.moved or self._took_at is None:
            self._outgoing.moved = False
            self._took_at = now
        if now - self._heard_at > self._silence:
            return f"silent for {self._silence:g} s"
        if now - self._took_at > 2 * self._interval:
            return f"has not read what it was sent for {2 * self._interval:g} s"
        return None

    def probe_is_due(self, now: float) -> bool:
        """Say, after `look`, whether to ask the peer for a sign of life: once in every silence of an interval."""
        if self._probed or self._heard_at is None or now - self._heard_at <= self._interval:
            return False
        self._probed = True
        return True
