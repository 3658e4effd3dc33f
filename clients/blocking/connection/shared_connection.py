"""What the callers and the thread of a link share: locks, the socket, calls on their way, and what is read.

Three locks, always taken in this order: `reading` is the right to read the socket and to handle what it brings,
`sending` the right to write to it, `changed` (or `lock`, which is the same and quicker) guards everything else. While a
connection is up the reader never waits long for `sending`: a broker that reads no more until its acks are read must
find us reading.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterable, Sequence

from qb.clients.blocking.background import Background
from qb.clients.blocking.connection.reading_duty import DutyEvent, ReadingDuty
from qb.clients.blocking.connection.socket_calls import hang_up, write
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.connection_phases import Phase, PhaseEvent, next_phase
from qb.clients.protocol.conversation import (
    BytesToSend,
    Conversation,
    Event,
    Goodbye,
    PublishesSettled,
    PushedFrame,
    RequestAnswered,
    TurnedAway,
    Welcome,
)
from qb.clients.protocol.push_listener import PushListener
from qb.clients.protocol.reconnecting import ConnectionTrouble
from qb.clients.protocol.unacked_publishes import UnackedBatch
from qb.core.wire.addresses import BrokerAddress
from qb.core.wire.frames import Frame, Frames

RECEIVE_SIZE = 64 * 1024  # answers are small; a larger buffer costs a fresh mapping at each read
TURN_TIMEOUT = 1.0  # how long the reader waits for a caller that writes before it goes on reading


class PendingCall:
    """One request on its way, and the lock that its caller waits on."""

    __slots__ = ("answer", "number", "waiter")

    def __init__(self) -> None:
        self.number = 0  # until it is sent
        self.answer: Frame | QBError | None = None
        self.waiter = threading.Lock()
        self.waiter.acquire()

    def finish(self, answer: Frame | QBError) -> None:
        self.answer = answer
        self.waiter.release()


class SharedConnection:
    """One address, and the connection to it while there is one."""

    listener: PushListener

    def __init__(self, servers: Sequence[BrokerAddress], conversation: Conversation, background: Background) -> None:
        self.conversation, self._background = conversation, background
        self.make_locks()
        self.needed = threading.Event()  # wakes the link's thread when it stands aside
        self.phase = Phase.DOWN
        self.duty = ReadingDuty()
        self.socket: socket.socket | None = None
        self.calls: dict[int, PendingCall] = {}
        self.wanting = 0  # callers that wait for connection or room
        self.waiting: deque[None] = deque()  # one for each thread that waits for what is read: it needs no lock
        self.trouble = ConnectionTrouble(servers)

    def make_locks(self) -> None:
        self.reading = threading.Lock()
        self.sending = threading.Lock()
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)

    @property
    def up(self) -> bool:
        """May callers send?"""
        return self.phase is Phase.UP

    # Who reads

    def caller_read(self) -> None:
        """A caller has read for itself, or would have; costs next to nothing when it is known."""
        if self.duty.changes_at(DutyEvent.CALLER_READ):
            with self.lock:
                self.duty.on(DutyEvent.CALLER_READ)

    def need_thread(self, event: DutyEvent = DutyEvent.NEED) -> None:
        """Have the link's thread read."""
        with self.lock:
            self.duty.on(event)
        self.needed.set()

    def given(self, *, alone: bool) -> None:
        """What was pushed goes to the handlers' thread; is it `alone`, or one of several?"""
        if self.duty.changes_at(DutyEvent.GIVEN if alone else DutyEvent.SPREAD):
            with self.lock:
                self.duty.given(alone=alone)
            if not alone:
                self.needed.set()

    @property
    def is_awaited(self) -> bool:
        """Does any caller wait for what is read?"""
        return bool(self.waiting or self.wanting)

    # The phases

    def connected(self, sock: socket.socket) -> None:
        """There is a socket."""
        with self.changed:
            self.socket = sock
            self.phase = next_phase(self.phase, PhaseEvent.CONNECTED)

    def resume(self, sock: socket.socket) -> None:
        """Open the link to callers, once everything unanswered is on its way again."""
        self.sending.acquire()
        with self.changed:
            unanswered = [*self.conversation.unanswered(), *self.listener.welcomed()]
            self.phase = next_phase(self.phase, PhaseEvent.WELCOMED)
            self.changed.notify_all()
        if unanswered:  # written by a thread of its own, because this one has to read the answers
            self._background.start("qb sends again", self._write_again, sock, unanswered)
        else:
            self.sending.release()

    def _write_again(self, sock: socket.socket, unanswered: Iterable[Frames]) -> None:
        try:
            for frames in unanswered:
                write(sock, frames)
        finally:
            self.sending.release()

    def lost(self) -> None:
        """The attempt has failed, or the connection has ended."""
        with self.changed:
            sock, self.socket = self.socket, None
            self.phase = next_phase(self.phase, PhaseEvent.LOST)
            self.duty.lost()
            calls, self.calls = self.calls, {}
            release(self.conversation.lost())
        self.listener.lost()
        for call in calls.values():
            call.finish(self.trouble.lost())
        if sock is not None:
            hang_up(sock)
            with self.reading, self.sending:  # no thread may use the file's number when it becomes free for another
                sock.close()

    def disown(self) -> None:
        """In a child of fork(): let go of the parent's connection, without a word to the broker."""
        sock, self.socket, self.phase = self.socket, None, Phase.DOWN
        self.make_locks()  # a thread that is not here may hold the old ones
        if sock is not None:
            sock.close()

    # What the holder of `reading` does

    def receive(self, sock: socket.socket) -> None:
        """Receive once. What has come and is not handled yet belongs to the holder of `reading`. Raises EOFError."""
        conversation = self.conversation
        room = conversation.room()
        if room is not None:
            size = sock.recv_into(room)
            conversation.filled(size)
        else:
            data = sock.recv(RECEIVE_SIZE)
            size = len(data)
            conversation.receive(data)
        if not size:
            raise EOFError

    def handle_events(self, sock: socket.socket) -> None:
        """Handle what was received. Raises what ends the connection."""
        conversation = self.conversation
        while conversation.unread:
            with self.lock:
                event = conversation.next_event()
            if event is None:
                return
            if isinstance(event, PublishesSettled):
                self._settled(event.batches)
            else:
                self._handle(sock, event)

    def _settled(self, batches: Iterable[UnackedBatch]) -> None:
        release(batches)
        if self.wanting:
            with self.changed:
                self.changed.notify_all()  # there may be room now

    def _handle(self, sock: socket.socket, event: Event) -> None:
        match event:
            case RequestAnswered(number, frame):
                if call := self.calls.pop(number, None):
                    self.caller_read()  # its caller may ask again, and will read the answer without us
                    call.finish(frame)
                else:
                    self._push(frame)
            case BytesToSend(data):
                self.show_life(sock, data)
            case PushedFrame(frame):
                self._push(frame)
            case Welcome(_, uncertain):
                self.trouble.welcomed()
                release(uncertain)
                self.resume(sock)
            case Goodbye(reason, owner):
                self.trouble.moved(owner)
                raise ConnectionError(reason)
            case TurnedAway(error):
                raise error

    def _push(self, frame: Frame) -> None:
        if self.duty.changes_at(DutyEvent.PUSHED):
            with self.lock:
                self.duty.on(DutyEvent.PUSHED)
            self.needed.set()
        self.listener.pushed(frame)

    def show_life(self, sock: socket.socket, data: bytes) -> None:
        """Write a heartbeat, unless a caller is busy writing: that is a sign of life too."""
        if self.sending.acquire(timeout=TURN_TIMEOUT):
            try:
                write(sock, data)
            finally:
                self.sending.release()


def release(batches: Iterable[UnackedBatch]) -> None:
    """Wake the callers that wait for these batches."""
    for batch in batches:
        batch.waiter.release()
