"""A peer for which there is no slot: an urgent request of it is answered, any other is refused with the reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import trio

from qb.doors.transport import Transport

SLOTS = 16  # beyond all limits; with one more, the oldest makes way
SECONDS = 5.0  # that such a peer is served

BriefScopes = deque[trio.CancelScope]


def brief_scopes() -> BriefScopes:
    """Return what the brief sessions of one broker share."""
    return deque(maxlen=SLOTS)


class BriefSession:
    """From the first byte of a request to the end of its answer."""

    def __init__(
        self,
        transport: Transport,
        urgent: bytes,
        serve: Callable[[], Awaitable[None]],
        refuse: Callable[[], bytes],
        others: BriefScopes,
    ) -> None:
        """A request that begins with `urgent` is served; `refuse` returns the answer to others."""
        self._transport = transport
        self._urgent = urgent
        self._serve = serve
        self._refuse = refuse
        self._others = others
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Serve the peer or refuse it; ends early when others need the slot."""
        self._scope.deadline = trio.current_time() + SECONDS
        if len(self._others) == SLOTS:
            self._others[0].cancel()
        self._others.append(self._scope)
        try:
            with self._scope:
                if (await self._transport.peek(len(self._urgent))).startswith(self._urgent):
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
