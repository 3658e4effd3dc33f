"""What an async client does with a stream."""

from __future__ import annotations

import os
import socket

import trio

from qb.clients.protocol.client_errors import QBError
from qb.core.wire.errors import PeerMisbehaved

# What ends a connection, and is answered with another one; anything else is a fault of ours, and the caller's to see.
ENDS = (
    OSError,
    EOFError,
    PeerMisbehaved,
    QBError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
)


def plain(error: Exception) -> BaseException:
    """Return the standard library's name for a failure that trio has a name of its own for."""
    if isinstance(error, trio.TooSlowError):
        return TimeoutError()
    if isinstance(error, trio.BrokenResourceError | trio.ClosedResourceError):
        return ConnectionError(str(error))
    return error


def hang_up(stream: trio.SocketStream) -> None:
    """Make every task that uses the stream notice that it is over."""
    try:
        stream.socket.shutdown(socket.SHUT_RDWR)
    except (OSError, trio.ClosedResourceError):
        pass


def let_go(stream: trio.SocketStream) -> None:
    """Close the descriptor without a word to trio: its own close() would reach the loop of the parent of a fork()."""
    os.close(stream.socket.detach())
