"""A consumer of a group, as a program uses it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from types import TracebackType
from typing import Any

from qb.clients.aio.consumer_iteration import AsyncConsumerIteration
from qb.clients.aio.consumer_membership import AsyncConsumerMembership
from qb.clients.aio.subscribing.handler_calls import traced
from qb.clients.aio.waiting import now
from qb.clients.consuming.assigned_partitions import AssignedPartition
from qb.clients.consuming.consumer_options import FetchTerms, checked_options
from qb.clients.credentials import Credentials
from qb.clients.protocol.client_errors import StaleGeneration, UsedAfterFork
from qb.clients.protocol.message import Message
from qb.core.wire.addresses import DEFAULT_HOST, addresses_of


class AsyncConsumer(AsyncConsumerIteration):
    """A member of a consumer group, with a connection of its own. Iterate it, poll() it, or run() a handler.

    A message counts as handled when the next one is asked for, or when the handler has returned. With `auto_commit`
    what is handled is committed every so often, before a partition is given up, and on close(). A lost connection and a
    broker that restarts are survived; then, as after the death of a consumer, what was handled and not committed is
    handled again. One task at a time may take messages. In a child of os.fork() an open consumer is the parent's:
    its use raises UsedAfterFork, stop() and close() do nothing to the parent's.
    It runs under asyncio, under uvloop and under trio.
    It is used inside `async with`, the block that its tasks live in.
    A call that is cancelled leaves the consumer usable.

    Args:
        group_id: The group; its members share the partitions of their topics.
        topics: The name of a topic, or several.
        host: The broker's host name or address, or `qb://host:port`.
        port: The broker's port for binary frames; 9999 if `host` has none either.
        servers: Several addresses, in place of host and port: the first that answers is used, and the next when its
            connection is lost.
        client_id: A name for this client, shown by the broker's tools.
        auto_commit: Commit what is handled without being asked to.
        auto_commit_interval_ms: How often to, in milliseconds.
        start: Where to begin in a partition for which the group has committed nothing: "earliest", "latest", or an
            offset.
        max_poll_records: The most messages that one poll() returns.
        max_bytes: The most bytes that one fetch asks for; a longer message comes alone.
        max_wait_ms: How long a fetch waits for `min_bytes`, in milliseconds.
        min_bytes: How many bytes are worth an answer before that.
        session_timeout: Seconds of silence after which the broker gives this member's partitions to others.
        rebalance_timeout: Seconds that members have to finish their messages when partitions move.
        request_timeout: Seconds that a call waits for the broker.
        heartbeat_interval: Seconds of silence on the connection after which the broker is asked for a sign of life.
        token: The user's token, for a broker with users. It is sent to the broker, and shown nowhere.
        token_file: A file with the token, or with lines `USER TOKEN`, of which `qbs://user@host` takes one.
        ca_file: The authority of the broker's certificate, for `qbs://`; without it those that the system trusts.
        cert_file: A client certificate, PEM.
        key_file: Its private key, PEM, if it is not in `cert_file`.
        compression: "zstd" or "lz4": what is fetched travels compressed, if the broker agrees. It needs the extra
            `qb-broker[compression]`.
        partition: Read this partition of the one topic alone, without sharing it: begin where the group has committed,
            and commit for the group. Other members of the group are not asked.

    Raises:
        ValueError: An argument makes no sense.

    Example:
        >>> async with AsyncConsumer("billing", "orders") as consumer:
        ...     async for message in consumer:
        ...         print(message.text())
    """

    def __init__(
        self,
        group_id: str,
        topics: str | Iterable[str],
        *,
        host: str = DEFAULT_HOST,
        port: int | None = None,
        servers: Sequence[str] = (),
        client_id: str | None = None,
        auto_commit: bool = True,
        auto_commit_interval_ms: int = 5000,
        start: str | int = "earliest",
        max_poll_records: int = 500,
        max_bytes: int = 1 << 20,
        max_wait_ms: int = 10_000,
        min_bytes: int = 1,
        session_timeout: float = 10.0,
        rebalance_timeout: float = 60.0,
        request_timeout: float = 30.0,
        heartbeat_interval: float = 30.0,
        compression: str | None = None,
        partition: int | None = None,
        token: str | None = None,
        token_file: str | None = None,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
    ) -> None:
        options = checked_options(
            group_id,
            topics,
            auto_commit,
            auto_commit_interval_ms,
            start,
            max_poll_records,
            session_timeout,
            rebalance_timeout,
            FetchTerms(max_bytes, max_wait_ms / 1000, min_bytes),
            partition,
        )
        self._member = AsyncConsumerMembership(
            options,
            addresses_of(host, port, servers),
            client_id,
            request_timeout,
            heartbeat_interval,
            compression,
            Credentials(token, token_file, ca_file, cert_file, key_file),
        )
        self._most = max_poll_records
        self._handler: Callable[[Message], Awaitable[object]] | None = None  # of from_config()

    @classmethod
    def from_env(cls, group_id: str, topics: str | Iterable[str], **options: Any) -> AsyncConsumer:
        """Make a consumer of the broker that the command line talks to: see AsyncBrokerClient.from_env().

        Args:
            group_id: The group.
            topics: The name of a topic, or several.
            **options: Arguments of the constructor, which win over the settings.

        Returns:
            The consumer.

        Raises:
            ValueError: A setting makes no sense; the text names it.
        """
        from qb.core.settings import connection_options

        return cls(group_id, topics, **connection_options(**options))

    @classmethod
    def from_config(cls, path: str, handler: Callable[[Message], Awaitable[object]] | None = None) -> AsyncConsumer:
        """Make a consumer from the sections `broker` and `consumer` of a YAML file.

        Args:
            path: The file.
            handler: What run() calls if it is given none.

        Returns:
            The consumer.

        Raises:
            ValueError: A key is unknown, missing, or makes no sense; the text names file, line, key and reason.

        Example:
            >>> async with AsyncConsumer.from_config("consumer.yaml", handle) as consumer:
            ...     await consumer.run()
        """
        from qb.core.settings import consumer_options

        consumer = cls(**consumer_options(path))
        consumer._handler = handler
        return consumer

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._member}>"

    async def __aenter__(self) -> AsyncConsumer:
        await self._member.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._member.close(error)

    async def poll(self, timeout: float = 1.0) -> list[Message]:
        """Return the messages that are there, waiting for the first; those of the last poll count as handled now.

        Args:
            timeout: Seconds to wait for the first message.

        Returns:
            Up to `max_poll_records` messages; none if the time is up or stop() was called.

        Raises:
            BrokerUnavailable: There is no broker at first.
            UnknownTopic: There is no such topic.
            BadName: The group or a topic has a name that breaks the rule for names.
            UsedAfterFork: The consumer was opened by the parent of this process.

        Example:
            >>> for message in await consumer.poll(timeout=5):
            ...     print(message.offset)
        """
        member, most, messages = self._member, self._most, list[Message]()
        held = await member.next(now() + timeout)
        while held is not None and len(messages) < most:
            messages += islice(held.messages, most - len(messages))
            if messages:
                held.handed = messages[-1].offset + 1
            with member.changed:
                held = member.state.take(now()) if len(messages) < most else None
        return messages

    async def run(self, handler: Callable[[Message], Awaitable[object]] | None = None) -> None:
        """Call a handler with each message until stop().

        Args:
            handler: Awaited with one Message at a time. What it raises ends this; the message is not handled then.
                None takes the one that from_config() was given.

        Raises:
            ValueError: There is no handler.
            Exception: What the handler raised, and what poll() raises.

        Example:
            >>> await consumer.run(handle)
        """
        handler = handler or self._handler
        if handler is None:
            raise ValueError("give run() a handler, or from_config()")
        call = traced(handler)
        async for message in self:
            try:
                await call(message)
            except BaseException:
                self._give_back(message)
                raise

    def _give_back(self, message: Message) -> None:
        try:
            self.seek(message.topic, message.partition, message.offset)
        except (StaleGeneration, UsedAfterFork):
            pass  # it belongs to another member, or to the parent of this process

    def stop(self) -> None:
        """End iteration and run() at the next message. For handlers, other threads and signal handlers."""
        self._member.stop()

    async def commit(self, message: Message | None = None) -> None:
        """Commit what was handed out, the message in hand included, and return when that is durable.

        Args:
            message: Commit only the partition of this message, up to and with it; None commits all partitions.

        Raises:
            StaleGeneration: A partition is not this consumer's any more.
            RequestTimedOut: The broker did not answer in time; it may commit yet.
            UsedAfterFork: The consumer was opened by the parent of this process.
        """
        await self._member.commit(message)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on from another offset of a partition that this consumer holds.

        Args:
            topic: The topic.
            partition: The partition.
            offset: The next message to hand out.

        Raises:
            StaleGeneration: This consumer does not hold the partition.
        """
        self._member.seek(AssignedPartition(topic, partition), offset)

    @property
    def assignment(self) -> list[AssignedPartition]:
        """The partitions that this consumer holds now, as (topic, partition)."""
        return self._member.assignment()

    async def close(self) -> None:
        """Commit what is handled (with auto_commit; not what is in hand), leave the group and disconnect."""
        await self._member.leave()
