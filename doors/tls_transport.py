"""A peer's socket with TLS on it: the second transport, behind the interface of the first.

Bytes pass through two memory buffers. So the socket is read by the same poll, and written in the same way, as a plain
one.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

import trio

from qb.core.wire.errors import BadRequest
from qb.doors.socket_poll import RECEIVE_BYTES, SocketPoll
from qb.doors.transport import Transport
from qb.doors.unfinished_input import InputBudget
from qb.doors.unread_output import OutputBudget

log = logging.getLogger("qb.server")

HANDSHAKE_SECONDS = 5.0
HANDSHAKE_BYTES = 65_536
HANDSHAKE_RECORD = 0x16  # how TLS begins
SMALL = 16_384  # bytes of parts that are joined into one record
PLAIN_PEER = (
    "this port speaks TLS, and the peer does not: use qbs:// in place of qb://, or https:// in place of http://"
)

_buffer: trio.lowlevel.RunVar[memoryview] = trio.lowlevel.RunVar("decrypted bytes")


def _plain_buffer() -> memoryview:
    try:
        return _buffer.get()
    except LookupError:
        _buffer.set(memoryview(bytearray(RECEIVE_BYTES)))
        return _buffer.get()


class TlsFailed(Exception):
    """The handshake did not succeed; the text says why."""


class PlainPeer(TlsFailed):
    """What came is not TLS."""


class ServerTls:
    """The certificate in force. Connections that are open keep the one that they began with."""

    def __init__(self, certificate: str, key: str, client_ca: str = "") -> None:
        """`client_ca` is the file of the authority that client certificates must be of. Raises OSError, with words."""
        self._files = certificate, key, client_ca
        self.context = self._load()

    def reload(self) -> None:
        """Read the files again. Raises OSError; then the old certificate stays in force."""
        self.context = self._load()

    def _load(self) -> ssl.SSLContext:
        certificate, key, client_ca = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, key or None)
            if client_ca:
                context.load_verify_locations(client_ca)
                context.verify_mode = ssl.CERT_OPTIONAL
        except OSError as error:  # SSLError is one
            files = ", ".join(filter(None, self._files))
            raise OSError(f"the certificate cannot be used ({files}): {error.strerror or error}") from None
        return context


class TlsTransport(Transport):
    """A stream of bytes to one peer, encrypted. Call handshake() first."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        poll: SocketPoll | None = None,
        incoming: InputBudget | None = None,
        outgoing: OutputBudget | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(sock, poll, incoming, outgoing, check)
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=True)
        self._peeked = b""
        self._is_secure = False  # has the handshake succeeded?
        self._ended = False  # will nothing more come?

    async def handshake(self) -> None:
        """Agree with the peer on how to encrypt. Raises TlsFailed."""
        with trio.move_on_after(HANDSHAKE_SECONDS):
            await self._shake_hands()
        if not self._is_secure:
            raise TlsFailed(f"the TLS handshake took longer than {HANDSHAKE_SECONDS:g} s")

    async def _shake_hands(self) -> None:
        size = 0
        while not self._is_secure:
            try:
                self._tls.do_handshake()
                self._is_secure = True
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLError, ssl.CertificateError) as error:
                self._send_encrypted()
                raise TlsFailed(f"the TLS handshake failed: {error.reason or error}") from None
            self._send_encrypted()
            if not self._is_secure:
                data = await super().receive_view(SMALL)
                if not data:
                    raise TlsFailed("the peer has gone in the TLS handshake")
                if not size and data[0] != HANDSHAKE_RECORD:
                    raise PlainPeer(PLAIN_PEER)
                size += len(data)
                if size > HANDSHAKE_BYTES:
                    raise TlsFailed(f"the TLS handshake took more than {HANDSHAKE_BYTES} bytes")
                self._received.write(data)
        self.common_name = _common_name(self._tls.getpeercert())

    def send_plain(self, data: bytes) -> None:
        """Answer a peer that does not speak TLS."""
        super().send(data)

    # Sending

    def send(self, *parts: bytes | memoryview) -> None:
        if self.gone:
            return
        if len(parts) > 1 and sum(map(len, parts)) <= SMALL:
            parts = (b"".join(parts),)
        try:
            for part in parts:
                if len(part):
                    self._tls.write(part)
        except ssl.SSLError as error:
            self.give_up(f"TLS failed: {error.reason}")
            return
        self._send_encrypted()

    def _send_encrypted(self) -> None:
        if self._to_send.pending:
            super().send(self._to_send.read())

    # Receiving

    def _decrypted(self, most: int = RECEIVE_BYTES) -> memoryview:
        """Return what can be decrypted now, to be used before anything else is awaited."""
        buffer = _plain_buffer()[:most]
        if self._peeked:
            size = min(len(self._peeked), most)
            buffer[:size], self._peeked = self._peeked[:size], self._peeked[size:]
            return buffer[:size]
        size = 0
        while size < len(buffer) and not self._ended:
            try:
                got = self._tls.read(len(buffer) - size, buffer[size:])
            except ssl.SSLWantReadError:
                break
            except ssl.SSLError:  # also the peer's goodbye
                self._ended = True
                break
            self._ended = not got
            size += got  # type: ignore[operator]
        self._send_encrypted()  # TLS may have something to say of its own
        return buffer[:size]

    async def receive_view(self, most: int = RECEIVE_BYTES) -> memoryview:
        while not (data := self._decrypted(most)) and not self._ended:
            encrypted = await super().receive_view()
            self._ended = not encrypted
            self._received.write(encrypted)
        return data

    async def peek(self, size: int) -> bytes:
        self._peeked = self._peeked or bytes(await self.receive_view())
        return self._peeked[:size]

    async def attend(self, take: Callable[[memoryview], bool]) -> bool:
        while data := self._decrypted():
            if not take(data):
                return True
        if self._ended:
            return False
        if self._poll is not None:
            return await super().attend(lambda encrypted: self._take(encrypted, take)) and not self._is_over
        while data := await self.receive_view():
            if not take(data):
                return True
        return False

    @property
    def _is_over(self) -> bool:
        return self._ended and not self._received.pending

    def _take(self, encrypted: memoryview, take: Callable[[memoryview], bool]) -> bool:
        self._received.write(encrypted)
        while data := self._decrypted():
            if not take(data):
                return False
        return not self._ended

    # The end

    async def linger(self) -> None:
        self._say_goodbye()
        await super().linger()

    def close(self) -> None:
        self._say_goodbye()
        super().close()

    def _say_goodbye(self) -> None:
        if self._is_secure and not self.gone:
            self._is_secure = False
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            self._send_encrypted()


def _common_name(certificate: object) -> str | None:
    """Return the common name of a certificate that was verified."""
    if not isinstance(certificate, dict):
        return None
    for names in certificate.get("subject", ()):
        for key, value in names:
            if key == "commonName":
                return str(value)
    return None


def plain_refusal() -> BadRequest:
    """Return what a door says to a peer that does not speak TLS."""
    return BadRequest(PLAIN_PEER)
