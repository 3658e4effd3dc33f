"""The HTTP door: JSON over HTTP, Server-Sent Events, metrics.

docs/HTTP.md is the contract. Hypercorn's trio worker speaks HTTP on each connection. Who may connect, who is dropped,
and how the broker stops is as with the other doors: the connections come by the same way.
"""

from __future__ import annotations

import logging
import socket

import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext

from qb.core.broker.message_broker import MessageBroker
from qb.core.wire.errors import BrokerError, PeerMisbehaved
from qb.doors.http.http11 import Http11Server
from qb.doors.http.http_app import make_app, make_service
from qb.doors.http.requests.http_errors import HttpError, raw_response, refusal
from qb.doors.http.requests.http_peer import HttpPeer
from qb.doors.peer_life import PeerLife
from qb.doors.transport import Transport

log = logging.getLogger("qb.http")

IDLE = 75.0  # seconds that a connection may stay open without a request


class HttpDoor:
    """Serves each connection that comes."""

    name = "http"
    urgent = b"GET /health "

    def __init__(self, broker: MessageBroker) -> None:
        self.service = make_service(broker)
        self.heartbeat_interval = broker.settings.server.heartbeat_interval
        self._drained = False
        self._app = ASGIWrapper(make_app(self.service))  # type: ignore[arg-type]  # the same, in other words
        self._config = Config()
        self._config.errorlog = logging.getLogger("qb.http")
        self._config.include_server_header = False
        self._config.keep_alive_timeout = IDLE
        self._config.keep_alive_max_requests = 2**31
        self._config.max_app_queue_size = 1  # parts of a body that wait until they are read

    def open(self, transport: Transport, address: str) -> HttpSession:
        return HttpSession(self, HttpPeer(transport, address))

    def refuse(self, error: BrokerError) -> bytes:
        return raw_response(*refusal(error))

    def drain(self) -> None:
        """End what would go on: for all sessions, when the first one ends."""
        if not self._drained:
            self._drained = True
            self.service.waits.end()
            self.service.streams.drain()

    async def converse(self, peer: HttpPeer, context: WorkerContext) -> None:
        """Speak HTTP on a connection until it ends."""
        await Http11Server(self._app, self._config, context, {"peer": peer}, HypercornStream(peer))  # type: ignore[arg-type]


class HttpSession:
    """A connection from its first byte to its last."""

    def __init__(self, door: HttpDoor, peer: HttpPeer) -> None:
        self._door = door
        self._peer = peer
        self._context = WorkerContext(None)
        self._draining = trio.Event()
        self._lingering = trio.CancelScope()
        self._scope = trio.CancelScope()
        self._life = PeerLife(peer.transport, door.heartbeat_interval)
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
                    nursery.start_soon(self._end_when_draining)
                    with self._conversing:
                        await self._door.converse(self._peer, self._context)
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

    def _break_off(self, error: BrokerError) -> None:
        """Give up a request that is not whole: its time is over, or others need the room."""
        why = HttpError(408, "TOO_SLOW", str(error)) if isinstance(error, PeerMisbehaved) else error
        self._broken_off = raw_response(*refusal(why))
        self._conversing.cancel()

    async def _end_when_draining(self) -> None:
        """Close the connection as soon as no request is being answered."""
        await self._draining.wait()
        await self._context.terminated.set()

    def drain(self) -> None:
        """End every wait and every stream, and answer what was received."""
        self._door.drain()
        self._draining.set()
        self._lingering.cancel()

    def check_life(self, now: float) -> None:
        """Called now and then: drop a peer that does not read."""
        why = self._life.look(now)
        if why is not None:
            log.info("dropped http %s: %s", self._peer.address, why)
            self._peer.transport.abort()
            self._scope.cancel()


class HypercornStream:
    """A peer's transport as hypercorn wants its streams. The session closes it, when everything is sent."""

    def __init__(self, peer: HttpPeer) -> None:
        self._peer = peer
        self._transport = peer.transport
        self._reading = trio.CancelScope()
        self._closed = False

    @property
    def socket(self) -> socket.socket:
        return self._transport.sock

    async def receive_some(self, max_bytes: int) -> bytes:
        if not (self._closed or self._transport.gone):
            with trio.CancelScope() as self._reading:
                data = await self._transport.receive(max_bytes)
                self._peer.received(len(data))
                return data
        raise trio.ClosedResourceError

    async def send_all(self, data: bytes) -> None:
        if not self._closed:
            self._transport.send(data)
            if not self._peer.is_pushed_to:
                await self._transport.wait_for_room(0)
        if self._closed or self._transport.gone:
            raise trio.BrokenResourceError

    async def send_eof(self) -> None:
        raise trio.ClosedResourceError  # closing says it

    async def aclose(self) -> None:
        self._closed = True
        self._reading.cancel()
