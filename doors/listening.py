"""Sockets that peers connect to, and the peers that are connected."""

from __future__ import annotations

import errno
import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple, Protocol, TypeVar

import trio

from qb.core.broker.message_broker import MessageBroker
from qb.core.pacing import portions
from qb.core.rights.quotas import Allowance
from qb.core.settings import Settings
from qb.core.wire.errors import REPLIES, BrokerError, QuotaExceeded, TooManyConnections
from qb.doors.binary.replies import refusal
from qb.doors.binary.session import Session
from qb.doors.brief_session import BriefScopes, BriefSession, Urgent, brief_scopes
from qb.doors.connection_limits import ConnectionLimits, ConnectionSlot
from qb.doors.socket_poll import AVAILABLE, SocketPoll
from qb.doors.tls_session import TlsSession
from qb.doors.tls_transport import ServerTls, TlsTransport
from qb.doors.transport import Transport
from qb.doors.unfinished_input import InputBudget
from qb.doors.unread_output import OutputBudget
from qb.storage.faults import Faults, keep_running
from qb.storage.file_limit import most_connections

log = logging.getLogger("qb.server")

AnyTransport = TypeVar("AnyTransport", bound=Transport)
_OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets for every address of `host`. Raises OSError with words for the operator."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise OSError(f"cannot listen on {host!r}: {error.strerror}") from None
    listeners: list[socket.socket] = []
    for family, address in dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found):
        if listeners:  # if any free port was asked for: the same one on every address
            port = listeners[0].getsockname()[1]
        try:
            listeners.append(socket.create_server((address, port), family=family, backlog=1024))
        except OSError as error:
            for opened in listeners:
                opened.close()
            what = "something else is using it" if error.errno == errno.EADDRINUSE else error.strerror
            raise OSError(f"cannot listen on {address}:{port}: {what}") from None
    for listener in listeners:
        listener.setblocking(False)
    return listeners


class PeerSession(Protocol):
    """One peer's session, whichever door it came through."""

    async def run(self) -> None:
        """Serve the peer until it goes, misbehaves, or is dropped. Raises nothing."""

    def drain(self) -> None:
        """Read nothing more, answer what was received, end."""

    def check_life(self, now: float) -> None:
        """Called now and then: drop the peer if it is dead or does not read. `now` stands still in our own stalls."""


class Door(Protocol):
    """A way to speak with the broker."""

    name: str  # one word: how its connections are counted

    @property
    def urgent(self) -> Urgent | None:
        """What is answered even if there is no slot."""

    def open(self, transport: Transport, address: str) -> PeerSession:
        """Return the session of a peer that has come."""

    def refuse(self, error: BrokerError) -> bytes:
        """Return the answer to a peer that may not come in."""


class BinaryDoor:
    """The binary door."""

    name = "frames"
    urgent = Urgent(loopback_only=True, seconds=60)  # the operator's own client

    def __init__(self, broker: MessageBroker) -> None:
        self._broker = broker

    def open(self, transport: Transport, address: str) -> Session:
        return Session(self._broker, transport, address)

    def refuse(self, error: BrokerError) -> bytes:
        return refusal(0, error)


class ListeningDoor(NamedTuple):
    """Where a door is to be: what it is called, what makes it, where it listens."""

    title: str
    door: Callable[[MessageBroker], Door]
    listeners: Sequence[socket.socket]

    @property
    def addresses(self) -> str:
        return ", ".join("{}:{}".format(*listener.getsockname()[:2]) for listener in self.listeners)

    def close(self) -> None:
        """Accept no more connections: a peer that connects now is refused at once and does not wait for an answer."""
        for listener in self.listeners:
            listener.close()


def limits_of(settings: Settings) -> ConnectionLimits:
    by_door = {
        "json": (settings.json.max_connections, "QB_JSON_MAX_CONNECTIONS"),
        "http": (settings.http.max_connections, "QB_HTTP_MAX_CONNECTIONS"),
    }
    total = min(settings.server.max_connections, most_connections())
    return ConnectionLimits(total, settings.server.max_connections_per_address, by_door)


