"""AsyncBrokerClient, for trio."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any

import trio

from qb.clients.aio.body_batches import portions
from qb.clients.aio.joined import AsyncJoinedSubscribers
from qb.clients.aio.link import AsyncLink
from qb.clients.aio.offsets_and_groups import AsyncOffsetAndGroupMethods
from qb.clients.aio.subscriptions import AsyncSubscriptionMethods
from qb.clients.aio.transactions import AsyncTransactionMethods
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.conversation import Conversation, answer_of
from qb.clients.protocol.partition_spread import PartitionSpread, TopicRoutes, check_keys
from qb.clients.protocol.publish_frames import Body, PublishForm, as_bytes, check_size, form_of
from qb.clients.protocol.publish_tally import PublishTally
from qb.clients.protocol.receipts import Offsets, Receipt
from qb.core.wire.frames import Frame


class AsyncBrokerClient(AsyncSubscriptionMethods, AsyncOffsetAndGroupMethods, AsyncTransactionMethods):
    """A broker, for any number of tasks of one trio run; as BrokerClient, which see.

    A call that is cancelled leaves the client usable. A publish that is cancelled may or may not be stored. In a child
    of os.fork() a client that was opened before raises UsedAfterFork, and to leave it there does nothing.
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
    ) -> None:
        self.host, self.port, self.client_id = host, port, client_id
        self._request_timeout = request_timeout
        self._conversation = Conversation(client_id, idempotent=idempotent)
        self._routes = TopicRoutes()
        self._link = AsyncLink(host, port, self._conversation, heartbeat_interval=heartbeat_interval)
        self._handling = self._link.listener = AsyncJoinedSubscribers(self._link, self._conversation, request_timeout)

    @property
    def max_message_size(self) -> int:
        """The longest body that the broker takes; known once connected."""
        return self._conversation.max_message_size

    async def connect(self, wait: float = 0.0) -> None:
        """Connect now. Raises BrokerUnavailable if that fails: at once, or after `wait` seconds of trying again."""
        started = self._link.started
        try:
            await self._link.open(self._deadline(wait or self._request_timeout), patient=wait > 0)
        except BaseException:
            if not started:
                await self._link.close()
            raise

    async def disconnect(self) -> None:
        """Leave all subscriptions and end the connection; a later call connects anew.

        Calls of other tasks that are on their way raise. In a handler it returns at once, and the rest happens when the
        handler has returned.
        """
        if self._link.inherited:
            return
        if self._handling.runs_the_caller:
            trio.lowlevel.spawn_system_task(self._disconnect)
        else:
            await self._disconnect()

    async def _disconnect(self) -> None:
        try:
            await self._handling.close()
        finally:
            await self._link.close()

    async def __aenter__(self) -> AsyncBrokerClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.disconnect()

    async def create_topic(
        self,
        topic: str,
        partitions: int = 1,
        retention_hours: float | None = None,
        retention_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Make a topic and return it. Raises TopicExists, BadName, BadRequest."""
        created: dict[str, Any] = await self._request(
            "create_topic",
            topic=topic,
            partitions=partitions,
            retention_hours=retention_hours,
            retention_bytes=retention_bytes,
        )
        return created

    async def delete_topic(self, topic: str, if_unused: bool = False) -> None:
        """Delete a topic with all its messages. Raises UnknownTopic, and TopicInUse with `if_unused`."""
        await self._request("delete_topic", topic=topic, if_unused=if_unused)

    async def list_topics(self) -> list[dict[str, Any]]:
        """Return every topic."""
        topics: list[dict[str, Any]] = await self._request("list_topics")
        return topics

    async def describe_topic(self, topic: str) -> dict[str, Any]:
        """Return a topic with its partitions, offsets and sizes. Raises UnknownTopic."""
        described: dict[str, Any] = await self._request("describe_topic", topic=topic)
        return described

    async def describe_topics(self, topics: Iterable[str]) -> list[dict[str, Any]]:
        """Return these topics as describe_topic() does, all as they are at one moment. Raises UnknownTopic."""
        described: list[dict[str, Any]] = await self._request("describe_topics", topics=list(topics))
        return described

    async def server_info(self) -> dict[str, Any]:
        """Return what the broker says about itself."""
        info: dict[str, Any] = await self._request("server_info")
        return info

    async def ping(self) -> float:
        """Return the seconds that a round trip to the broker takes."""
        started = trio.current_time()
        await self._ask(self._conversation.ping)
        return trio.current_time() - started

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
        """Store one message and return where it is. `timestamp_ms` 0 is replaced by the broker's clock.

        Raises PublishUncertain if the answer is lost for good.
        """
        form, body = form_of(topic, partition, key, properties, timestamp_ms), as_bytes(data)
        check_size(body, self._conversation.max_message_size)
        deadline, answered = self._deadline(), trio.Semaphore(0)
        batch = await self._link.publish(form, (body,), answered, deadline)
        try:
            with trio.CancelScope(deadline=deadline):
                await answered.acquire()
        finally:
            self._link.abandon(batch)
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
        """Store one message whose body is the text in UTF-8; see publish()."""
        return await self.publish(topic, text.encode(), partition, key, timestamp_ms=timestamp_ms, **properties)

    async def publish_many(
        self,
        topic: str,
        bodies: Iterable[Body] | AsyncIterable[Body],
        partition: int | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        *,
        keys: Iterable[str | None] | None = None,
        timestamp_ms: int = 0,
    ) -> Offsets:
        """Store the bodies in order, many in flight at once, and return their offsets: a compact sequence of ints.

        The bodies may come from an asynchronous iterable too; for the rest see BrokerClient.publish_many. If
        cancelled, what is on its way may or may not be stored.
        """
        form = PublishForm(topic, partition, key, properties, timestamp_ms)
        check_keys(partition, key, keys)
        await self._link.open(self._deadline(), patient=True)  # to know the broker's size limit
        tally, answered = PublishTally(), trio.Semaphore(0)
        count = await self._partitions_of(topic) if partition is None and key is None else 1
        try:
            if count > 1 or keys is not None:
                scatter = PartitionSpread(topic, count, self._routes, properties, timestamp_ms)
                await self._scatter(scatter, bodies, keys, tally, answered)
            else:
                await self._send_many(form, bodies, tally, answered)
            await self._settle(tally, answered)
        finally:
            for _, batch in tally.pending:
                self._link.abandon(batch)
        return self._routes.checked(topic, tally)

    async def _partitions_of(self, topic: str) -> int:
        """Return how many partitions a topic has; 1 if that cannot be found out: then the broker does the routing."""
        try:
            return await self._count_partitions(topic)
        except QBError:
            return 1

    async def _count_partitions(self, topic: str, expected: int = 1) -> int:
        """Return how many partitions a topic has; if fewer than expected were known, the broker is asked again."""
        count = self._routes.partitions(topic, trio.current_time())
        if count is None or count < expected:
            count = (await self.describe_topic(topic)).get("partitions", 1)
            self._routes.learn(topic, count, trio.current_time())
        return count

    async def _scatter(
        self,
        scatter: PartitionSpread,
        bodies: Iterable[Body] | AsyncIterable[Body],
        keys: Iterable[str | None] | None,
        tally: PublishTally,
        answered: trio.Semaphore,
    ) -> None:
        """Send to several partitions until the bodies end or something fails, which is noted in the tally."""
        try:
            bodies = bodies if keys is None else scatter.with_keys(bodies, keys)
            limit = self._conversation.max_message_size
            async with aclosing(portions(bodies, scatter.overhead, limit, scatter.block_bytes)) as blocks:
                async for block in blocks:
                    for _, indexes, form, some in scatter.pieces(block):
                        batch = await self._link.publish(form, some, answered, self._deadline(), tally.check)
                        tally.add(batch, indexes)
        except Exception as error:
            tally.fail(scatter.next_index, error)

    async def _send_many(
        self,
        form: PublishForm,
        bodies: Iterable[Body] | AsyncIterable[Body],
        tally: PublishTally,
        answered: trio.Semaphore,
    ) -> None:
        """Send until the bodies end or something fails, which is noted in the tally."""
        try:
            async with aclosing(portions(bodies, form.overhead, self._conversation.max_message_size)) as pieces:
                async for portion in pieces:
                    batch = await self._link.publish(form, portion, answered, self._deadline(), tally.check)
                    tally.add(batch)
        except Exception as error:
            tally.fail(tally.sent, error)

    async def _settle(self, tally: PublishTally, answered: trio.Semaphore) -> None:
        """Wait until everything sent is answered, or until nothing more comes."""
        patience = 0 if tally.hopeless else self._request_timeout
        while tally.pending:
            with trio.move_on_after(patience) as scope:
                await answered.acquire()
            if scope.cancelled_caught:
                return
            tally.collect()

    async def _request(self, method: str, **arguments: Any) -> Any:
        return answer_of(await self._ask(lambda: self._conversation.request(method, arguments)))

    async def _ask(self, compose: Callable[[], tuple[int, bytes]]) -> Frame:
        return await self._link.ask(compose, self._deadline())

    def _deadline(self, seconds: float | None = None) -> float:
        return trio.current_time() + (self._request_timeout if seconds is None else seconds)
