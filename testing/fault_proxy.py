"""A proxy between clients and a broker that drops connections, delays answers and loses acks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from qb.core.wire.frames import LENGTH_AND_TYPE, OVERHEAD, MessageType

RECEIVE_SIZE = 256 * 1024
Pass = Callable[[bytes], bool]  # may these frames be passed on? If not, the connection ends


class FaultProxy:
    """Listens on a free port and passes whole frames on to the broker, as long as no fault is asked for.

    Attributes:
        port: Where clients connect to.
        target: The broker's port; changed when the broker is restarted.
        answer_delay: Seconds by which the broker's answers come later.
    """

    def __init__(self) -> None:
        self.target, self.answer_delay = 0, 0.0
        self._lock = threading.Lock()
        self._acks_to_lose = 0
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="qb fault proxy", daemon=True).start()

    def close(self) -> None:
        """Drop all connections and listen no more."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.drop_connections()

    def drop_connections(self) -> None:
        """End every connection that is open now, without a word to either side."""
        with self._lock:
            for each in self._open:
                _end(each)

    def lose_acks(self, times: int) -> None:
        """Drop the connection instead of passing acks of deliveries on, so many times."""
        with self._lock:
            self._acks_to_lose = times

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection(("127.0.0.1", self.target))
            except OSError:  # there is none now
                client.close()
                continue
            self._connect(client, broker)

    def _connect(self, client: socket.socket, broker: socket.socket) -> None:
        with self._lock:
            self._open |= {client, broker}
        for source, target, may_pass in ((client, broker, self._keeps_acks), (broker, client, self._waits)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pass_on, args=(source, target, may_pass), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, may_pass: Pass) -> None:
        """Pass on frames in one direction until either side ends, then end both."""
        received = bytearray()
        try:
            while chunk := source.recv(RECEIVE_SIZE):
                received += chunk
                if whole := _whole_frames(received):
                    frames = bytes(received[:whole])
                    del received[:whole]
                    if not may_pass(frames):
                        break
                    target.sendall(frames)
        except OSError:
            pass
        with self._lock:
            for each in (source, target):
                _end(each)
            self._open.discard(source)
        source.close()  # the other direction closes its own

    def _keeps_acks(self, frames: bytes) -> bool:
        """Return whether no ack of a delivery shall be lost that is among these frames of a client."""
        with self._lock:
            if not self._acks_to_lose or not _acks_deliveries(frames):
                return True
            self._acks_to_lose -= 1
            return False

    def _waits(self, frames: bytes) -> bool:
        if self.answer_delay and MessageType.ACK in _types(frames):
            time.sleep(self.answer_delay)
        return True


def _end(each: socket.socket) -> None:
    try:
        each.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended already
        pass


def _whole_frames(data: bytearray) -> int:
    """Return how many bytes the whole frames at the beginning take."""
    at = 0
    while at + LENGTH_AND_TYPE.size <= len(data):
        length, _ = LENGTH_AND_TYPE.unpack_from(data, at)
        if at + length > len(data):
            break
        at += max(length, OVERHEAD)  # what is shorter is no frame, and for the receiver to refuse
    return min(at, len(data))


def _types(frames: bytes) -> set[int]:
    found, at = set(), 0
    while at + LENGTH_AND_TYPE.size <= len(frames):
        length, kind = LENGTH_AND_TYPE.unpack_from(frames, at)
        found.add(kind)
        at += max(length, OVERHEAD)
    return found


def _acks_deliveries(frames: bytes) -> bool:
    return MessageType.SETTLE in _types(frames) and b'"acks":[[' in frames
