"""A peer for which there is no slot: what is urgent is answered, anything else is refused with the reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio

from qb.doors.transport import Transport

SLOTS = 16  # of each door, beyond all limits; with one more, the oldest makes way


class Urgent(NamedTuple):
    """What a door answers even if there is no slot."""

    begins: bytes = b""  # how such a request begins; empty: every one is urgent
    loopback_only: bool = False
    seconds: float = 5.0  # that such a peer is served


BriefScopes = deque[trio.CancelScope]


def brief_scopes() -> BriefScopes:
    """Return what the brief sessions of one broker share."""
    return deque(maxlen=SLOTS)


class BriefSession:
    """From the first byte of a request to the end of its answer."""

    def __init__(
        self,
        transport: Transport,
        urgent: Urgent,
        serve: Callable[[], Awaitable[None]],
        refuse: Callable[[], bytes],
        others: BriefScopes,
    ) -> None:
        """What is `urgent` is served; `refuse` returns the answer to others. `others` are those of the same door."""
        self._transport = transport
        self._urgent = urgent
        self._serve = serve
        self._refuse = refuse
        self._others = others
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Serve the peer or refuse it; ends early when others need the slot."""
        self._scope.deadline = trio.current_time() + self._urgent.seconds
        if len(self._others) == SLOTS:
            self._others[0].cancel()
        self._others.append(self._scope)
        try:
            with self._scope:
                begins = self._urgent.begins
                if not begins or (await self._transport.peek(len(begins))).startswith(begins):
                    await self._serve()
                else:
                    self._transport.send(self._refuse())
                    await self._transport.linger()
        finally:
            self._transport.close()

    def drain(self) -> None:
        """End at once: a broker that stops answers no more."""
        self._scope.cancel()

    def check_life(self, now: float) -> None:
        """Its time is short anyway."""
