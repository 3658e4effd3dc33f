"""Sockets that peers connect to, and the peers that are connected."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import trio

from qb.core.broker.message_broker import MessageBroker
from qb.core.wire.errors import BrokerError, TooManyConnections
from qb.doors.binary.replies import refusal
from qb.doors.binary.session import Session
from qb.doors.socket_poll import AVAILABLE, SocketPoll
from qb.doors.transport import Transport
from qb.storage.faults import Faults, keep_running

log = logging.getLogger("qb.server")

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

    def open(self, transport: Transport, address: str) -> PeerSession:
        """Return the session of a peer that has come."""

    def refuse(self, error: BrokerError) -> bytes:
        """Return what a peer is told that may not come in."""


class BinaryDoor:
    """The binary door."""

    name = "frames"

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
        """Let nobody in any more: who comes now is told so at once, and does not wait for an answer."""
        for listener in self.listeners:
            listener.close()


class Peers:
    """Everybody who is connected, through whichever door."""

    def __init__(self, broker: MessageBroker) -> None:
        self._broker = broker
        self._sessions: set[PeerSession] = set()
        self._faults = Faults()
        self._readiness = SocketPoll(broker.engine.commit_step) if AVAILABLE else None

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
            self._welcome(sock, f"{address[0]}:{address[1]}", door, sessions)

    def _welcome(self, sock: socket.socket, address: str, door: Door, sessions: trio.Nursery) -> None:
        transport = Transport(sock, self._readiness)
        most = self._broker.settings.server.max_connections
        if self._broker.connections < most:
            self._broker.connections += 1
            self._broker.metrics.connections[door.name] += 1
            self._broker.metrics.connections_accepted[door.name] += 1
            sessions.start_soon(self._serve, door.open(transport, address), door)
            return
        self._broker.metrics.connections_refused[door.name] += 1
        log.warning("refused %s: %d connections are the most allowed", address, most)
        transport.send(door.refuse(TooManyConnections(f"this broker allows {most} connections and has them")))
        transport.close()

    async def _serve(self, session: PeerSession, door: Door) -> None:
        self._sessions.add(session)
        try:
            with Faults().contained(f"a session of {door.name}"):
                await session.run()
        finally:
            self._broker.connections -= 1
            self._broker.metrics.connections[door.name] -= 1
            self._sessions.discard(session)

    async def hear(self) -> None:
        """Read peers as they speak, for ever."""
        if self._readiness is not None:
            await self._readiness.run()

    async def keep_alive(self) -> None:
        """Probe silent peers and drop dead ones, for ever: one timer for all."""
        interval = self._broker.settings.server.heartbeat_interval
        while True:
            await trio.sleep(interval / 8)
            now = trio.current_time() - self._broker.metrics.event_loop.stalled_so_far()
            for session in list(self._sessions):
                with self._faults.contained("a look whether a peer lives"):
                    session.check_life(now)

    def drain(self) -> None:
        """Ask every session to finish."""
        for session in self._sessions:
            session.drain()
