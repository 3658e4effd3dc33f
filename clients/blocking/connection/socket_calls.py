"""What a blocking client does with a socket."""

from __future__ import annotations

import select
import socket
import ssl
import struct

from qb.clients.blocking.connection.tls_socket import TlsSocket
from qb.clients.protocol.reconnecting import CONNECT_TIMEOUT
from qb.core.wire.addresses import BrokerAddress
from qb.core.wire.frames import Frames


def connect(address: BrokerAddress, context: ssl.SSLContext | None, seconds: float = CONNECT_TIMEOUT) -> socket.socket:
    """Return a connected socket that sends small frames at once, encrypted if there is a context. Raises OSError.

    Each of its calls may take so many seconds, until that is changed.
    """
    sock = socket.create_connection((address.host, address.port), seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock if context is None else TlsSocket(sock, context, address.host)


def write(sock: socket.socket, data: Frames) -> None:
    """Write all of it. A failure is left to the reader, who sees the connection end."""
    try:
        sock.sendall(data)
    except OSError:
        hang_up(sock)


def limit_waiting(sock: socket.socket, receive: float, send: float) -> None:
    """Let the kernel end what takes longer, with BlockingIOError.

    With a timeout of Python's own, every send and every receive would be two system calls.
    """
    sock.settimeout(None)
    for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))  # a struct timeval
        sock.setsockopt(socket.SOL_SOCKET, option, limit)


def is_readable(sock: socket.socket, seconds: float) -> bool:
    """Wait so long until there is something to read."""
    if isinstance(sock, TlsSocket) and sock.has_received:
        return True
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(seconds, 0) * 1000))


def hang_up(sock: socket.socket | None) -> None:
    """Make every thread that uses the socket notice that it is over."""
    try:
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
