"""The NATS client on trio: one connection at a time, to any server of the cluster."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import trio

from qb.replication.nats.nats_conversation import NatsConversation, NatsDisconnected, Received, Replied
from qb.replication.nats.nats_link import CHUNK, NatsLink, PlainLink, TlsLink
from qb.replication.nats.nats_protocol import NatsCredentials, NatsError, NatsMessage, NatsServerInfo
from qb.replication.nats.server_pool import NatsAddress, ServerPool, parse_address
from qb.storage.signals import Signal

logger = logging.getLogger(__name__)

CONNECT_LIMIT = 2.0  # seconds for TCP, INFO, TLS and the first PONG
PING_INTERVAL = 2.0  # seconds; after three of them without an answer the connection is lost: well within a lease
LOST = (NatsError, OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError)


class NatsRefused(NatsError):
    """The server does not let us in."""


class NatsClient:
    """Belongs to the event loop's thread. `run()` keeps it connected; requests without a connection fail at once."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        name: str = "qb",
        credentials: NatsCredentials | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Use these servers (`nats://user:password@host:4222`), and those that they name.

        `credentials` go before those in an address. `tls`: for servers that want TLS; else the system's authorities
        are trusted. Raises ValueError for an address that cannot be read.
        """
        addresses = [parse_address(server) for server in servers]
        self._pool = ServerPool(address for address, _ in addresses)
        found = next((each for _, each in addresses if any(each)), NatsCredentials())
        self._conversation = NatsConversation(name, credentials or found)
        self._tls = tls
        self._link: NatsLink | None = None  # while the task that sends has nothing to do
        self._output = Signal()
        self._changed = Signal()

    @property
    def is_connected(self) -> bool:
        return self._conversation.is_ready

    @property
    def server(self) -> NatsServerInfo | None:
        """The server that is connected."""
        return self._conversation.info if self._conversation.is_ready else None

    async def wait_connected(self) -> NatsServerInfo:
        """Return when there is a connection; give it a time limit."""
        while (server := self.server) is None:
            await self._changed.wait()
        return server

    def publish(
        self, subject: str, payload: bytes, headers: Mapping[str, object] | None = None, *, reply: str = ""
    ) -> None:
        """Send a message; it is lost without a connection. Does not block."""
        self._conversation.publish(subject, payload, headers, reply=reply)
        self._output.set()

    def send_request(
        self,
        subject: str,
        payload: bytes,
        replied: Replied,
        headers: Mapping[str, object] | None = None,
        *,
        many: bool = False,
    ) -> str | None:
        """Send a request. Does not block; `replied` is called once, later, unless forget() comes before.

        With `many`, it is called for every answer until forget(), or until it has been called with an error.
        Returns its token, or None if there is no connection: then `replied` is never called.
        """
        is_alone = self._conversation.is_idle
        token = self._conversation.request(subject, payload, replied, headers, many=many)
        if is_alone:
            self._send_now()
        if self._conversation.has_output:
            self._output.set()
        return token

    def _send_now(self) -> None:
        """Send what nothing is before. What comes behind it in this step is sent together, by the task that sends."""
        if self._link is None:
            return
        data = self._conversation.take_output()
        with suppress(OSError):  # the task that receives finds out
            del data[: self._link.send_now(data)]
        self._conversation.give_back(data)

    def forget(self, token: str) -> Replied | None:
        """Stop waiting for an answer; returns what waits, if none has come."""
        return self._conversation.forget(token)

    async def request(
        self, subject: str, payload: bytes = b"", *, timeout: float = 5.0, headers: Mapping[str, object] | None = None
    ) -> NatsMessage:
        """Return the answer to a request.

        Raises NoResponders, NatsDisconnected, trio.TooSlowError; the request may have been carried out nevertheless.
        """
        answers: list[NatsMessage | NatsError] = []
        came = trio.Event()

        def replied(answer: NatsMessage | NatsError) -> None:
            answers.append(answer)
            came.set()

        token = self.send_request(subject, payload, replied, headers)
        if token is None:
            raise NatsDisconnected("there is no connection to NATS")
        try:
            with trio.fail_after(timeout):
                await came.wait()
        finally:
            self.forget(token)
        if isinstance(answers[0], NatsError):
            raise answers[0]
        return answers[0]

    def subscribe(self, subject: str, received: Received, lost: Callable[[], None] | None = None) -> int:
        """Have messages handed to `received`, across reconnects. Returns its number for unsubscribe().

        `lost` is called whenever a connection is gone: messages of it may be missing.
        """
        sid = self._conversation.subscribe(subject, received, lost)
        self._output.set()
        return sid

    def unsubscribe(self, sid: int) -> None:
        """End a subscription."""
        self._conversation.unsubscribe(sid)
        self._output.set()

    def new_inbox(self) -> str:
        """Return a subject of our own, for answers that keep the subject under which they were published."""
        return self._conversation.new_inbox()

    async def run(self) -> None:
        """Stay connected, until it is cancelled."""
        while True:
            address, pause = self._pool.next()
            await trio.sleep(pause)
            try:
                await self._converse(address)
            except* LOST as errors:
                logger.warning("NATS at %s: %s", address, _first(errors))

    async def _converse(self, address: NatsAddress) -> None:
        link: NatsLink | None = None
        try:
            with trio.fail_after(CONNECT_LIMIT):
                link = await self._welcome(address)
            self._pool.connected()
            self._changed.set()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send, link)
                nursery.start_soon(self._keep_alive, nursery.cancel_scope)
                await self._receive(link)
                nursery.cancel_scope.cancel()
            raise NatsDisconnected(self._conversation.refusal or "the connection was closed")
        finally:
            self._link = None
            self._conversation.disconnected()
            self._changed.set()
            if link is not None:
                with trio.CancelScope(shield=True):
                    await link.aclose()

    async def _welcome(self, address: NatsAddress) -> NatsLink:
        """Connect, and be let in."""
        plain = await trio.open_tcp_stream(address.host, address.port, happy_eyeballs_delay=0.1)
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = plain
        try:
            stream = await self._greet(plain, address)
        except BaseException:
            await trio.aclose_forcefully(plain)
            raise
        return TlsLink(stream) if isinstance(stream, trio.SSLStream) else PlainLink(stream)

    async def _greet(
        self, plain: trio.SocketStream, address: NatsAddress
    ) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
        """INFO, TLS, CONNECT, the first PONG."""
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = plain
        talk = self._conversation
        while talk.info is None:
            talk.receive(await _some(stream))
        wants_tls = address.tls or talk.info.tls_required or self._tls is not None  # else TLS could be stripped
        if wants_tls:
            context = self._tls or ssl.create_default_context()
            stream = trio.SSLStream(plain, context, server_hostname=address.host)
            await stream.do_handshake()
        talk.greet(tls=wants_tls)
        await stream.send_all(talk.take_output())
        while not talk.is_ready:
            data = bytes(await stream.receive_some(CHUNK))
            if not data:
                raise NatsRefused(talk.refusal or "the server closed the connection before it let us in")
            talk.receive(data)
        self._discover()
        return stream

    def _discover(self) -> None:
        if self._conversation.info is not None:
            with suppress(ValueError):
                self._pool.discovered(self._conversation.info.connect_urls)

    async def _receive(self, link: NatsLink) -> None:
        while any(came := await link.receive(self._conversation.rest)):
            filled, data = came
            info = self._conversation.info
            self._conversation.receive(data, filled)
            if self._conversation.info is not info:
                self._discover()
            if self._conversation.has_output:
                self._output.set()

    async def _send(self, link: NatsLink) -> None:
        while True:
            if data := self._conversation.take_output():
                self._link = None
                await link.send(data)
            else:
                self._link = link
                await self._output.wait()

    async def _keep_alive(self, scope: trio.CancelScope) -> None:
        while self._conversation.ping():
            self._output.set()
            await trio.sleep(PING_INTERVAL)
        scope.cancel()


def _first(error: BaseException) -> str:
    """Return the text of the first error in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


async def _some(stream: trio.abc.Stream) -> bytes:
    data = bytes(await stream.receive_some(CHUNK))
    if not data:
        raise NatsDisconnected("the server closed the connection before it said what it is")
    return data
