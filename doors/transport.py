"""One peer's socket: receive when there is something, send now what fits, the rest when it can.

It sits directly on a non-blocking socket and trio's wait_readable/wait_writable. A reply is then one `send` in the
step of the event loop that decided it, with no task to wake; only what the kernel does not take waits here.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import trio

from qb.doors.pace import Pace
from qb.doors.socket_poll import RECEIVE_BYTES, SocketPoll, receive_into
from qb.doors.unfinished_input import InputBudget, UnfinishedInput
from qb.doors.unread_output import OutputBudget
from qb.storage.signals import Signal

log = logging.getLogger("qb.server")

LINGER = 2.0  # seconds that a peer has to notice that we have closed
SMALL_ANSWER = 256  # bytes of an answer behind which the next request need not wait for a quota
PARTS_AT_ONCE = 1024  # that every system takes in one call; the rest is queued

# One for all peers of an event loop: a buffer of this size for every recv() would cost more than most requests.
_buffer: trio.lowlevel.RunVar[memoryview] = trio.lowlevel.RunVar("receive buffer")


def _receive_buffer() -> memoryview:
    try:
        return _buffer.get()
    except LookupError:
        _buffer.set(memoryview(bytearray(RECEIVE_BYTES)))
        return _buffer.get()


class Transport:
    """A stream of bytes to one peer. Sending never blocks: watch `queued` and stop producing when it grows."""

    def __init__(
        self,
        sock: socket.socket,
        poll: SocketPoll | None = None,
        incoming: InputBudget | None = None,
        outgoing: OutputBudget | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`check` is called before anything is sent: it returns only if this broker may answer."""
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # the kernel finds out when its machine is gone
        self.unfinished = UnfinishedInput(incoming or InputBudget())
        self._check = check
        self.unread = outgoing or OutputBudget()  # what all peers together have not read
        self._socket = sock
        self._poll = poll
        self._queue: deque[memoryview] = deque()
        self._changed = Signal()  # something was queued, the queue has emptied, or the peer has gone
        self.queued = 0  # bytes that wait for the peer to read
        self.taken = 0  # bytes that the kernel has taken
        self.moved = False  # set when the peer takes queued bytes, or the first ones are queued
        self.has_emptied: Callable[[], None] | None = None  # called when nothing is queued any more
        self.gone = False
        self.common_name: str | None = None  # of the peer's certificate, if it has shown one
        self.pace: Pace | None = None  # None: as fast as it can
        self.acked_by_peer: int | None = None  # bytes that a peer behind a relay has; None: the kernel knows

    @property
    def sock(self) -> socket.socket:
        """The socket, for those who need to know its addresses."""
        return self._socket

    @property
    def position(self) -> int:
        """How many bytes were given to send() in all, and not thrown away."""
        return self.taken + self.queued

    async def receive(self, most: int = RECEIVE_BYTES) -> bytes:
        """Return what the peer has sent, at most so many bytes; b"" when it has gone."""
        return bytes(await self.receive_view(most))

    async def receive_view(self, most: int = RECEIVE_BYTES) -> memoryview:
        """Return the same, to be used before anything else is awaited."""
        if self.pace is not None:
            await self._hold_reading(self.pace)
            most = min(most, self.pace.portion or most)
        buffer = _receive_buffer()[:most]
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            size = receive_into(self._socket, buffer)
            if size is not None:
                if self._poll is not None:
                    self._poll.heard(self._socket.fileno())
                if self.pace is not None:
                    self.pace.received(size)
                return buffer[:size]

    async def peek(self, size: int) -> bytes:
        """Return the first bytes that the peer has sent, at most `size`, and leave them there; b"" if it has gone."""
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv(size, socket.MSG_PEEK)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:
                return b""

    async def attend(self, take: Callable[[memoryview], bool]) -> bool:
        """Hand what the peer sends to `take`, in the step of the event loop that reads it, until that returns False.

        Returns True then, and False when the peer has gone. Raises what `take` raises.
        """
        if self._poll is not None and self.pace is not None:
            return await self._attend_at(self.pace, take, self._poll)
        if self._poll is not None:
            return await _Listening(self._socket, take, self._poll).last()
        while data := await self.receive_view():
            if not take(data):
                return True
        return False

    async def _attend_at(self, pace: Pace, take: Callable[[memoryview], bool], poll: SocketPoll) -> bool:
        """Attend at a pace: what the peer sends too fast stays in its socket for a while."""
        wants_more = True

        def paced(data: memoryview) -> bool:
            nonlocal wants_more
            if pace.is_free:
                wants_more = take(data)
                return wants_more
            pace.received(len(data))
            wants_more = take(data)
            return wants_more and not pace.seconds_to_read()

        while wants_more:
            await self._hold_reading(pace)
            if not await _Listening(self._socket, paced, poll, pace).last():
                return False
        return True

    async def _hold_reading(self, pace: Pace) -> None:
        """Return when the pace lets more be read, or the peer is given up. The peer's own time stands still."""
        while not (self.gone or pace.is_free) and (seconds := pace.seconds_to_read()) > 0:
            began = trio.current_time()
            with trio.move_on_after(seconds):
                await self._changed.wait()
            self.unfinished.excuse(trio.current_time() - began)

    @property
    def is_held(self) -> bool:
        """Is it not read because it was too fast? Then it cannot be called silent."""
        return self.pace is not None and self.pace.seconds_to_read() > 0

    def send(self, *parts: bytes | memoryview) -> None:
        """Send what the kernel takes now and queue the rest. To a peer that has gone, nothing is sent."""
        if self.gone:
            return
        if self.pace is not None and not self.pace.is_free:
            self.pace.sent(sum(map(len, parts)))
            if self._is_ahead:
                self._changed.set()  # send_queued() waits until it is not
        taken = 0
        if not self.queued:
            taken = self._send_now(parts)
            if taken == (len(parts[0]) if len(parts) == 1 else sum(map(len, parts))) or self.gone:
                return
            self.moved = True
        before = self.queued
        for part in parts:
            if taken < len(part):
                self._queue.append(memoryview(bytes(part[taken:])))  # of a copy: a chunk would keep its whole batch
                self.queued += len(part) - taken
            taken = max(0, taken - len(part))
        self._changed.set()
        self.unread.queue(self, self.queued - before)

    def _send_now(self, parts: Sequence[bytes | memoryview]) -> int:
        if self._check is not None:
            self._check()
        try:
            taken = self._socket.sendmsg(parts[:PARTS_AT_ONCE]) if len(parts) > 1 else self._socket.send(parts[0])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._lose()
            return 0
        self.taken += taken
        return taken

    def _lose(self) -> None:
        self.gone = True
        if self.queued:
            self.unread.unqueue(self, self.queued, all_of_it=True)
        self.queued = 0
        self._queue.clear()
        self._changed.set()

    def give_up(self, why: str) -> None:
        """Drop the peer, and what it has not read, at once; its session ends as if the peer had gone."""
        self._lose()
        with suppress(OSError):  # it may have gone by itself
            log.info("dropped %s: %s", ":".join(map(str, self._socket.getpeername()[:2])), why)
            self.abort()
            self._socket.shutdown(socket.SHUT_RDWR)

    async def send_queued(self) -> None:
        """Send what send() queues, for ever; returns when the peer has gone."""
        while not self.gone:
            if not self._queue:
                await self._wait_until_queued()
                continue
            await trio.lowlevel.wait_writable(self._socket)
            self._send_some()

    def _send_some(self) -> None:
        while self._queue:
            part = self._queue[0]
            taken = self._send_now((part,))
            if not taken:
                return
            self.moved = True
            self.queued -= taken
            self.unread.unqueue(self, taken, all_of_it=not self.queued)
            if taken < len(part):
                self._queue[0] = part[taken:]
                return
            self._queue.popleft()
        self._changed.set()
        if self.has_emptied is not None:
            self.has_emptied()

    async def _wait_until_queued(self) -> None:
        """Wait until something is queued, or the pace lets more be sent again."""
        seconds = 0.0 if self.pace is None else self.pace.seconds_to_send()
        if not seconds:
            await self._changed.wait()
            return
        with trio.move_on_after(seconds):
            await self._changed.wait()
        if not self._queue and not self._is_ahead and self.has_emptied is not None:
            self.has_emptied()

    @property
    def _is_ahead(self) -> bool:
        """Has more been sent than the pace allows?"""
        return self.pace is not None and not self.pace.is_free and self.pace.seconds_to_send() > 0

    def has_queued(self, limit: int) -> bool:
        """Say whether the peer should be given nothing more.

        That is if more than `limit` bytes are queued, or any while all peers together have much to read, or if it was
        sent more than its pace allows.
        """
        return self.queued > (0 if self.unread.is_tight else limit) or self._is_ahead

    async def wait_for_turn(self, limit: int, size: int | None = None) -> None:
        """Return when at most `limit` bytes are queued and the pace lets more be sent, or the peer has gone.

        After an answer of so small a `size` that its request was worth as much, the pace is not looked at.
        """
        await self.wait_for_room(limit)
        if self.pace is not None and (size is None or size > SMALL_ANSWER):
            while not self.gone and (seconds := self.pace.seconds_to_send()) > 0:
                with trio.move_on_after(seconds):
                    await self._changed.wait()

    async def wait_for_room(self, limit: int) -> None:
        """Return when at most `limit` bytes are queued, or the peer has gone."""
        while self.queued > limit:
            await self._changed.wait()

    async def linger(self) -> None:
        """Send no more, and let a peer that is still sending read what it was sent: closing now would be a reset.

        Returns when the peer has closed, or after LINGER seconds.
        """
        with trio.move_on_after(LINGER), suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while await self.receive():
                pass

    def abort(self) -> None:
        """Make close() a reset: what the peer has not read is thrown away, in the kernel too."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        """Close the socket; waiting tasks are notified. A second time does nothing."""
        self._lose()
        if self._socket.fileno() < 0:
            return
        self.unfinished.close()
        if self.pace is not None:
            self.pace.belongs_to(None)
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()


class _Listening:
    """A session that listens to its socket until it must wait for something."""

    def __init__(
        self, sock: socket.socket, take: Callable[[memoryview], bool], poll: SocketPoll, pace: Pace | None = None
    ) -> None:
        self._portion = 0 if pace is None else pace.portion
        self._account = None if pace is None else pace.allowances[0]
        self._socket = sock
        self._take = take
        self._poll = poll
        self._over = trio.Event()
        self._gone = False
        self._error: BaseException | None = None

    async def last(self) -> bool:
        """Listen; returns whether the peer is still there. Raises what the listener raised."""
        self._poll.add(self._socket, self._received, self._portion, self._account)
        try:
            await self._over.wait()
        finally:
            self._poll.remove(self._socket)
        if self._error is not None:
            raise self._error
        return not self._gone

    def _received(self, data: memoryview) -> None:
        try:
            if data and self._take(data):
                return
        except BaseException as error:  # is raised in the session that waits here, not in the poll of all sockets
            self._error = error
        self._gone = not data
        self._poll.remove(self._socket)  # at once: what comes from now on must stay in the socket
        self._over.set()
