"""A network in memory: sockets for the doors, streams for the clients, and between them delay and sudden ends.

What is sent arrives in order and after a while, or, once a connection has been cut, not at all: of what was under way a
part may still arrive. One end may notice the cut much later than the other, so that a broker can have two connections
of a client that knows of one. A connection may be doubled: the client sends again on a new one what still arrives on
the old one.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import trio

BUFFER = 1 << 16  # bytes under way in one direction; then the sender waits


class Pipe:
    """One direction of a connection."""

    def __init__(self, chance: Random, slowest: float) -> None:
        self._chance, self.slowest = chance, slowest
        self._parts: deque[tuple[float, bytes]] = deque()  # when it arrives, and what
        self._last = 0.0
        self._under_way = 0
        self.ends_at: float | None = None  # what arrives later does not
        self._changed = trio.lowlevel.ParkingLot()
        self.watcher: trio.lowlevel.ParkingLot | None = None  # of one that waits for many pipes

    def _change(self) -> None:
        self._changed.unpark_all()
        if self.watcher is not None:
            self.watcher.unpark_all()

    def send(self, data: bytes) -> int:
        """Take what there is room for; returns how much, 0 if the other end must read first. Raises BrokenPipeError."""
        if self.ends_at is not None and trio.current_time() >= self.ends_at:
            raise BrokenPipeError(errno.EPIPE, "the connection is gone")
        taken = data[: max(0, BUFFER - self._under_way)]
        if taken:
            self._last = max(self._last, trio.current_time() + self._chance.random() * self.slowest)
            self._parts.append((self._last, bytes(taken)))
            self._under_way += len(taken)
            self._change()
        return len(taken)

    def end(self, after: float) -> None:
        """Let nothing arrive that takes longer than this from now."""
        at = trio.current_time() + after
        self.ends_at = at if self.ends_at is None else min(at, self.ends_at)
        self._change()

    def delay(self, by: float) -> None:
        """Let all that is under way, and all that is sent from now on, arrive so much later."""
        self._parts = deque((at + by, data) for at, data in self._parts)
        self._last = max(self._last, trio.current_time()) + by
        self._change()

    def end_soon(self) -> None:
        """Let what is under way arrive, and then the end."""
        self.end(2 * self.slowest)

    @property
    def next_event(self) -> float | None:
        """When there is something to receive, or the end to notice."""
        times = [self._parts[0][0]] if self._parts else []
        if self.ends_at is not None:
            times.append(self.ends_at)
        return min(times, default=None)

    def receive(self, most: int) -> bytes | None:
        """Return what has arrived, b"" at the end, None if there is nothing yet."""
        now = trio.current_time()
        if self._parts and self._parts[0][0] <= now and (self.ends_at is None or self._parts[0][0] <= self.ends_at):
            _, data = self._parts.popleft()
            if len(data) > most:
                self._parts.appendleft((now, data[most:]))
            self._under_way -= min(len(data), most)
            self._change()
            return data[:most]
        return b"" if self.ends_at is not None and self.ends_at <= now else None

    @property
    def is_busy(self) -> bool:
        """Is something under way?"""
        return self._under_way > 0

    @property
    def has_room(self) -> bool:
        return self._under_way < BUFFER or self.ends_at is not None

    async def wait_for_data(self) -> None:
        """Return when receive() has something to say."""
        while (at := self.next_event) is None or at > trio.current_time():
            with trio.move_on_at(float("inf") if at is None else at):
                await self._changed.park()

    async def wait_for_room(self) -> None:
        """Return when send() takes something, or fails."""
        while not self.has_room:
            await self._changed.park()


@dataclass(eq=False)
class Connection:
    """Both directions between a client and the broker."""

    to_broker: Pipe
    to_client: Pipe

    def cut(self, chance: Random) -> None:
        """End it; either end notices at a time of its own."""
        self.to_client.end(chance.choice((0.0, 0.01, 5.0)))
        self.to_broker.end(chance.choice((0.0, 0.01, 5.0)))

    def double(self, late: float) -> None:
        """Let the client see its end at once, and connect anew, while what it has sent reaches the broker later.

        So the broker has two connections of one client, and gets on the old one what was sent again on the new one.
        """
        self.to_broker.delay(late)
        self.to_broker.end(2 * late + 2 * self.to_broker.slowest)
        self.to_client.end(0.0)

    def end(self) -> None:
        self.to_client.end(0.0)
        self.to_broker.end(0.0)


class SimulatedSocket:
    """The broker's end of a connection, as a non-blocking socket."""

    family = socket.AF_UNIX

    def __init__(self, number: int, connection: Connection) -> None:
        self._number, self.connection = number, connection
        self.incoming, self.outgoing = connection.to_broker, connection.to_client

    def fileno(self) -> int:
        return self._number

    def setblocking(self, flag: bool) -> None:
        pass

    def setsockopt(self, *_: object) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", 9999)

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", self._number)

    def send(self, data: Any) -> int:
        return self.sendmsg([data])

    def sendmsg(self, parts: Any) -> int:
        taken = self.outgoing.send(b"".join(parts))
        if not taken:
            raise BlockingIOError(errno.EAGAIN, "the peer must read first")
        return taken

    def recv(self, most: int) -> bytes:
        data = self.incoming.receive(most)
        if data is None:
            raise BlockingIOError(errno.EAGAIN, "nothing has come")
        return data

    def recv_into(self, room: Any, most: int = 0) -> int:
        data = self.recv(most or len(room))
        room[: len(data)] = data
        return len(data)

    def shutdown(self, how: int) -> None:
        self.outgoing.end_soon()

    def close(self) -> None:
        self.outgoing.end_soon()
        self.incoming.end(0.0)


