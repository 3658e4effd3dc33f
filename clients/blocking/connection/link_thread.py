"""The thread of a link: connects, reads, and connects again when the connection is lost."""

from __future__ import annotations

import socket
import threading

from qb.clients.blocking.connection.reading_duty import ASIDE, Duty, DutyEvent
from qb.clients.blocking.connection.shared_connection import SharedConnection
from qb.clients.blocking.connection.socket_calls import connect, hang_up, is_readable, limit_waiting
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.connection_phases import Phase, PhaseEvent, next_phase
from qb.clients.protocol.reconnecting import ReconnectBackoff
from qb.core.wire.errors import PeerMisbehaved

STAND_ASIDE = 0.05  # seconds that the thread leaves the socket to callers after one of them has read it
WHILE_HANDLED = 0.02  # seconds after which it reads if a handler is still running, so that no thread reads
RECEIVE_WITHIN = 1.0  # seconds that a caller who reads waits in the kernel before it looks at its deadline again
ENDS = (OSError, EOFError, PeerMisbehaved, QBError)  # what ends a connection, and is answered with another one


class LinkThread:
    """One span from open() to close(). It begins when the one before has ended."""

    def __init__(self, connection: SharedConnection, heartbeat_interval: float, before: LinkThread | None) -> None:
        self._connection, self._heartbeat_interval, self._before = connection, heartbeat_interval, before
        self._closing = threading.Event()
        name = f"qb {connection.trouble.server}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Have it end; called with the connection's guard entered."""
        self._closing.set()
        self._connection.duty.on(DutyEvent.NEED)
        self._connection.needed.set()  # it may be standing aside
        hang_up(self._connection.socket)

    def join(self) -> None:
        """Return when it has ended, unless it is the caller."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        if self._before is not None:
            self._before.join()
            self._before = None
        backoff = ReconnectBackoff()
        while not self._closing.is_set():
            try:
                self._advance(PhaseEvent.ATTEMPT)
                sock = self._connect()
                self._greet(sock)
                backoff.reset()
                self._converse(sock)
            except ENDS as error:
                self._note(error)
            finally:
                self._connection.lost()
            self._closing.wait(self._connection.trouble.pause(backoff))
        self._connection.trouble.closed()
        if self._connection.phase is not Phase.DOWN:
            self._advance(PhaseEvent.ENDED)

    def _advance(self, event: PhaseEvent) -> None:
        with self._connection.changed:
            self._connection.phase = next_phase(self._connection.phase, event)

    def _note(self, error: BaseException) -> None:
        with self._connection.changed:
            if not self._closing.is_set():
                self._connection.trouble.note(error)
            self._connection.changed.notify_all()

    def _connect(self) -> socket.socket:
        server, seconds = self._connection.trouble.server, self._connection.trouble.connect_timeout
        sock = connect(server, self._connection.conversation.credentials.connecting(server), seconds)
        self._connection.connected(sock)
        if self._closing.is_set():
            hang_up(sock)
        return sock

    def _greet(self, sock: socket.socket) -> None:
        """Return when the broker has welcomed us."""
        connection = self._connection
        with connection.changed:
            hello = connection.conversation.open()
        sock.sendall(hello)
        with connection.reading:
            while not connection.up:
                connection.receive(sock)
                connection.handle_events(sock)
        limit_waiting(sock, RECEIVE_WITHIN, self._heartbeat_interval)

    def _converse(self, sock: socket.socket) -> None:
        """Read until the connection ends, which always raises."""
        connection, silent = self._connection, False
        interval = min(self._heartbeat_interval, connection.conversation.silence)
        while True:
            self._stand_aside()
            with connection.reading:
                if is_readable(sock, interval):
                    connection.receive(sock)
                    silent = False
                    connection.handle_events(sock)
                elif silent:
                    raise ConnectionError("it was silent for two heartbeat intervals")
                else:
                    silent = True
                    connection.show_life(sock, connection.conversation.heartbeat())

    def _stand_aside(self) -> None:
        """Leave the socket to callers, and to the handlers' thread, for as long as they read it themselves."""
        connection, event = self._connection, DutyEvent.TURN
        while True:
            self._note_turn(event)
            state = connection.duty.state
            pause = WHILE_HANDLED if state is Duty.HANDLERS else STAND_ASIDE
            if state not in ASIDE or connection.needed.wait(pause):
                break
            event = DutyEvent.ELAPSED
        connection.needed.clear()

    def _note_turn(self, event: DutyEvent) -> None:
        connection, duty = self._connection, self._connection.duty
        if duty.changes_at(event):
            with connection.lock:
                if duty.state is Duty.GIVEN and connection.is_awaited:
                    duty.on(DutyEvent.NEED)
                elif duty.state is not Duty.HANDLERS or not connection.reading.locked():
                    duty.on(event)
