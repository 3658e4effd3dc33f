"""A session behind a TLS handshake."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import trio

from qb.core.wire.errors import BrokerError
from qb.doors.tls_transport import PlainPeer, TlsFailed, TlsTransport, plain_refusal

log = logging.getLogger("qb.server")


class InnerSession(Protocol):
    """A session of any door."""

    async def run(self) -> None:
        """Serve the peer."""

    def drain(self) -> None:
        """End in good order."""

    def check_life(self, now: float) -> None:
        """Drop the peer if it is dead."""


class TlsSession:
    """One peer from its handshake to its last byte."""

    def __init__(
        self,
        transport: TlsTransport,
        address: str,
        open_session: Callable[[], InnerSession],
        refuse: Callable[[BrokerError], bytes],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """`open_session` is called when the peer is known; `refuse` returns the answer to one that speaks no TLS.

        `failed` is called if the handshake did not succeed.
        """
        self._transport, self._address = transport, address
        self._open_session, self._refuse, self._failed = open_session, refuse, failed
        self._inner: InnerSession | None = None
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Serve the peer until it goes. Raises nothing."""
        try:
            with self._scope:
                await self._transport.handshake()
                self._inner = self._open_session()
        except PlainPeer:
            self._failed()
            self._transport.send_plain(self._refuse(plain_refusal()))
            await self._transport.linger()
        except TlsFailed as error:
            self._failed()
            log.info("refused %s: %s", self._address, error)
        if self._inner is None:
            self._transport.close()
        else:
            await self._inner.run()

    def drain(self) -> None:
        """End in good order."""
        if self._inner is None:
            self._scope.cancel()
        else:
            self._inner.drain()

    def check_life(self, now: float) -> None:
        """A handshake has a limit of its own."""
        if self._inner is not None:
            self._inner.check_life(now)
