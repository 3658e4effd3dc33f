"""The client of a broker."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.link import AsyncLink
from qb.clients.aio.methods.offsets_and_groups import AsyncOffsetAndGroupMethods
from qb.clients.aio.methods.producing import AsyncProducerMethods
from qb.clients.aio.methods.subscriptions import AsyncSubscriptionMethods
from qb.clients.aio.methods.transaction_block import AsyncTransactionMethods
from qb.clients.aio.read_ahead import AsyncReadAhead
from qb.clients.aio.sending.producer import AsyncProducer
from qb.clients.aio.subscribing.joined import AsyncClientSubscriptions
from qb.clients.aio.waiting import now
from qb.clients.credentials import Credentials
from qb.clients.protocol.conversation import Conversation
from qb.clients.protocol.forking import call_in_child
from qb.clients.protocol.partition_spread import TopicRoutes
from qb.clients.results import ServerInfo
from qb.core.wire.addresses import DEFAULT_HOST, addresses_of


class AsyncBrokerClient(
    AsyncProducerMethods, AsyncSubscriptionMethods, AsyncOffsetAndGroupMethods, AsyncTransactionMethods
):
    """A broker, for any number of tasks of one event loop. Every method may wait for up to `request_timeout` seconds.

    Connects again, by itself, whenever the connection is lost. Calls made meanwhile wait for it and raise
    BrokerUnavailable when it takes too long. `idempotent` publishes that were on their way are sent again and are never
    stored twice; without it they raise PublishUncertain. A refusal raises RequestRefused or one of its subclasses.
    It runs under asyncio, under uvloop and under trio.
    It is used inside `async with`, the block that its tasks live in: a call outside it raises RuntimeError.
    A call that is cancelled leaves the client usable; a publish that is cancelled may or may not be stored.

    In a child of os.fork() a client that was opened before raises UsedAfterFork, and to leave it does nothing.

    Args:
        host: The broker's host name or address, or `qb://host:port`, or with TLS `qbs://host:port`.
        port: The broker's port for binary frames; 9999 if `host` has none either.
        client_id: A name for this client, shown by the broker's tools.
        request_timeout: Seconds that a call waits for the broker.
        heartbeat_interval: Seconds of silence on the connection after which the broker is asked for a sign of life.
        idempotent: Publish with numbers, so that what is sent again is stored once.
        servers: Several addresses, in place of host and port: the first that answers is used, and the next when its
            connection is lost.
        compression: "zstd" or "lz4": what is published many at a time, delivered or fetched travels compressed, if the
            broker agrees. It needs the extra `qb-broker[compression]`.
        token: The user's token, for a broker with users. It is sent to the broker, and shown nowhere.
        token_file: A file with the token, or with lines `USER TOKEN`, of which `qbs://user@host` takes one.
        ca_file: The authority of the broker's certificate, for `qbs://`; without it those that the system trusts.
        cert_file: A client certificate, PEM.
        key_file: Its private key, PEM, if it is not in `cert_file`.
        connect_wait: Seconds that the `async with` block tries to connect before it raises BrokerUnavailable; with 0 it
            raises at the first failure.

    Example:
        >>> async with AsyncBrokerClient("qb://127.0.0.1:9999") as client:
        ...     receipt = await client.publish("orders", b"one")
        ...     print(receipt.offset)
    """

    def __init__(
        self,
        host: str = DEFAULT_HOST,
        port: int | None = None,
        client_id: str | None = None,
        *,
        request_timeout: float = 30.0,
        heartbeat_interval: float = 30.0,
        idempotent: bool = True,
        servers: Sequence[str] = (),
        connect_wait: float = 0.0,
        compression: str | None = None,
        token: str | None = None,
        token_file: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
    ) -> None:
        self._servers = addresses_of(host, port, servers)
        self._credentials = Credentials(token, token_file, ca_file, cert_file, key_file)
        self.client_id = client_id
        self._request_timeout, self._connect_wait = request_timeout, connect_wait
        self._heartbeat_interval, self._idempotent = heartbeat_interval, idempotent
        self._routes, self._compression = TopicRoutes(), compression
        self._begin()
        call_in_child(self, AsyncBrokerClient._begin_in_child)

    def _begin(self) -> None:
        """Start out without a connection, a producer id and anything in flight."""
        self._conversation = Conversation(
            self.client_id,
            idempotent=self._idempotent,
            compression=self._compression,
            credentials=self._credentials,
        )
        self._background, self._producers = AsyncBackground(), set()
        self._link = AsyncLink(
            self._servers,
            self._conversation,
            self._background,
            heartbeat_interval=self._heartbeat_interval,
        )
        self._read_ahead = AsyncReadAhead(self._link, self._ask_for)
        self._handling = self._link.listener = AsyncClientSubscriptions(
            self._link, self._conversation, self._background, self._request_timeout
        )

    def _begin_in_child(self) -> None:
        """In a child of fork(): begin anew, unless what was opened stays the parent's."""
        if self._link.may_begin_anew:
            self._begin()

    @classmethod
    def from_env(cls, **options: Any) -> AsyncBrokerClient:
        """Make a client from the settings that the command line reads: `QB_*` variables and the file QB_CONFIG_FILE.

        Args:
            **options: Arguments of the constructor, which win over the settings.

        Returns:
            The client; `async with` connects it.

        Raises:
            ValueError: A setting makes no sense; the text names it.
        """
        from qb.core.settings import connection_options

        return cls(**connection_options(**options))

    def __repr__(self) -> str:
        state = "connected" if self._link.up else "not connected"
        return f"<{type(self).__name__} {self._link.server}, {state}>"

    @property
    def host(self) -> str:
        """The host name or address of the broker; of several, of the one that is used now."""
        return self._link.server.host

    @property
    def port(self) -> int:
        """The port of that broker."""
        return self._link.server.port

    @property
    def max_message_size(self) -> int:
        """The longest body that the broker takes, in bytes; known once connected."""
        return self._conversation.max_message_size

    async def connect(self, wait: float = 0.0) -> None:
        """Connect now, if there is no connection.

        Args:
            wait: Seconds to go on trying for; with 0 the first failure is raised.

        Raises:
            BrokerUnavailable: No broker could be reached; the text says what to check.
            UsedAfterFork: The client was opened by the parent of this process.
        """
        started = self._link.started
        try:
            await self._link.open(self._deadline(wait or self._request_timeout), patient=wait > 0)
        except BaseException:
            if not started:
                await self._link.close()
            raise

    async def disconnect(self) -> None:
        """Leave all subscriptions, close all producers and end the connection; a later call connects anew.

        Calls of other tasks that are on their way raise. In a handler it returns at once, and the rest happens when
        the handler has returned. close() is the same method.
        """
        if self._link.inherited:
            return
        if self._handling.runs_the_caller:
            self._background.start("qb disconnects", self._disconnect, finish=True)
        else:
            await self._disconnect()

    close = disconnect

    async def _disconnect(self) -> None:
        try:
            await self._handling.close()
            for producer in list(self._producers):
                await producer._end(self._request_timeout)
        finally:
            await self._link.close()

    async def __aenter__(self) -> AsyncBrokerClient:
        await self._background.open()
        try:
            await self.connect(self._connect_wait)
        except BaseException as error:
            await self._background.close(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._background.interrupt(error)  # async only
        try:
            await self.disconnect()
        finally:
            await self._background.close(error)

    async def server_info(self) -> ServerInfo:
        """Ask the broker about itself.

        Returns:
            Its version, limits and counts.

        Raises:
            BrokerUnavailable: There is no broker; nothing was asked.
            RequestTimedOut: The broker did not answer within `request_timeout` seconds.
        """
        return ServerInfo(await self._request("server_info"))

    async def ping(self) -> float:
        """Measure a round trip to the broker.

        Returns:
            The seconds that it took.

        Raises:
            BrokerUnavailable: There is no broker; nothing was asked.
            RequestTimedOut: The broker did not answer within `request_timeout` seconds.
        """
        started = now()
        await self._ask(self._conversation.ping)
        return now() - started


AsyncProducer._make_client = AsyncBrokerClient  # for from_config(): the client's methods make producers
