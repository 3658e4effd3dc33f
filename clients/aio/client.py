"""The client of a broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.body_batches import Bodies, portions
from qb.clients.aio.link import AsyncLink
from qb.clients.aio.offsets_and_groups import AsyncOffsetAndGroupMethods
from qb.clients.aio.read_ahead import AsyncReadAhead
from qb.clients.aio.subscribing.joined import AsyncClientSubscriptions
from qb.clients.aio.subscriptions import AsyncSubscriptionMethods
from qb.clients.aio.transactions import AsyncTransactionMethods
from qb.clients.aio.waiting import many_answers, now, one_answer, wait_for_answer
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.conversation import Conversation, answer_of
from qb.clients.protocol.forking import call_in_child
from qb.clients.protocol.partition_spread import PartitionSpread, TopicRoutes, check_keys
from qb.clients.protocol.publish_frames import Body, PublishForm, as_bytes, check_size, form_of
from qb.clients.protocol.publish_tally import PublishTally
from qb.clients.protocol.receipts import Offsets, Receipt
from qb.clients.protocol.unacked_publishes import UnackedBatch
from qb.core.wire.frames import Frame

Send = Callable[[PublishForm, Sequence[bytes]], Awaitable[UnackedBatch]]  # on the link that a publish_many began with


class AsyncBrokerClient(AsyncSubscriptionMethods, AsyncOffsetAndGroupMethods, AsyncTransactionMethods):
    """A broker, for any number of tasks of one trio run. Every method may wait for up to `request_timeout` seconds.

    Connects again, by itself, whenever the connection is lost. Calls made meanwhile wait for it and raise
    BrokerUnavailable when it takes too long. `idempotent` publishes that were on their way are sent again and are never
    stored twice; without it they raise PublishUncertain. A refusal raises RequestRefused or one of its subclasses.
    It is used inside `async with`, the block that its tasks live in: a call outside it raises RuntimeError.
    A call that is cancelled leaves the client usable; a publish that is cancelled may or may not be stored.

    In a child of os.fork() a client that was opened before raises UsedAfterFork, and to leave it does nothing.

    Args:
        host: The broker's host name or address.
        port: The broker's port for binary frames.
        client_id: A name for this client, shown by the broker's tools.
        request_timeout: Seconds that a call waits for the broker.
        heartbeat_interval: Seconds of silence on the connection after which the broker is asked for a sign of life.
        idempotent: Publish with numbers, so that what is sent again is stored once.
        connect_wait: Seconds that the `async with` block tries to connect before it raises BrokerUnavailable; with 0 it
            raises at the first failure.

    Example:
        >>> async with AsyncBrokerClient("127.0.0.1", 9999) as client:
        ...     receipt = await client.publish("orders", b"one")
        ...     print(receipt.offset)
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 9999,
        client_id: str | None = None,
        *,
        request_timeout: float = 30.0,
        heartbeat_interval: float = 30.0,
        idempotent: bool = True,
        connect_wait: float = 0.0,
    ) -> None:
        self.host, self.port, self.client_id = host, port, client_id
        self._request_timeout, self._connect_wait = request_timeout, connect_wait
        self._heartbeat_interval, self._idempotent = heartbeat_interval, idempotent
        self._routes = TopicRoutes()
        self._begin()
        call_in_child(self, AsyncBrokerClient._begin_in_child)

    def _begin(self) -> None:
        """Start out without a connection, a producer id and anything in flight."""
        self._conversation = Conversation(self.client_id, idempotent=self._idempotent)
        self._background = AsyncBackground()
        self._link = AsyncLink(
            self.host,
            self.port,
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
        """Leave all subscriptions and end the connection; a later call connects anew.

        Calls of other tasks that are on their way raise. In a handler it returns at once, and the rest happens when
        the handler has returned.
        """
        if self._link.inherited:
            return
        if self._handling.runs_the_caller:
            self._background.start("qb disconnects", self._disconnect, finish=True)
        else:
            await self._disconnect()

    async def _disconnect(self) -> None:
        try:
            await self._handling.close()
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
        try:
            await self.disconnect()
        finally:
            await self._background.close(error)

    async def create_topic(
        self,
        topic: str,
        partitions: int = 1,
        retention_hours: float | None = None,
        retention_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Create a topic.

        Args:
            topic: Its name: up to 200 characters of A-Z a-z 0-9 . _ -
            partitions: How many partitions it has.
            retention_hours: Messages older than this may be dropped; None keeps them.
            retention_bytes: The oldest messages are dropped when a partition is larger than this; None keeps them.

        Returns:
            The topic as the broker describes it.

        Raises:
            TopicExists: There is one with that name already.
            BadName: The name breaks the rule for names.
            BadRequest: A number makes no sense.
            LimitReached: The broker has as many partitions as its settings allow.

        Example:
            >>> await client.create_topic("orders", partitions=4)
        """
        created: dict[str, Any] = await self._request(
            "create_topic",
            topic=topic,
            partitions=partitions,
            retention_hours=retention_hours,
            retention_bytes=retention_bytes,
        )
        return created

    async def delete_topic(self, topic: str, if_unused: bool = False) -> None:
        """Delete a topic with all its messages.

        Args:
            topic: The topic.
            if_unused: Only if it has no subscriptions.

        Raises:
            UnknownTopic: There is no such topic.
            TopicInUse: It has subscriptions, and `if_unused` was given.
        """
        await self._request("delete_topic", topic=topic, if_unused=if_unused)

    async def list_topics(self) -> list[dict[str, Any]]:
        """List all topics.

        Returns:
            The topics as the broker describes them.
        """
        topics: list[dict[str, Any]] = await self._request("list_topics")
        return topics

    async def describe_topic(self, topic: str) -> dict[str, Any]:
        """Describe a topic.

        Args:
            topic: The topic.

        Returns:
            The topic with its partitions, offsets and sizes.

        Raises:
            UnknownTopic: There is no such topic.
        """
        described: dict[str, Any] = await self._request("describe_topic", topic=topic)
        return described

    async def describe_topics(self, topics: Iterable[str]) -> list[dict[str, Any]]:
        """Describe several topics, all as they are at one moment.

        Args:
            topics: The names of the topics.

        Returns:
            What describe_topic() returns for each.

        Raises:
            UnknownTopic: One of them does not exist.
        """
        described: list[dict[str, Any]] = await self._request("describe_topics", topics=list(topics))
        return described

    async def server_info(self) -> dict[str, Any]:
        """Ask the broker about itself.

        Returns:
            Its version, limits and counts.
        """
        info: dict[str, Any] = await self._request("server_info")
        return info

    async def ping(self) -> float:
        """Measure a round trip to the broker.

        Returns:
            The seconds that it took.
        """
        started = now()
        await self._ask(self._conversation.ping)
        return now() - started

    async def publish(
        self,
        topic: str,
        data: Body,
        partition: int | None = None,
        key: str | None = None,
        *,
        timestamp_ms: int = 0,
        **properties: str,
    ) -> Receipt:
        """Store one message, and return when the broker has it.

        Args:
            topic: The topic.
            data: The body: bytes, a bytearray or a memoryview.
            partition: The partition; None lets the key or the broker choose.
            key: Messages with one key go to one partition, in order.
            timestamp_ms: The time of the message in milliseconds since 1970; 0 takes the broker's clock.
            **properties: Text to store beside the body.

        Returns:
            Where the message is, and how safely it is stored.

        Raises:
            UnknownTopic: There is no such topic, and the broker does not create it.
            UnknownPartition: The topic has no such partition.
            MessageTooLarge: The body is longer than `max_message_size`.
            BadRequest: A property has a reserved name, or an argument makes no sense.
            BrokerUnavailable: There is no broker; nothing was sent.
            PublishUncertain: The answer was lost for good: it may or may not be stored.
            TypeError: The body is not bytes.

        Example:
            >>> receipt = await client.publish("orders", b"one", key="customer-7", colour="red")
        """
        form = form_of(topic, partition, key, properties, timestamp_ms)
        body = data if type(data) is bytes else as_bytes(data)
        check_size(body, self._conversation.max_message_size)
        link, deadline, answered = self._link, self._deadline(), one_answer()
        batch = await link.publish(form, (body,), answered, deadline)
        try:
            await link.wait(answered, deadline)
        finally:
            if batch.left:
                link.abandon(batch)
        return batch.receipt(topic)

    async def publish_text(
        self,
        topic: str,
        text: str,
        partition: int | None = None,
        key: str | None = None,
        *,
        timestamp_ms: int = 0,
        **properties: str,
    ) -> Receipt:
        """Store one message whose body is a text in UTF-8.

        Args:
            topic: The topic.
            text: The body.
            partition: The partition; None lets the key or the broker choose.
            key: Messages with one key go to one partition, in order.
            timestamp_ms: The time of the message in milliseconds since 1970; 0 takes the broker's clock.
            **properties: Text to store beside the body.

        Returns:
            Where the message is, and how safely it is stored.

        Raises:
            QBError: As publish().
        """
        return await self.publish(topic, text.encode(), partition, key, timestamp_ms=timestamp_ms, **properties)

    async def publish_many(
        self,
        topic: str,
        bodies: Bodies,
        partition: int | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        *,
        keys: Iterable[str | None] | None = None,
        timestamp_ms: int = 0,
    ) -> Offsets:
        """Store many messages in order, with many in flight at once.

        In a topic with several partitions, bodies with a key go where it belongs and the others take turns, unless all
        go to one `partition`. Stops at the first failure and raises once all that is on its way is settled.

        Args:
            topic: The topic.
            bodies: The bodies; from a generator, sync or async: no more of them are held than are in flight.
            partition: The partition of all of them.
            key: The key of all of them.
            properties: Text to store beside each body.
            keys: The key of each body, as many as there are bodies; None stands for no key.
            timestamp_ms: The time of all of them in milliseconds since 1970; 0 takes the broker's clock.

        Returns:
            The offsets of the bodies, as a compact sequence; its `partitions` says where each is.

        Raises:
            PublishFailed: A body was refused; see `index` and `stored`.
            PublishUncertain: From body `index` on it is not known what is stored.
            Exception: What the iterable itself raised, unchanged.

        Example:
            >>> offsets = await client.publish_many("orders", [b"a", b"b"], keys=["k1", "k2"])
        """
        form = PublishForm(topic, partition, key, properties, timestamp_ms)
        check_keys(partition, key, keys)
        await self._link.open(self._deadline(), patient=True)  # to know the broker's size limit
        tally, answered, link = PublishTally(), many_answers(), self._link
        count = await self._partitions_of(topic) if partition is None and key is None else 1

        async def send(form: PublishForm, bodies: Sequence[bytes]) -> UnackedBatch:
            return await link.publish(form, bodies, answered, self._deadline(), tally.check)

        try:
            with link.attended():
                if count > 1 or keys is not None:
                    scatter = PartitionSpread(topic, count, self._routes, properties, timestamp_ms)
                    await self._scatter(scatter, bodies, keys, tally, send)
                else:
                    await self._send_many(form, bodies, tally, send)
                patience = 0 if tally.hopeless else self._request_timeout
                while tally.pending and await wait_for_answer(answered, patience):
                    tally.collect()
        finally:
            for _, batch in tally.pending:
                link.abandon(batch)
        return self._routes.checked(topic, tally)

    async def _partitions_of(self, topic: str) -> int:
        """Return how many partitions a topic has; 1 if that cannot be found out: then the broker does the routing."""
        try:
            return await self._count_partitions(topic)
        except QBError:
            return 1

    async def _count_partitions(self, topic: str, expected: int = 1) -> int:
        """Return how many partitions a topic has; if fewer than expected were known, the broker is asked again."""
        count = self._routes.partitions(topic, now())
        if count is None or count < expected:
            described = await self.describe_topic(topic)
            count = described.get("partitions", 1)
            self._routes.learn(topic, count, now())
        return count

    async def _scatter(
        self,
        scatter: PartitionSpread,
        bodies: Bodies,
        keys: Iterable[str | None] | None,
        tally: PublishTally,
        send: Send,
    ) -> None:
        """Send to several partitions until the bodies end or something fails, which is noted in the tally."""
        try:
            bodies = bodies if keys is None else scatter.with_keys(bodies, keys)
            limit = self._conversation.max_message_size
            async with aclosing(portions(bodies, scatter.overhead, limit, scatter.block_bytes)) as blocks:
                async for block in blocks:
                    for _, indexes, form, some in scatter.pieces(block):
                        tally.add(await send(form, some), indexes)
        except Exception as error:
            tally.fail(scatter.next_index, error)

    async def _send_many(self, form: PublishForm, bodies: Bodies, tally: PublishTally, send: Send) -> None:
        """Send until the bodies end or something fails, which is noted in the tally."""
        try:
            async with aclosing(portions(bodies, form.overhead, self._conversation.max_message_size)) as pieces:
                async for portion in pieces:
                    tally.add(await send(form, portion))
        except Exception as error:
            tally.fail(tally.sent, error)

    async def _request(self, method: str, **arguments: Any) -> Any:
        return answer_of(await self._ask(lambda: self._conversation.request(method, arguments)))

    async def _ask(self, compose: Callable[[], tuple[int, bytes]]) -> Frame:
        return await self._link.ask(compose, self._deadline())

    def _deadline(self, seconds: float | None = None) -> float:
        return now() + (self._request_timeout if seconds is None else seconds)
