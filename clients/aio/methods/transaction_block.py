"""A transaction as a block of a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import aclosing, suppress
from datetime import datetime
from types import TracebackType
from typing import Any

from qb.clients.aio.body_batches import Bodies, portions
from qb.clients.aio.methods.stages import AsyncStage
from qb.clients.aio.methods.transactions import AsyncTransactionRequests
from qb.clients.aio.waiting import now, shielded
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.fetch_requests import milliseconds
from qb.clients.protocol.message import to_json
from qb.clients.protocol.partition_spread import PartitionSpread, SinglePartition, check_keys
from qb.clients.protocol.publish_frames import Body, PublishForm
from qb.clients.protocol.staged_messages import (
    ABORT_PATIENCE,
    StagePortion,
    TransactionDraft,
    TransactionReceipt,
    unlearn,
)
from qb.clients.tracing import carried
from qb.core.wire.clock import now_ms


class AsyncTransaction:
    """Messages that are published together or not at all, in an `async with` block. For one task.

    Returned by AsyncBrokerClient.transaction(). `replayed` says in the block that it was committed before: then
    nothing of it is sent. `receipt` says after the block what was committed. In a child of os.fork() an open one is
    the parent's: it raises UsedAfterFork and is neither committed nor aborted.

    Args:
        client: The client.
        transaction_id: The name of the transaction.
        number: Its number among those of the same name, or None.
    """

    def __init__(self, client: AsyncTransactionRequests, transaction_id: str, number: int | None) -> None:
        self.transaction_id, self.number = transaction_id, number
        self.replayed = False
        self.receipt: TransactionReceipt | None = None
        self._client, self._routes, self._link = client, client._routes, client._link
        self._draft = TransactionDraft()
        self._stage: AsyncStage | None = None
        self._open = False

    def __repr__(self) -> str:
        name = self.transaction_id if self.number is None else f"{self.transaction_id} number {self.number}"
        committed = self.receipt is not None
        state = "committed" if committed else "replayed" if self.replayed else "open" if self._open else "not open"
        return f"<{type(self).__name__} {name}, {state}>"

    async def __aenter__(self) -> AsyncTransaction:
        self._link = self._client._link
        if self._client._conversation.transaction_bytes:  # it may fit into one frame: a stage is begun if it does not
            self.replayed = await self._client._is_committed(self.transaction_id, self.number)
        else:
            self._stage = await self._client.begin_transaction(self.transaction_id, self.number)
            self.replayed = self._stage is None
        self._open = True
        return self

    async def publish(
        self,
        topic: str,
        data: Body,
        partition: int | None = None,
        key: str | None = None,
        *,
        timestamp_ms: int | datetime = 0,
        properties: Mapping[str, str] | None = None,
        **more: str,
    ) -> None:
        """Add one message.

        Args:
            topic: The topic.
            data: The body: bytes, a bytearray or a memoryview.
            partition: The partition; None lets the key choose, or takes turns.
            key: Messages with one key go to one partition, in order.
            timestamp_ms: The time of the message: a datetime, or milliseconds since 1970; 0 takes this client's clock.
            properties: Text to store beside the body.
            **more: More of it, as keywords.

        Raises:
            UnknownTopic: There is no such topic.
            UnknownPartition: The topic has no such partition.
            MessageTooLarge: The body is longer than the broker takes.
            BadRequest: A property has a reserved name, or an argument makes no sense.
            TypeError: The body is not bytes.
            QBError: As AsyncStage.add().
        """
        beside = carried({**(properties or {}), **more})
        form = PublishForm(topic, partition, key, beside, milliseconds(timestamp_ms) or now_ms())
        partition = self._routes.choose(topic, partition, key, await self._partitions(topic, partition))
        await self._add(SinglePartition(form, partition), (data,))

    async def publish_json(
        self,
        topic: str,
        value: Any,
        partition: int | None = None,
        key: str | None = None,
        *,
        timestamp_ms: int | datetime = 0,
        properties: Mapping[str, str] | None = None,
        **more: str,
    ) -> None:
        """Add one message whose body is a value in JSON.

        Args:
            topic: The topic.
            value: What JSON can carry: also a dataclass, a datetime, a msgspec.Struct and the like.
            partition: The partition; None lets the key choose, or takes turns.
            key: Messages with one key go to one partition, in order.
            timestamp_ms: The time of the message: a datetime, or milliseconds since 1970; 0 takes this client's clock.
            properties: Text to store beside the body.
            **more: More of it, as keywords.

        Raises:
            TypeError: JSON cannot carry the value.
            QBError: As publish().
        """
        beside = {**(properties or {}), **more}
        await self.publish(topic, to_json(value), partition, key, timestamp_ms=timestamp_ms, properties=beside)

    async def publish_many(
        self,
        topic: str,
        bodies: Bodies,
        partition: int | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        *,
        keys: Iterable[str | None] | None = None,
        timestamp_ms: int | datetime = 0,
    ) -> int:
        """Add many messages in order.

        What is wrong with a body, or comes out of the iterable, is raised; then the transaction cannot be committed.

        Args:
            topic: The topic.
            bodies: The bodies.
            partition: The partition of all of them.
            key: The key of all of them.
            properties: Text to store beside each body.
            keys: The key of each body.
            timestamp_ms: The time of all of them: a datetime, or milliseconds since 1970; 0 takes this client's clock.

        Returns:
            How many bodies there were.

        Raises:
            QBError: As publish().
            Exception: What the iterable itself raised, unchanged.
        """
        check_keys(partition, key, keys)
        timestamp_ms, properties = milliseconds(timestamp_ms) or now_ms(), carried(properties or {})
        form = PublishForm(topic, partition, key, properties, timestamp_ms)
        count = await self._partitions(topic, partition)
        with self._draft.complete():
            if partition is not None or key is not None:
                return await self._add(SinglePartition(form, self._routes.choose(topic, partition, key, count)), bodies)
            scatter = PartitionSpread(topic, count, self._routes, properties, timestamp_ms)
            return await self._add(scatter, bodies if keys is None else scatter.with_keys(bodies, keys))

    async def _partitions(self, topic: str, partition: int | None) -> int:
        """Return how many partitions a topic has; when nothing will be sent, as many as are needed."""
        if not self._open:
            raise RuntimeError("a transaction takes messages inside its block only")
        self._link.check_process()
        expected = max(partition or 0, 0) + 1
        return expected if self.replayed else await self._client._count_partitions(topic, expected)

    async def _add(self, spread: PartitionSpread | SinglePartition, bodies: Bodies) -> int:
        """Stage what is full, keep the rest; returns how many bodies there were."""
        added, limit = 0, self._client._conversation.max_message_size
        async with aclosing(portions(bodies, spread.overhead, limit, spread.block_bytes)) as blocks:
            async for block in blocks:
                added += len(block)
                if not self.replayed:
                    await self._send(self._draft.add(spread.topic, spread.pieces(block)))
        return added

    async def _send(self, portions: Iterable[StagePortion]) -> None:
        """Stage messages; the stage is begun for the first of them."""
        for portion in portions:
            if self._stage is None:
                self._stage = await self._client.begin_transaction(self.transaction_id, self.number)
                self.replayed = self._stage is None
            if self._stage is not None:
                await self._stage.add(*portion)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open = False
        if error is not None:
            await self._give_up()
            return
        try:
            await self._commit()
        except BaseException as failure:
            unlearn(self._routes, self._draft.topics, failure)
            await self._give_up()
            raise

    async def _commit(self) -> None:
        self._link.check_process()
        if not self.replayed:
            whole = self._draft.whole(self._client._conversation.transaction_bytes if self._stage is None else -1)
            if whole is not None:
                self.receipt = await self._client._publish_transaction(self.transaction_id, self.number, whole)
                return
            await self._send(self._draft.take_all())
        stages = [] if self._stage is None else [(self._stage.stage_id, await self._stage.finish())]
        self.receipt = await self._client.commit_transaction(self.transaction_id, stages, self.number)

    async def _give_up(self) -> None:
        """End the stage, if the connection is up; otherwise it expires. Never undoes a commit."""
        if self._stage is None:
            return
        self._stage.abandon()
        if self._link.up:  # never in a child of fork()
            with shielded(), suppress(QBError):
                about = self.transaction_id, self.number, [self._stage.stage_id]
                await self._client._abort(*about, now() + ABORT_PATIENCE)


class AsyncTransactionMethods(AsyncTransactionRequests):
    """The part of AsyncBrokerClient that publishes whole transactions."""

    def transaction(self, transaction_id: str, number: int | None = None) -> AsyncTransaction:
        """Return a block of messages that become visible together at its end, once, however often it is run.

        An exception in the block publishes nothing, and so does a cancellation. With numbers, every number up to the
        last committed one of the same id counts as committed.

        Args:
            transaction_id: The name of the transaction: up to 200 characters of A-Z a-z 0-9 . _ -
            number: Its number among those of the same name, or None.

        Returns:
            The block. Its end raises UnknownStage, UnknownTopic, DiskFull, … if the commit is refused, and
            RequestTimedOut or ConnectionLost if its outcome is not known: then run the block again.

        Example:
            >>> async with client.transaction("invoices-11") as transaction:
            ...     await transaction.publish("invoices", b"one")
            ...     await transaction.publish("log", b"invoice one")
        """
        return AsyncTransaction(self, transaction_id, number)
