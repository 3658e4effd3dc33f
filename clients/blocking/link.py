"""A connection to the broker that one thread keeps up, for any number of calling threads.

Callers write to the socket themselves; the link's thread reads it, wakes callers, and connects again when the
connection is lost. A caller that waits for one answer reads for itself (`wait`), which spares a change of threads. The
link's thread stays out of the way while such calls follow each other closely, and never while anything is pushed.

Three locks, always taken in this order: `_reading` is the right to read the socket and to handle what it brings,
`_sending` the right to write to it, `_state` guards everything else. While a connection is up the reader never waits
long for `_sending`: a broker that reads no more until its acks are read must find us reading.

A link belongs to the process that made it. A child of fork() closes its descriptor, which leaves the connection to the
parent, and never uses the link again.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TypeVar

from qb.clients.blocking.background import Background
from qb.clients.blocking.waiting import Answers
from qb.clients.protocol.client_errors import ConnectionLost, QBError
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
from qb.clients.protocol.forking import call_in_child, used_after_fork
from qb.clients.protocol.publish_frames import PublishForm
from qb.clients.protocol.push_listener import PushListener
from qb.clients.protocol.reconnecting import CONNECT_TIMEOUT, ConnectionTrouble, ReconnectBackoff
from qb.clients.protocol.unacked_publishes import UnackedBatch
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import Frame, Frames

RECEIVE_SIZE = 64 * 1024  # answers are small; a larger buffer costs a fresh mapping at each read
ASIDE = 0.05  # seconds that the link's thread leaves the socket to callers after one of them has read it
RECEIVE_WITHIN = 1.0  # seconds that a caller who reads waits in the kernel before it looks at its deadline again
TURN_TIMEOUT = 1.0  # how long the reader waits for a caller that writes before it goes on reading

T = TypeVar("T")


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


class Link:
    """The way to one broker. Give it a `listener` before the first use."""

    listener: PushListener

    def __init__(
        self,
        host: str,
        port: int,
        conversation: Conversation,
        background: Background,
        *,
        heartbeat_interval: float,
    ) -> None:
        self._host, self._port = host, port
        self._conversation, self._background = conversation, background
        self._heartbeat_interval = heartbeat_interval
        self._make_locks()
        self._calls: dict[int, PendingCall] = {}
        self._socket: socket.socket | None = None
        self._up = False  # has the broker welcomed us on this socket?
        self._pushed = False  # has anything come on this socket that nobody asked for?
        self._waiting: deque[None] = deque()  # one for each caller that waits for an answer: it needs no lock
        self._wanting = 0  # callers that wait for connection or room
        self._bulk = 0  # callers that wait for many: they never read for themselves
        self._led = False  # has a caller read for itself lately, or would have liked to?
        self._needed = threading.Event()  # the link's thread must read
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._trouble = ConnectionTrouble(host, port)
        self._inherited = False
        call_in_child(self, Link._disown)

    def _make_locks(self) -> None:
        self._reading = threading.Lock()
        self._sending = threading.Lock()
        self._lock = threading.Lock()  # the same as `_state`, for those on the way of every publish: it is quicker
        self._state = threading.Condition(self._lock)

    def _disown(self) -> None:
        """In a child of fork(): let go of the parent's connection, without a word to the broker."""
        self._inherited = True
        sock, self._socket, self._up, self._thread = self._socket, None, False, None
        self._make_locks()  # a thread that is not here may hold the old ones
        if sock is not None:
            sock.close()

    # What callers do

    @property
    def inherited(self) -> bool:
        """Was it made by the parent of this process? Then post() and close() do nothing, and all else raises."""
        return self._inherited

    @property
    def may_begin_anew(self) -> bool:
        """May another link take its place in a child of fork()?"""
        return True

    def check_process(self) -> None:
        """Raise UsedAfterFork if it was made by the parent of this process."""
        if self._inherited:
            raise used_after_fork()

    @property
    def started(self) -> bool:
        """Is a connection kept up, or at least tried for?"""
        return self._thread is not None

    @property
    def up(self) -> bool:
        """Is there a connection now?"""
        return self._up

    def open(self, deadline: float, *, patient: bool) -> None:
        """Return when connected. Raises BrokerUnavailable at the first failure, or if `patient` at the deadline."""
        with self._state:
            failures = self._trouble.failures
            self._wait_for(lambda: self._up or (not patient and self._trouble.failures > failures), deadline)
            if not self._up:
                raise self._trouble.unavailable()

    def close(self) -> None:
        """End the connection and the thread. Calls on their way raise; a later call connects anew."""
        if self._inherited:
            return
        with self._state:
            thread, self._thread = self._thread, None
            self._closing.set()
            self._needed.set()  # it may be standing aside
            _hang_up(self._socket)
            self._state.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._state:
            _release(self._conversation.give_up("this client was disconnected"))

    def publish(
        self,
        form: PublishForm,
        bodies: Sequence[bytes],
        waiter: Answers,
        deadline: float,
        check: Callable[[], None] | None = None,
    ) -> UnackedBatch:
        """Send the bodies; `waiter.release()` is called when all are answered. Waits for connection and room.

        Raises BrokerUnavailable, RequestTimedOut, or what `check` raises when the turn has come; nothing was sent then.
        """

        def compose() -> tuple[UnackedBatch, Frames]:
            if check is not None:
                check()
            batch = self._conversation.publish(form, bodies, waiter)
            return batch, batch.data

        return self.transmit(compose, deadline)

    def abandon(self, batch: UnackedBatch) -> None:
        """Stop waiting for a batch: it is not sent again, and no answer reaches it any more."""
        with self._state:
            self._conversation.abandon(batch)

    def wait(self, waiter: Answers, deadline: float) -> bool:
        """Return True when the waiter is released, False at the deadline."""
        self._waiting.append(None)
        try:
            return self._lead(waiter, deadline) or waiter.acquire(timeout=max(deadline - monotonic(), 0))
        finally:
            self._waiting.pop()
            self._led = True

    def _lead(self, waiter: Answers, deadline: float) -> bool:
        """Read the socket, if nobody else does, until the waiter is released: then True."""
        if self._pushed or self._bulk or not self._reading.acquire(blocking=False):
            return False
        sock = self._socket
        try:
            while not waiter.acquire(blocking=False):
                if sock is None or not self._up or not self._comes(sock, deadline):
                    return False
                self._handle_events(sock)
            return True
        except (OSError, EOFError, PeerMisbehaved, QBError):
            _hang_up(sock)  # the link's thread will see it end, and connect again
            return False
        finally:
            self._reading.release()
            if len(self._waiting) > 1:
                self._needed.set()

    def _comes(self, sock: socket.socket, deadline: float) -> bool:
        """Receive what comes before the deadline, or soon: silence is for the link's thread to judge."""
        left = deadline - monotonic()
        if left < RECEIVE_WITHIN and not _is_readable(sock, left):
            return False
        try:
            self._receive(sock)
        except BlockingIOError:
            return False
        return True

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Have the link's thread read all the while: for callers that wait for many answers."""
        with self._state:
            self._bulk += 1
        self._needed.set()
        try:
            yield
        finally:
            with self._state:
                self._bulk -= 1

    def post(self, compose: Callable[[], bytes]) -> None:
        """Send what compose() returns, which no caller waits for; without a connection it is not even called."""
        with self._sending:
            with self._state:
                sock = self._socket if self._up else None
                data = compose() if sock is not None else b""
            if sock is not None and data:
                _write(sock, data)

    def ask(self, compose: Callable[[], tuple[int, bytes]], deadline: float) -> Frame:
        """Send a request and return its reply. Raises BrokerUnavailable, RequestTimedOut, ConnectionLost."""
        return self.answer(self.begin(compose, deadline), deadline)

    def begin(self, compose: Callable[[], tuple[int, bytes]], deadline: float) -> PendingCall:
        """Send a request, whose reply answer() returns; several may be on their way. Raises as ask()."""
        call = PendingCall()

        def compose_call() -> tuple[PendingCall, bytes]:
            call.number, data = compose()
            self._calls[call.number] = call
            return call, data

        return self.transmit(compose_call, deadline)

    def answer(self, call: PendingCall, deadline: float) -> Frame:
        """Wait for the reply to a request that was begun. Raises as ask()."""
        self.check_process()
        self.wait(call.waiter, deadline)
        with self._state:
            self._calls.pop(call.number, None)
        if call.answer is None:
            raise self._trouble.unanswered()
        if isinstance(call.answer, QBError):
            raise call.answer
        return call.answer

    def forget(self, call: PendingCall) -> None:
        """Do not wait for the reply to a request that was begun: nobody wants it any more."""
        with self._state:
            self._calls.pop(call.number, None)

    def transmit(self, compose: Callable[[], tuple[T, Frames]], deadline: float) -> T:
        """Compose and write in one turn, so that bytes leave in the order of their numbers.

        Waits for connection and room. Raises BrokerUnavailable, RequestTimedOut, or what `compose` raises when the turn
        has come; nothing was sent then.
        """
        while True:
            with self._sending:
                with self._lock:
                    sock = self._socket if self._up and self._conversation.has_room else None
                    if sock is not None:
                        result, data = compose()
                if sock is not None:
                    _write(sock, data)
                    return result
            self._wait_until_ready(deadline)

    def _wait_until_ready(self, deadline: float) -> None:
        self._needed.set()  # it may be answers that make room
        with self._state:
            ready = self._wait_for(lambda: self._up and self._conversation.has_room, deadline)
            if not self._up:
                raise self._trouble.unavailable()
            if not ready:
                raise self._trouble.stalled()

    def _wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait, holding `_state`, with the thread at work. Raises ConnectionLost if somebody closes the link."""
        thread = self._start()
        self._wanting += 1
        try:
            met = self._state.wait_for(
                lambda: condition() or self._thread is not thread,
                max(deadline - monotonic(), 0),
            )
        finally:
            self._wanting -= 1
        if self._thread is not thread:
            raise ConnectionLost("this client was disconnected by another thread")
        return met

    def _start(self) -> threading.Thread:
        self.check_process()
        if self._thread is None:
            self._closing = threading.Event()
            name = f"qb {self._host}:{self._port}"
            self._thread = threading.Thread(target=self._run, args=(self._closing,), name=name, daemon=True)
            self._thread.start()
        return self._thread

    # What the link's thread does

    def _run(self, closing: threading.Event) -> None:
        backoff = ReconnectBackoff()
        while not closing.is_set():
            try:
                sock = self._connect(closing)
                self._greet(sock)
                backoff.reset()
                self._converse(sock)
            except (OSError, EOFError, PeerMisbehaved, QBError) as error:
                self._note(error)
            finally:
                self._disconnected()
            closing.wait(backoff.pause())

    def _connect(self, closing: threading.Event) -> socket.socket:
        sock = socket.create_connection((self._host, self._port), CONNECT_TIMEOUT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._state:
            self._socket = sock
            if closing.is_set():
                _hang_up(sock)
        return sock

    def _greet(self, sock: socket.socket) -> None:
        """Return when the broker has welcomed us."""
        with self._state:
            hello = self._conversation.open()
        sock.sendall(hello)
        with self._reading:
            while not self._up:
                self._receive(sock)
                self._handle_events(sock)
        _limit_waiting(sock, RECEIVE_WITHIN, self._heartbeat_interval)

    def _converse(self, sock: socket.socket) -> None:
        """Read until the connection ends, which always raises."""
        silent = False
        while True:
            self._step_aside()
            with self._reading:
                if _is_readable(sock, self._heartbeat_interval):
                    self._receive(sock)
                    silent = False
                    self._handle_events(sock)
                elif silent:
                    raise ConnectionError("it was silent for two heartbeat intervals")
                else:
                    silent = True
                    self._show_life(sock, self._conversation.heartbeat())

    def _step_aside(self) -> None:
        """Leave the socket to callers for as long as they read it themselves."""
        while self._led and not (self._pushed or self._bulk or self._closing.is_set()):
            self._led = False
            if self._needed.wait(ASIDE):
                break
        self._needed.clear()

    def _receive(self, sock: socket.socket) -> None:
        """Receive once. What has come and is not read yet belongs to whoever holds `_reading`."""
        room = self._conversation.room()
        if room is not None:
            size = sock.recv_into(room)
            self._conversation.filled(size)
        else:
            data = sock.recv(RECEIVE_SIZE)
            size = len(data)
            self._conversation.receive(data)
        if not size:
            raise EOFError

    def _handle_events(self, sock: socket.socket) -> None:
        while self._conversation.unread:
            with self._lock:
                event = self._conversation.next_event()
            if event is None:
                return
            if isinstance(event, PublishesSettled):
                self._settled(event.batches)
            else:
                self._handle(sock, event)

    def _settled(self, batches: Iterable[UnackedBatch]) -> None:
        _release(batches)
        if self._wanting:
            with self._state:
                self._state.notify_all()  # there may be room now

    def _handle(self, sock: socket.socket, event: Event) -> None:
        match event:
            case RequestAnswered(number, frame):
                if call := self._calls.pop(number, None):
                    self._led = True  # whoever waited for it may ask again, and will read the answer without us
                    call.finish(frame)
                else:
                    self._push(frame)
            case BytesToSend(data):
                self._show_life(sock, data)
            case PushedFrame(frame):
                self._push(frame)
            case Welcome(_, uncertain):
                _release(uncertain)
                self._resume(sock)
            case Goodbye(reason):
                raise ConnectionError(reason)
            case TurnedAway(error):
                raise error

    def _push(self, frame: Frame) -> None:
        self._pushed = True
        self.listener.pushed(frame)

    def _show_life(self, sock: socket.socket, data: bytes) -> None:
        """Write a heartbeat, unless a caller is busy writing: that is a sign of life too."""
        if self._sending.acquire(timeout=TURN_TIMEOUT):
            try:
                _write(sock, data)
            finally:
                self._sending.release()

    def _resume(self, sock: socket.socket) -> None:
        """Open the link to callers, once everything unanswered is on its way again."""
        self._sending.acquire()
        with self._state:
            unanswered = [*self._conversation.unanswered(), *self.listener.welcomed()]
            self._up = True
            self._state.notify_all()
        if unanswered:  # written by a thread of its own, because this one has to read the answers
            self._background.start("qb sends again", self._write_again, sock, unanswered)
        else:
            self._sending.release()

    def _write_again(self, sock: socket.socket, unanswered: Iterable[Frames]) -> None:
        try:
            for frames in unanswered:
                _write(sock, frames)
        finally:
            self._sending.release()

    def _note(self, error: BaseException) -> None:
        with self._state:
            self._trouble.note(error)
            self._state.notify_all()

    def _disconnected(self) -> None:
        with self._state:
            sock, self._socket, self._up = self._socket, None, False
            self._pushed = False
            calls, self._calls = self._calls, {}
            _release(self._conversation.lost())
        self.listener.lost()
        for call in calls.values():
            call.finish(self._trouble.lost())
        if sock is not None:
            _hang_up(sock)
            with self._reading, self._sending:  # nobody may use it when the number of the file becomes free for reuse
                sock.close()


def _write(sock: socket.socket, data: Frames) -> None:
    """Write all of it. A failure is left to the reader, who sees the connection end."""
    try:
        sock.sendall(data)
    except OSError:
        _hang_up(sock)


def _limit_waiting(sock: socket.socket, receive: float, send: float) -> None:
    """Let the kernel end what takes longer, with BlockingIOError.

    With a timeout of Python's own, every send and every receive would be two system calls.
    """
    sock.settimeout(None)
    for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))  # a struct timeval
        sock.setsockopt(socket.SOL_SOCKET, option, limit)


def _is_readable(sock: socket.socket, seconds: float) -> bool:
    """Wait so long until there is something to read."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(seconds, 0) * 1000))


def _hang_up(sock: socket.socket | None) -> None:
    """Make every thread that uses the socket notice that it is over."""
    try:
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _release(batches: Iterable[UnackedBatch]) -> None:
    for batch in batches:
        batch.waiter.release()