class Peers:
    """The peers that are connected, of all doors."""

    def __init__(self, broker: MessageBroker, tls: ServerTls | None = None) -> None:
        """With `tls`, every door speaks TLS."""
        self._tls = tls
        self._broker = broker
        self._sessions: set[PeerSession] = set()
        self._limits = limits_of(broker.settings)
        self._budget = InputBudget(broker.settings.server.max_unfinished_bytes, broker.settings.server.frame_deadline)
        self._unread = OutputBudget(broker.settings.server.max_unread_bytes)
        self._briefs: defaultdict[str, BriefScopes] = defaultdict(brief_scopes)  # by door
        self._faults = Faults()
        low_latency = broker.settings.server.low_latency
        commit_step, is_tight = broker.engine.commit_step, self._budget.is_tight
        self._check = broker.ownership.check if broker.ownership is not None else None
        self._poll = SocketPoll(commit_step, is_tight, low_latency, self._check) if AVAILABLE else None

    def __len__(self) -> int:
        return len(self._sessions)

    async def accept(self, listener: socket.socket, door: Door, sessions: trio.Nursery) -> None:
        """Start a session for each peer that connects, for ever."""
        await keep_running("accepting of connections", partial(self._accept, listener, door, sessions))

    async def _accept(self, listener: socket.socket, door: Door, sessions: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener)
            try:
                sock, address = listener.accept()
            except OSError as error:
                if error.errno in _OUT_OF_FILES:
                    log.warning("cannot accept a connection: %s", error.strerror)
                    await trio.sleep(0.1)
                continue
            self._welcome(sock, address[0], address[1], door, sessions)

    def _welcome(self, sock: socket.socket, host: str, port: int, door: Door, sessions: trio.Nursery) -> None:
        if self._tls is not None:
            shared = self._poll, self._budget, self._unread, self._check
            self.admit(TlsTransport(sock, self._tls.context, *shared), host, f"{host}:{port}", door, sessions)
        else:
            self.admit(self.transport(Transport, sock), host, f"{host}:{port}", door, sessions)

    def transport(self, kind: type[AnyTransport], sock: socket.socket) -> AnyTransport:
        """Return a transport that shares the poll and the budgets of all peers."""
        return kind(sock, self._poll, self._budget, self._unread, self._check)

    def admit(self, transport: Transport, host: str, address: str, door: Door, sessions: trio.Nursery) -> None:
        """Start the session of a peer at `host`, unless there are too many; `address` is how the log calls it."""
        users = self._broker.access.users
        allowance = users.of_address(host) if users.enabled else None
        try:
            slot = self._limits.admit(door.name, host, door.urgent)
            if allowance is not None:
                self._count(allowance, slot)
        except (TooManyConnections, QuotaExceeded) as error:
            self._broker.access.audit.note("", address, door.name, "connect", [], REPLIES[type(error)].code)
            refused = self._refusal(door, address, error)
            if not isinstance(transport, TlsTransport):  # one that is not welcome is worth no handshake
                transport.send(refused)
            transport.close()
            return
        sessions.start_soon(self._serve, self._session(transport, door, address, slot), slot, allowance)

    def _count(self, allowance: Allowance, slot: ConnectionSlot) -> None:
        try:
            allowance.connect()
        except QuotaExceeded:
            self._limits.leave(slot)
            raise

    def _session(self, transport: Transport, door: Door, address: str, slot: ConnectionSlot) -> PeerSession:
        def opened() -> PeerSession:
            if slot.refusal is not None and door.urgent is not None:
                return self._brief(transport, door, door.urgent, address, slot.refusal)
            return door.open(transport, address)

        if not isinstance(transport, TlsTransport):
            return opened()
        note = partial(self._broker.access.audit.note, "", address, door.name, "handshake", [], "FAILED")
        return TlsSession(transport, address, opened, door.refuse, note)

    def _refusal(self, door: Door, address: str, error: BrokerError) -> bytes:
        self._broker.metrics.connections_refused[door.name] += 1
        log.warning("refused %s: %s", address, error)
        return door.refuse(error)

    def _brief(
        self, transport: Transport, door: Door, urgent: Urgent, address: str, error: TooManyConnections
    ) -> PeerSession:
        async def serve() -> None:
            await door.open(transport, address).run()

        if not urgent.begins:
            log.warning("%s has a slot of the operator's reserve for %g s: %s", address, urgent.seconds, error)
        refuse = partial(self._refusal, door, address, error)
        return BriefSession(transport, urgent, serve, refuse, self._briefs[door.name])

    async def _serve(self, session: PeerSession, slot: ConnectionSlot, allowance: Allowance | None) -> None:
        self._sessions.add(session)
        self._broker.connections += 1
        self._broker.metrics.connections[slot.door] += 1
        self._broker.metrics.connections_accepted[slot.door] += slot.refusal is None
        try:
            with Faults().contained(f"a session of {slot.door}"):
                await session.run()
        finally:
            self._limits.leave(slot)
            if allowance is not None:
                allowance.disconnect()
            self._broker.connections -= 1
            self._broker.metrics.connections[slot.door] -= 1
            self._sessions.discard(session)

    async def read(self) -> None:
        """Receive what peers of the binary door send, for ever."""
        if self._poll is not None:
            await self._poll.run()

    async def keep_alive(self) -> None:
        """Probe silent peers, drop dead ones and those that never finish what they began, for ever."""
        server, idle = self._broker.settings.server, self._broker.settings.json.idle_timeout or inf
        while True:
            await trio.sleep(min(server.heartbeat_interval, server.frame_deadline, idle) / 8)
            async for sessions in portions(list(self._sessions)):
                now = trio.current_time() - self._broker.metrics.event_loop.stalled_so_far()
                for session in sessions:
                    with self._faults.contained("a look whether a peer lives"):
                        session.check_life(now)
            self._budget.look(trio.current_time() - self._broker.metrics.event_loop.stalled_so_far())

    def drain(self) -> None:
        """Ask every session to finish."""
        for session in self._sessions:
            session.drain()
