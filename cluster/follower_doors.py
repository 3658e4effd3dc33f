"""The doors of a broker that does not own the cell: peers are redirected, or passed on to the owner."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import trio

from qb.cluster.cell_view import CellView
from qb.cluster.cluster_port import dial
from qb.cluster.cluster_tls import cluster_tls
from qb.cluster.redirected_session import RedirectedSession, first_frame, redirects
from qb.cluster.relays.relay import RelayedConversation
from qb.cluster.relays.relay_protocol import RelayPreamble
from qb.core.rights.log_ins import LogIns
from qb.core.settings import Settings
from qb.core.wire.errors import BrokerError, JournalLost, NotOwner, TooManyConnections, Unauthenticated
from qb.doors.binary.replies import refusal as frame_refusal
from qb.doors.connection_limits import ConnectionSlot
from qb.doors.http.requests.http_errors import raw_response
from qb.doors.http.requests.http_errors import refusal as http_refusal
from qb.doors.json_lines.json_answers import failure, words
from qb.doors.listening import ListeningDoor, limits_of
from qb.doors.tls_session import TlsSession
from qb.doors.tls_transport import ServerTls, TlsTransport
from qb.doors.transport import Transport

log = logging.getLogger("qb.cluster")

OWNER_WITHIN = 10.0  # seconds for which a peer that cannot be redirected waits for an owner
FIRST_WITHIN = 75.0  # seconds in which an HTTP peer must say something
HEALTH, READY = b"GET /health ", b"GET /ready "
_HEALTHY = raw_response(200, {"status": "healthy"})

DOORS: Mapping[str, tuple[str, Callable[[BrokerError], bytes]]] = {
    "frames": ("frames", lambda error: frame_refusal(0, error)),
    "JSON lines": ("json", lambda error: failure(words(error))),
    "HTTP": ("http", lambda error: raw_response(*http_refusal(error))),
}  # by the title of a door: its name, and how it says no


class FollowerDoors:
    """Accepts peers until it is cancelled; those that are passed on stay until the cell has another owner."""

    def __init__(
        self,
        settings: Settings,
        listening: Sequence[ListeningDoor],
        view: CellView,
        log_ins: LogIns,
        tls: ServerTls | None,
    ) -> None:
        self._settings, self._listening, self._view, self._tls = settings, listening, view, tls
        self._limits = limits_of(settings)
        self._dial = partial(dial, tls=cluster_tls(settings.cluster))
        self.log_ins = log_ins
        self._relays: dict[trio.CancelScope, int] = {}  # and the epochs of their owners

    async def run(self, sessions: trio.Nursery) -> None:
        """Accept connections, and serve them in tasks of `sessions`, for ever."""
        async with trio.open_nursery() as nursery:
            for each in self._listening:
                for listener in each.listeners:
                    nursery.start_soon(self._accept, listener, each.title, sessions)

    async def close_outdated(self) -> None:
        """Close the relays to owners that are none any more, whenever that changes, for ever."""
        while True:
            for scope, epoch in list(self._relays.items()):
                if epoch < self._view.epoch:
                    scope.cancel()
            await self._view.changed.wait()

    async def _accept(self, listener: socket.socket, title: str, sessions: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener)
            try:
                sock, address = listener.accept()
            except OSError:
                await trio.sleep(0.1)
                continue
            name, refuse = DOORS[title]
            transport = Transport(sock) if self._tls is None else TlsTransport(sock, self._tls.context)
            try:
                slot = self._limits.admit(name, address[0])
            except TooManyConnections as error:
                if self._tls is None:
                    transport.send(refuse(error))
                transport.close()
                continue
            session = FollowerSession(self, transport, name, address[0], address[1], refuse)
            sessions.start_soon(self._serve, session, transport, refuse, slot)

    async def _serve(
        self,
        session: FollowerSession,
        transport: Transport,
        refuse: Callable[[BrokerError], bytes],
        slot: ConnectionSlot,
    ) -> None:
        try:
            if isinstance(transport, TlsTransport):
                await TlsSession(transport, session.host, lambda: session, refuse).run()
            else:
                await session.run()
        except Exception:
            log.exception("a session of a peer that is not ours to serve ended by a fault of ours")
        finally:
            transport.close()
            self._limits.leave(slot)

    # What sessions need

    @property
    def view(self) -> CellView:
        return self._view

    @property
    def max_message_size(self) -> int:
        return self._settings.server.max_message_size

    async def relay(self, peer: Transport, door: str, host: str, port: int, first: bytes) -> None:
        """Pass a peer on to the owner, who checks its rights.

        Raises NotOwner if there is none that answers, JournalLost, and Unauthenticated if this broker must have users
        and its copy of the cell has none: the owner may be one that is open to its own machine.
        """
        if self.log_ins.users.admits_no_peer and not self._view.lost:
            raise Unauthenticated("this broker does not know the users of its cell yet, or it has none")
        owner = await self._view.wait_for(self._view.owner, OWNER_WITHIN) if not self._view.lost else None
        if owner is None:
            raise self._view.refusal()
        preamble = RelayPreamble(self._view.cell, owner.epoch, door, host, port, peer.common_name)
        scope = trio.CancelScope()
        self._relays[scope] = owner.epoch
        try:
            with scope:
                await RelayedConversation(peer, preamble, owner.cluster_address, self._dial).run(first)
        except OSError as error:
            log.info("the owner at %s cannot be reached: %s", owner.cluster_address, error)
            raise NotOwner(self._view.cell, "", self._view.epoch) from None
        finally:
            del self._relays[scope]


class FollowerSession:
    """One peer of any door."""

    def __init__(
        self,
        doors: FollowerDoors,
        transport: Transport,
        door: str,
        host: str,
        port: int,
        refuse: Callable[[BrokerError], bytes],
    ) -> None:
        self._doors, self._transport, self._door, self._refuse = doors, transport, door, refuse
        self.host, self._port = host, port

    async def run(self) -> None:
        """Redirect the peer or pass it on, until one side ends."""
        by_door: dict[str, Callable[[], Awaitable[None]]] = {"frames": self._frames, "http": self._http}
        serve = by_door.get(self._door, partial(self._relay, b""))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._transport.send_queued)
            try:
                await serve()
            except (NotOwner, JournalLost, Unauthenticated) as error:
                self._transport.send(self._refuse(error))
            await self._transport.wait_for_room(0)
            await self._transport.linger()
            nursery.cancel_scope.cancel()

    async def _frames(self) -> None:
        said, hello = await first_frame(self._transport)
        if hello is not None and redirects(hello):
            doors = self._doors
            about = self._transport, f"{self.host}:{self._port}", doors.max_message_size
            await RedirectedSession(doors.view, doors.log_ins, *about).run(said)
        elif said:
            await self._relay(said)

    async def _http(self) -> None:
        said = b""
        with trio.move_on_after(FIRST_WITHIN):
            while len(said) < len(HEALTH) and (data := await self._transport.receive()):
                said += data
        if said.startswith(HEALTH):  # does this process live? no other one can say that
            self._transport.send(_HEALTHY)
        elif said.startswith(READY):  # can this process pass peers on?
            self._transport.send(_readiness(self._doors.view))
        elif said:
            await self._relay(said)

    async def _relay(self, first: bytes) -> None:
        await self._doors.relay(self._transport, self._door, self.host, self._port, first)

    def drain(self) -> None:
        """Nothing is left to say: the process ends."""

    def check_life(self, now: float) -> None:
        """The owner looks whether the peer lives."""


def _readiness(view: CellView) -> bytes:
    if reason := view.unready():
        return raw_response(503, {"status": "lost" if view.lost else "no owner", "role": view.role, "reason": reason})
    return raw_response(200, {"status": "ready", "role": view.role})
