"""A connection to the broker that one thread keeps up, for any number of calling threads.

Callers write to the socket themselves; the link's thread reads it, wakes callers, and connects again when the
connection is lost. A caller that waits for one answer reads for itself (`wait`), which spares a change of threads, and
so does the one thread of the handlers (`read_until`); when they may is a table in
qb.clients.blocking.connection.reading_duty.

A link belongs to the process that made it. A child of fork() closes its descriptor, which leaves the connection to the
parent, and never uses the link again.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from time import monotonic
from typing import TypeVar

from qb.clients.blocking.background import Background
from qb.clients.blocking.connection.link_thread import ENDS, RECEIVE_WITHIN, LinkThread
from qb.clients.blocking.connection.reading_duty import ALONE, Duty, DutyEvent
from qb.clients.blocking.connection.shared_connection import PendingCall, SharedConnection, release
from qb.clients.blocking.connection.socket_calls import hang_up, is_readable, write
from qb.clients.blocking.waiting import Answers
from qb.clients.protocol.client_errors import ConnectionLost, QBError
from qb.clients.protocol.connection_phases import Phase
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.forking import call_in_child, used_after_fork
from qb.clients.protocol.publish_frames import PublishForm
from qb.clients.protocol.push_listener import PushListener
from qb.clients.protocol.reconnecting import SILENT_FOR
from qb.clients.protocol.unacked_publishes import UnackedBatch
from qb.core.wire.addresses import BrokerAddress
from qb.core.wire.frames import Frame, Frames

__all__ = ["Link", "PendingCall"]

T = TypeVar("T")


class Link:
    """The way to one broker. Give it a `listener` before the first use."""

    def __init__(
        self,
        servers: Sequence[BrokerAddress],
        conversation: Conversation,
        background: Background,
        *,
        heartbeat_interval: float,
    ) -> None:
        self._connection = SharedConnection(servers, conversation, background)
        self._conversation, self._heartbeat_interval = conversation, heartbeat_interval
        self._thread: LinkThread | None = None  # from open() to close()
        self._before: LinkThread | None = None  # the one that close() has ended
        self._inherited = False
        call_in_child(self, Link._disown)

    def _disown(self) -> None:
        self._inherited, self._thread = True, None
        self._connection.disown()

    @property
    def listener(self) -> PushListener:
        """Takes what the broker pushes."""
        return self._connection.listener

    @listener.setter
    def listener(self, listener: PushListener) -> None:
        self._connection.listener = listener

    @property
    def server(self) -> BrokerAddress:
        """The broker that it is connected to, or tries next."""
        return self._connection.trouble.server

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
        return self._connection.up

    # Coming and going

    def open(self, deadline: float, *, patient: bool) -> None:
        """Return when connected. Raises BrokerUnavailable at the first failure, or if `patient` at the deadline."""
        connection = self._connection
        with connection.changed:
            trouble, failures = connection.trouble, connection.trouble.failures
            self._wait_for(lambda: connection.up or (not patient and trouble.failures > failures), deadline)
            if not connection.up:
                raise trouble.unavailable()

    def close(self) -> None:
        """End the connection and the thread. Calls on their way raise; a later call connects anew."""
        if self._inherited:
            return
        with self._connection.changed:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._before = thread
                thread.close()
            self._connection.changed.notify_all()
        if thread is not None:
            thread.join()
        with self._connection.changed:
            release(self._conversation.give_up("this client was disconnected"))

    def _start(self) -> LinkThread:
        self.check_process()
        if self._thread is None:
            self._thread = LinkThread(self._connection, self._heartbeat_interval, self._before)
            self._before = None
        return self._thread

    # Sending

    def publish(
        self,
        form: PublishForm,
        bodies: Sequence[bytes],
        waiter: Answers,
        deadline: float,
        check: Callable[[], None] | None = None,
        codec: str | None = None,
    ) -> UnackedBatch:
        """Send the bodies; `waiter.release()` is called when all are answered. Waits for connection and room.

        `codec`: what they are compressed with, in place of the one of the conversation.
        Raises BrokerUnavailable, RequestTimedOut, or what `check` raises when the turn has come; nothing was sent then.
        """

        def compose() -> tuple[UnackedBatch, Frames]:
            if check is not None:
                check()
            batch = self._conversation.publish(form, bodies, waiter, codec)
            return batch, self._conversation.to_send(batch)

        return self.transmit(compose, deadline)

    def abandon(self, batch: UnackedBatch) -> None:
        """Stop waiting for a batch: it is not sent again, and no answer reaches it any more."""
        with self._connection.lock:
            self._conversation.abandon(batch)

    def post(self, compose: Callable[[], bytes]) -> None:
        """Send what compose() returns, which no caller waits for; without a connection it is not even called."""
        connection = self._connection
        with connection.sending:
            with connection.lock:
                sock = connection.socket if connection.phase is Phase.UP else None
                data = compose() if sock is not None else b""
            if sock is not None and data:
                write(sock, data)

    def transmit(self, compose: Callable[[], tuple[T, Frames]], deadline: float) -> T:
        """Compose and write in one turn, so that bytes leave in the order of their numbers.

        Waits for connection and room. Raises BrokerUnavailable, RequestTimedOut, or what `compose` raises when the turn
        has come; nothing was sent then.
        """
        connection, conversation = self._connection, self._conversation
        while True:
            with connection.sending:
                with connection.lock:
                    sock = connection.socket if connection.phase is Phase.UP and conversation.has_room else None
                    if sock is not None:
                        result, data = compose()
                if sock is not None:
                    write(sock, data)
                    return result
            self._wait_until_ready(deadline)

    def _wait_until_ready(self, deadline: float) -> None:
        connection, conversation = self._connection, self._conversation
        connection.need_thread()  # it may be answers that make room
        with connection.changed:
            ready = self._wait_for(lambda: connection.up and conversation.has_room, deadline)
            if not connection.up:
                raise connection.trouble.unavailable()
            if not ready:
                raise connection.trouble.stalled()

    def _wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait, with the guard entered and the thread at work. Raises ConnectionLost if the link is closed."""
        thread, connection = self._start(), self._connection
        connection.wanting += 1
        try:
            met = self._wait_and_say(lambda: condition() or self._thread is not thread, deadline)
        finally:
            connection.wanting -= 1
        if self._thread is not thread:
            raise ConnectionLost("this client was disconnected by another thread")
        return met

    def _wait_and_say(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait, and log what for if there is no connection after a second."""
        connection, seconds = self._connection, max(deadline - monotonic(), 0)
        if connection.changed.wait_for(condition, min(seconds, SILENT_FOR)) or seconds <= SILENT_FOR:
            return condition()
        connection.trouble.waited()
        return connection.changed.wait_for(condition, max(deadline - monotonic(), 0))

    # Asking

    def ask(self, compose: Callable[[], tuple[int, bytes]], deadline: float) -> Frame:
        """Send a request and return its reply. Raises BrokerUnavailable, RequestTimedOut, ConnectionLost."""
        return self.answer(self.begin(compose, deadline), deadline)

    def begin(self, compose: Callable[[], tuple[int, bytes]], deadline: float) -> PendingCall:
        """Send a request, whose reply answer() returns; several may be on their way. Raises as ask()."""
        call = PendingCall()

        def compose_call() -> tuple[PendingCall, bytes]:
            call.number, data = compose()
            self._connection.calls[call.number] = call
            return call, data

        return self.transmit(compose_call, deadline)

    def answer(self, call: PendingCall, deadline: float) -> Frame:
        """Wait for the reply to a request that was begun. Raises as ask()."""
        self.check_process()
        self.wait(call.waiter, deadline)
        self.forget(call)
        if call.answer is None:
            raise self._connection.trouble.unanswered()
        if isinstance(call.answer, QBError):
            raise call.answer
        return call.answer

    def forget(self, call: PendingCall) -> None:
        """Do not wait for the reply to a request that was begun."""
        with self._connection.lock:
            self._connection.calls.pop(call.number, None)

    # Waiting for answers

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Have the link's thread read all the while: for callers that wait for many answers."""
        connection = self._connection
        with connection.lock:
            connection.duty.begin_bulk()
        connection.needed.set()
        try:
            yield
        finally:
            with connection.lock:
                connection.duty.end_bulk()

    def wait(self, waiter: Answers, deadline: float) -> bool:
        """Return True when the waiter is released, False at the deadline."""
        waiting = self._connection.waiting
        waiting.append(None)
        try:
            released = partial(waiter.acquire, False)
            return self._read(released, deadline) or waiter.acquire(timeout=max(deadline - monotonic(), 0))
        finally:
            waiting.pop()
            self._connection.caller_read()

    def given(self, *, alone: bool) -> None:
        """What was pushed goes to a handlers' thread; is it `alone`, so that it will call read_until() when idle?"""
        self._connection.given(alone=alone)

    def read_until(self, has_work: Callable[[], bool]) -> None:
        """Read what is pushed, in the one thread that handles it, until there is work for that or another one reads."""
        connection = self._connection
        if connection.duty.state is Duty.HANDLERS:
            connection.waiting.append(None)
            try:
                self._read(has_work, inf)
            finally:
                connection.waiting.pop()
        if not has_work() and connection.duty.changes_at(DutyEvent.HANDLER_WAITS):
            connection.need_thread(DutyEvent.HANDLER_WAITS)

    def _read(self, is_done: Callable[[], bool], deadline: float) -> bool:
        """Read the socket, if no other thread does, until it is done: then True."""
        connection = self._connection
        if connection.duty.state in ALONE or not connection.reading.acquire(blocking=False):
            return False
        sock = connection.socket
        try:
            while not is_done():
                if sock is None or connection.phase is not Phase.UP or not self._comes(sock, deadline):
                    return False
                connection.handle_events(sock)
            return True
        except ENDS:
            hang_up(sock)  # the link's thread will see it end, and connect again
            return False
        finally:
            connection.reading.release()
            if len(connection.waiting) > 1:
                connection.need_thread()

    def _comes(self, sock: socket.socket, deadline: float) -> bool:
        """Receive what comes before the deadline, or soon: silence is for the link's thread to judge."""
        left = deadline - monotonic()
        if left < RECEIVE_WITHIN and not is_readable(sock, left):
            return False
        try:
            self._connection.receive(sock)
        except BlockingIOError:
            return False
        return True
