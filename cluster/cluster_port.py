"""The port on which the brokers of a cell reach each other. It is open for the whole life of the process.

So a port that refuses connections means that the process is gone (or that a firewall refuses: see docs/CLUSTER.md).
A connection that says nothing only watches that. Others are relays, which an owner takes; with certificates of the
cluster they are encrypted, and none is believed before its handshake (cluster_tls.py).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio

from qb.cluster.cluster_tls import ClusterTls, ClusterTlsFailed, pass_on
from qb.cluster.relays.relay_protocol import MOST_LINE, RelayPreamble, RelayRefused, decode_preamble
from qb.core.wire.addresses import parse_address

log = logging.getLogger("qb.cluster")

CONNECT_SECONDS = 1.0
PREAMBLE_SECONDS = 5.0  # from its first byte on
MOST = 20_000  # connections at once; one more is closed

Welcome = Callable[[socket.socket, RelayPreamble], None]
Dial = Callable[[str], Awaitable[trio.abc.Stream]]


async def connect(address: str) -> trio.SocketStream:
    """Return a connection to the cluster port of a broker. Raises OSError: ConnectionRefusedError if it refuses."""
    host, port = parse_address(address)
    try:
        with trio.fail_after(CONNECT_SECONDS):
            return await trio.open_tcp_stream(host, port, happy_eyeballs_delay=0.1)
    except trio.TooSlowError:
        raise TimeoutError(f"{address} does not answer") from None
    except OSError as error:
        causes = error.__cause__.exceptions if isinstance(error.__cause__, BaseExceptionGroup) else [error]
        if all(isinstance(cause, ConnectionRefusedError) for cause in causes):
            raise ConnectionRefusedError(f"{address} refuses connections") from None
        raise


async def dial(address: str, tls: ClusterTls | None) -> trio.abc.Stream:
    """Return a connection for a relay, encrypted if this cluster has certificates. Raises OSError."""
    stream = await connect(address)
    return stream if tls is None else await tls.dialled(stream)


class ClusterPort:
    """Accepts the other brokers."""

    def __init__(self, listeners: Sequence[socket.socket], tls: ClusterTls | None = None) -> None:
        """With `tls` a relay is taken only from a peer with a certificate of the cluster."""
        self._listeners, self._tls = listeners, tls
        self.welcome: Welcome | None = None  # takes the relays while this broker owns the cell

    @property
    def is_encrypted(self) -> bool:
        """Do only peers with a certificate of the cluster get in?"""
        return self._tls is not None

    async def run(self) -> None:
        """Accept connections, for ever."""
        async with trio.open_nursery() as nursery:
            for listener in self._listeners:
                nursery.start_soon(self._accept, listener, nursery)

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener)
            try:
                sock, _ = listener.accept()
            except OSError:
                await trio.sleep(0.1)
                continue
            sock.setblocking(False)
            if len(nursery.child_tasks) > MOST:
                sock.close()
            else:
                nursery.start_soon(self._accepted, sock)

    async def _accepted(self, sock: socket.socket) -> None:
        """Hear who it is; a relay is handed over, all else is closed when it has ended."""
        given = False
        try:
            await trio.lowlevel.wait_readable(sock)  # for ever: it may only watch
            if self._tls is not None:
                given = True
                await self._accepted_by_tls(sock, self._tls)
                return
            with trio.move_on_after(PREAMBLE_SECONDS):
                line = await _first_line(sock)
                if line and self.welcome is not None:
                    self.welcome(sock, decode_preamble(line))
                    given = True
        except (RelayRefused, ClusterTlsFailed) as error:
            log.warning("refused a connection to the cluster port: %s", error)
        except trio.TooSlowError:
            log.warning("refused a connection to the cluster port: it did not say who it is within a few seconds")
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except Exception:  # what one connection says ends no broker
            log.exception("a connection to the cluster port ended by a fault of ours")
        finally:
            if not given:
                trio.lowlevel.notify_closing(sock)
                sock.close()

    async def _accepted_by_tls(self, sock: socket.socket, tls: ClusterTls) -> None:
        """Shake hands, hear who it is, and pass the bytes on to a plain connection within this process."""
        async with trio.SocketStream(trio.socket.from_stdlib_socket(sock)) as plain:
            with trio.fail_after(PREAMBLE_SECONDS):
                stream = await tls.accepted(plain)
                said = bytearray()
                while b"\n" not in said:
                    if len(said) >= MOST_LINE:
                        raise RelayRefused("its first line is too long")
                    data = await stream.receive_some(MOST_LINE)
                    if not data:
                        return
                    said += data
            line, _, rest = bytes(said).partition(b"\n")
            preamble = decode_preamble(line + b"\n")
            if self.welcome is None:
                return
            ours, theirs = socket.socketpair()
            try:
                theirs.setblocking(False)
                self.welcome(theirs, preamble)
            except BaseException:
                ours.close()
                theirs.close()
                raise
            await pass_on(stream, trio.SocketStream(trio.socket.from_stdlib_socket(ours)), rest)


async def _first_line(sock: socket.socket) -> bytes:
    """Take the first line, and nothing behind it; b"" if the peer has gone. Raises RelayRefused, OSError."""
    while True:
        await trio.lowlevel.wait_readable(sock)
        with suppress(BlockingIOError):
            seen = sock.recv(MOST_LINE, socket.MSG_PEEK)
            end = seen.find(b"\n") + 1
            if end:
                return sock.recv(end)
            if not seen:
                return b""
            if len(seen) == MOST_LINE:
                raise RelayRefused("its first line is too long")
        await trio.sleep(0.005)  # what has come is there still, so the socket stays readable