class ClientSocket(SimulatedSocket):
    """The client's end of a connection, as a non-blocking socket."""

    def __init__(self, number: int, connection: Connection) -> None:
        super().__init__(number, connection)
        self.incoming, self.outgoing = self.outgoing, self.incoming

    def shutdown(self, how: int) -> None:
        self.close()


class SimulatedListener:
    """Where the broker listens."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.waiting: deque[SimulatedSocket] = deque()
        self.changed = trio.lowlevel.ParkingLot()
        self.closed = False

    def accept(self) -> tuple[SimulatedSocket, tuple[str, int]]:
        if not self.waiting:
            raise BlockingIOError(errno.EAGAIN, "no peer waits")
        accepted = self.waiting.popleft()
        return accepted, accepted.getpeername()

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    def close(self) -> None:
        self.closed = True


class SimulatedStream:
    """The client's end of a connection, with what clients use of trio.SocketStream."""

    def __init__(self, number: int, connection: Connection) -> None:
        self._number, self._connection = number, connection
        self.socket = self

    def taken(self) -> ClientSocket:
        """Return the same end as a socket."""
        return ClientSocket(self._number, self._connection)

    def setsockopt(self, *_: object) -> None:
        pass

    async def send_all(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        rest = memoryview(data)
        while rest:
            await self._connection.to_broker.wait_for_room()
            try:
                rest = rest[self._connection.to_broker.send(bytes(rest)) :]
            except OSError as error:
                raise trio.BrokenResourceError from error

    async def receive_some(self, most: int = 65_536) -> bytes:
        await trio.lowlevel.checkpoint()
        while (data := self._connection.to_client.receive(most)) is None:
            await self._connection.to_client.wait_for_data()
        return data

    def shutdown(self, how: int) -> None:
        self.close()

    def close(self) -> None:
        self._connection.to_broker.end_soon()
        self._connection.to_client.end(0.0)

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()


Take = Callable[[memoryview], None]


class SimulatedPoll:
    """Stands for SocketPoll: what all sockets have brought is handed over in one step."""

    def __init__(
        self,
        commit_step: Callable[[bool], AbstractContextManager[Any]],
        is_tight: Callable[[], bool],
        low_latency: bool,
        check: Callable[[], object] | None = None,
    ) -> None:
        self._commit_step = commit_step
        self._check = check
        self._is_tight = is_tight
        self._attended: dict[SimulatedSocket, tuple[Take, int]] = {}
        self._changed = trio.lowlevel.ParkingLot()

    def add(self, sock: SimulatedSocket, take: Take, portion: int = 0, account: Hashable = None) -> None:
        self._attended[sock] = take, portion
        sock.connection.to_broker.watcher = self._changed
        self._changed.unpark_all()

    def remove(self, sock: SimulatedSocket) -> None:
        self._attended.pop(sock, None)

    def heard(self, number: int) -> None:
        pass

    async def run(self) -> None:
        """Receive and hand over, until cancelled."""
        while True:
            listened = [(sock, self._received(sock, portion)) for sock, (_, portion) in self._attended.items()]
            ready = [(sock, data) for sock, data in listened if data is not None]
            if ready:
                if self._check is not None:
                    self._check()
                with self._commit_step(len(ready) == 1):
                    for sock, data in ready:
                        if attended := self._attended.get(sock):
                            attended[0](memoryview(data))
                await trio.lowlevel.checkpoint()
            else:
                events = [sock.connection.to_broker.next_event for sock in self._attended]
                with trio.move_on_at(min((at for at in events if at is not None), default=float("inf"))):
                    await self._changed.park()

    def _received(self, sock: SimulatedSocket, portion: int) -> bytes | None:
        return sock.connection.to_broker.receive(portion or (1 << 10 if self._is_tight() else 1 << 18))


@dataclass
class SimulatedNetwork:
    """All connections of the one broker that there is."""

    chance: Random
    slowest: float  # seconds on the way
    listeners: dict[int, SimulatedListener] = field(default_factory=dict)  # by port
    connections: list[Connection] = field(default_factory=list)
    made: int = 0

    async def connect(self, host: str, port: int, **_: object) -> SimulatedStream:
        """Return a stream to the broker. Raises OSError while it does not listen."""
        await trio.sleep(self.chance.random() * self.slowest)
        listener = self.listeners.get(port)
        if listener is None or listener.closed:
            raise OSError(errno.ECONNREFUSED, "connection refused")
        self.made += 1
        connection = Connection(Pipe(self.chance, self.slowest), Pipe(self.chance, self.slowest))
        self.connections = [each for each in self.connections if each.to_broker.ends_at is None] + [connection]
        listener.waiting.append(SimulatedSocket(1_000 + self.made, connection))
        listener.changed.unpark_all()
        return SimulatedStream(1_000 + self.made, connection)

    def listen(self, port: int) -> SimulatedListener:
        """Return where the broker accepts connections to this port from now on."""
        self.listeners[port] = SimulatedListener(port)
        return self.listeners[port]

    def cut_one(self) -> None:
        """Cut a connection."""
        if self.connections:
            self.chance.choice(self.connections).cut(self.chance)

    def double_one(self) -> None:
        """Double a connection on which something is under way to the broker, if there is one."""
        busy = [each for each in self.connections if each.to_broker.is_busy]
        if busy or self.connections:
            self.chance.choice(busy or self.connections).double(self.chance.choice((0.05, 0.5, 3.0)))

    def end_all(self) -> None:
        """The broker's machine is gone: nothing arrives any more, and nothing is accepted."""
        self.listeners.clear()
        for connection in self.connections:
            connection.end()
        self.connections.clear()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have clients connect here, and doors wait for these sockets, while the context is open."""
        readable, writable, closing = (
            trio.lowlevel.wait_readable,
            trio.lowlevel.wait_writable,
            trio.lowlevel.notify_closing,
        )

        async def wait_readable(sock: Any) -> None:
            if isinstance(sock, SimulatedListener):
                while not sock.waiting:
                    await sock.changed.park()
                await trio.lowlevel.checkpoint()
            elif isinstance(sock, SimulatedSocket):
                await sock.incoming.wait_for_data()
                await trio.lowlevel.checkpoint()
            else:
                await readable(sock)

        async def wait_writable(sock: Any) -> None:
            if isinstance(sock, SimulatedSocket):
                await sock.outgoing.wait_for_room()
                await trio.lowlevel.checkpoint()
            else:
                await writable(sock)

        def notify_closing(sock: Any) -> None:
            if not isinstance(sock, SimulatedSocket):
                closing(sock)

        with (
            patch.object(trio, "open_tcp_stream", self.connect),
            patch("qb.clients.aio.event_loops.on_trio.taken_from", SimulatedStream.taken),
            patch.object(trio.lowlevel, "wait_readable", wait_readable),
            patch.object(trio.lowlevel, "wait_writable", wait_writable),
            patch.object(trio.lowlevel, "notify_closing", notify_closing),
            patch("qb.doors.listening.SocketPoll", SimulatedPoll),
        ):
            yield
