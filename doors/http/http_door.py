"""The HTTP door: JSON over HTTP, Server-Sent Events, metrics.

docs/HTTP.md is the contract. Who may connect, who is dropped, and how the broker stops is as with the other doors: the
connections come by the same way.
"""

from __future__ import annotations

import logging

import trio

from qb.core.broker.message_broker import MessageBroker
from qb.core.wire.errors import BrokerError, PeerMisbehaved
from qb.doors.brief_session import Urgent
from qb.doors.http.http_app import HttpApp, make_service
from qb.doors.http.http_connection import HttpConnection
from qb.doors.http.requests.http_errors import HttpError, raw_response, refusal
from qb.doors.http.requests.http_peer import HttpPeer
from qb.doors.peer_identity import PeerIdentity
from qb.doors.peer_life import PeerLife
from qb.doors.transport import Transport

log = logging.getLogger("qb.http")

IDLE = 75.0  # seconds that a connection may stay open without a request


class HttpDoor:
    """Serves each connection that comes."""

    name = "http"
    urgent = Urgent(b"GET /health ")

    def __init__(self, broker: MessageBroker) -> None:
        self.service = make_service(broker)
        self.app = HttpApp(self.service)
        self.heartbeat_interval = broker.settings.server.heartbeat_interval
        self._broker = broker
        self._drained = False

    def open(self, transport: Transport, address: str) -> HttpSession:
        return HttpSession(
            self, HttpPeer(transport, address, PeerIdentity(self._broker, self.name, transport, address))
        )

    def refuse(self, error: BrokerError) -> bytes:
        return raw_response(*refusal(error))

    def drain(self) -> None:
        """End what would go on: for all sessions, when the first one ends."""
        if not self._drained:
            self._drained = True
            self.service.waits.end()
            self.service.streams.drain()


class HttpSession:
    """A connection from its first byte to its last."""

    def __init__(self, door: HttpDoor, peer: HttpPeer) -> None:
        self._door = door
        self._peer = peer
        self._connection = HttpConnection(peer, door.app.respond)
        self._lingering = trio.CancelScope()
        self._scope = trio.CancelScope()
        self._life = PeerLife(peer.transport, door.heartbeat_interval, silence=IDLE)
        self._conversing = trio.CancelScope()
        self._broken_off: bytes | None = None  # the last answer when we break off
        peer.transport.unfinished.refuse = self._break_off

    async def run(self) -> None:
        """Serve the peer until it goes or is dropped. Raises nothing."""
        transport = self._peer.transport
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(transport.send_queued)
                    await self._converse()
                    if self._broken_off is not None:
                        transport.send(self._broken_off)
                    await transport.wait_for_room(0)
                    with self._lingering:
                        await transport.linger()
                    nursery.cancel_scope.cancel()
        except Exception:
            log.exception("connection of %s ended by a fault of ours", self._peer.address)
        finally:
            transport.close()

    async def _converse(self) -> None:
        with self._conversing:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._connection.read)
                await self._connection.converse()
                nursery.cancel_scope.cancel()

    def _break_off(self, error: BrokerError) -> None:
        """Give up a request that is not whole: its time is over, or others need the room."""
        why = HttpError(408, "TOO_SLOW", str(error)) if isinstance(error, PeerMisbehaved) else error
        self._broken_off = raw_response(*refusal(why))
        self._conversing.cancel()

    def drain(self) -> None:
        """End every wait and every stream, answer the request that is being handled, and close."""
        self._door.drain()
        self._connection.end()
        self._lingering.cancel()

    def check_life(self, now: float) -> None:
        """Called now and then: drop a peer that does not read, and close a connection that is not used."""
        self._life.listening, self._life.heard = self._connection.is_idle, self._connection.is_heard
        self._connection.is_heard = False
        why = self._life.look(now)
        if why is None:
            return
        if self._peer.transport.queued:
            log.info("dropped http %s: %s", self._peer.address, why)
            self._peer.transport.abort()
            self._scope.cancel()
        else:
            self._connection.end()
