"""A connected socket with TLS on it that one thread may read while another writes.

The socket of Python's ssl module is not safe for that: here, encrypting and decrypting are short and hold a lock, and
waiting for the network does not.
"""

from __future__ import annotations

import socket
import ssl
import threading
from typing import Any

RECEIVE_SIZE = 262_144
PATIENCE = 30  # waits of the socket for the rest of a record of which a part has come


class TlsSocket(socket.socket):
    """Takes over a connected socket."""

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, host: str) -> None:
        """Shake hands, within the socket's time-out. Raises OSError."""
        timeout = connected.gettimeout()
        super().__init__(connected.family, connected.type, connected.proto, fileno=connected.detach())
        self.settimeout(timeout)
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=host)
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._plain = bytearray()
        self._ended = False
        try:
            self._shake_hands()
        except BaseException:
            self.close()
            raise

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                self._flush()
                return
            except ssl.SSLWantReadError:
                self._flush()
            data = super().recv(RECEIVE_SIZE)
            if not data:
                raise ConnectionResetError("closed in the TLS handshake")
            self._received.write(data)

    @property
    def has_received(self) -> bool:
        """Is there something that was received and not taken?"""
        return bool(self._plain)

    def _flush(self) -> None:
        with self._writing:
            with self._lock:
                data = self._to_send.read()
            if data:
                super().sendall(data)

    def sendall(self, data: Any, flags: int = 0) -> None:
        with self._writing:
            with self._lock:
                self._tls.write(data)
                encrypted = self._to_send.read()
            super().sendall(encrypted)

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        self._fill()
        data = bytes(self._plain[:bufsize])
        del self._plain[:bufsize]
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer)
        data = self.recv(nbytes or len(view))
        view[: len(data)] = data
        return len(data)

    def _fill(self) -> None:
        """Receive until something can be decrypted, or nothing more comes."""
        waits = 0
        while not self._plain and not self._ended:
            try:
                data = super().recv(RECEIVE_SIZE)
            except BlockingIOError:
                waits += 1
                if not self._received.pending or waits > PATIENCE:
                    raise
                continue
            self._ended = not data
            self._decrypt(data)

    def _decrypt(self, data: bytes) -> None:
        with self._lock:
            self._received.write(data)
            while not self._ended:
                try:
                    plain = self._tls.read(RECEIVE_SIZE)
                except ssl.SSLWantReadError:
                    break
                except ssl.SSLZeroReturnError:
                    plain = b""
                self._ended = not plain
                self._plain += plain
            speaks = self._to_send.pending
        if speaks:
            self._flush()
