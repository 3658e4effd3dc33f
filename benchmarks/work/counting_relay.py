"""A TCP relay in front of a server that counts the bytes of each direction."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class CountingRelay:
    """Passes connections on to a port, and counts."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.sent = self.received = 0  # by clients
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def take(self) -> tuple[int, int]:
        """Return the bytes that clients have sent and received since the last call."""
        counted = self.sent, self.received
        self.sent = self.received = 0
        return counted

    def close(self) -> None:
        """Take no more connections, and return when those that there are have ended."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._carry, args=(client,)))
                self._threads[-1].start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._server_port)) as server:
            back = threading.Thread(target=self._pass_on, args=(server, client, False))
            back.start()
            self._pass_on(client, server, True)
            back.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket, sent: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if sent:
                    self.sent += len(data)
                else:
                    self.received += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def counting_relay(server_port: int) -> Iterator[CountingRelay]:
    """Yield a relay in front of a server's port."""
    relay = CountingRelay(server_port)
    try:
        yield relay
    finally:
        relay.close()
