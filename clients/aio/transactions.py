"""All that AsyncBrokerClient can do with transactions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from types import TracebackType
from typing import Any

from qb.clients.aio.body_batches import Bodies, portions
from qb.clients.aio.link import AsyncLink
from qb.clients.aio.waiting import many_answers, now, shielded
from qb.clients.protocol.client_errors import BrokerUnavailable, ConnectionLost, QBError, ShuttingDown
from qb.clients.protocol.conversation import Conversation, answer_of
from qb.clients.protocol.partition_spread import PartitionSpread, SinglePartition, TopicRoutes, check_keys
from qb.clients.protocol.publish_frames import Body, PublishForm
from qb.clients.protocol.staged_messages import (
    ABORT_PATIENCE,
    StageBundle,
    StageLedger,
    TransactionDraft,
    TransactionReceipt,
    cut,
    receipt_in,
    stages_named,
    unlearn,
)
from qb.clients.protocol.unacked_publishes import UnackedBatch
from qb.core.wire.clock import now_ms
from qb.core.wire.frames import Frames


class AsyncStage:
    """A place at the broker for messages that are not visible until they are committed. For one task.

    Returned by begin_transaction(). Once a call has raised or was cancelled, every later one raises: begin a new stage
    then. In a child of os.fork() it is the parent's, and raises UsedAfterFork.

    Args:
        stage_id: What the broker calls it.
        link: The connection.
        conversation: What the client knows of the broker.
        patience: Seconds that a call waits for the broker.
    """

    def __init__(self, stage_id: str, link: AsyncLink, conversation: Conversation, patience: float) -> None:
        self._link, self._conversation, self._patience = link, conversation, patience
        self._book = StageLedger(stage_id, link.abandon)
        self._answered = many_answers()

    @property
    def stage_id(self) -> str:
        """What the broker calls it; a commit names it."""
        return self._book.stage_id

    @property
    def messages(self) -> int:
        """How many messages it was given."""
        return self._book.messages

    async def add(self, topic: str, partition: int, frames: Body, count: int) -> None:
        """Send messages for one partition, as whole DATA frames. They are copied once.

        Returns before they are durable, which finish() waits for; waits while megabytes are unanswered. What was on its
        way when the connection was lost is sent again, and never staged twice.

        Args:
            topic: The topic.
            partition: The partition.
            frames: The frames, back to back.
            count: How many frames there are.

        Raises:
            MessageTooLarge: A body is longer than the broker takes.
            BadRequest: The frames make no sense.
            UnknownStage: The stage is not open any more, or another refusal of what was sent before.
            BrokerUnavailable, RequestTimedOut: The broker does not answer.
        """
        self._link.check_process()
        with self._book.whole():
            for bundle in cut(frames, count, self._conversation.max_message_size):
                await self._send(topic, partition, bundle)

    async def _send(self, topic: str, partition: int, bundle: StageBundle) -> None:
        def compose() -> tuple[UnackedBatch, Frames]:
            self._book.collect()
            batch = self._conversation.stage(self._book.properties(topic, partition), bundle.frames, self._answered)
            return batch, batch.data

        batch = await self._link.transmit(compose, now() + self._patience)
        self._book.add(batch, bundle.count)

    async def finish(self) -> int:
        """Wait until all of it is durable.

        Returns:
            How many messages the stage holds.

        Raises:
            QBError: As add().
        """
        self._link.check_process()
        with self._book.whole():
            while self._book.pending:
                if not await self._link.wait(self._answered, now() + self._patience):
                    raise self._book.unanswered()
                self._book.collect()
        return self._book.held

    def abandon(self) -> None:
        """Send nothing any more, and nothing again."""
        self._book.spoil(QBError("this stage was abandoned"))


class AsyncTransaction:
    """Messages that are published together or not at all, in an `async with` block. For one task.

    Returned by AsyncBrokerClient.transaction(). `replayed` tells in the block that it was committed before: then
    nothing of it is sent. `receipt` tells after the block what was committed. In a child of os.fork() an open one is
    the parent's: it raises UsedAfterFork and is neither committed nor aborted.

    Args:
        client: The client.
        transaction_id: The name of the transaction.
        number: Its number among those of the same name, or None.
    """

    def __init__(self, client: AsyncTransactionMethods, transaction_id: str, number: int | None) -> None:
        self.transaction_id, self.number = transaction_id, number
        self.replayed = False
        self.receipt: TransactionReceipt | None = None
        self._client, self._routes, self._link = client, client._routes, client._link
        self._draft = TransactionDraft()
        self._stage: AsyncStage | None = None
        self._open = False

    async def __aenter__(self) -> AsyncTransaction:
        self._link = self._client._link
        self._stage = await self._client.begin_transaction(self.transaction_id, self.number)
        self.replayed, self._open = self._stage is None, True
        return self

    async def publish(
        self,
        topic: str,
        data: Body,
        partition: int | None = None,
        key: str | None = None,
        *,
        timestamp_ms: int = 0,
        **properties: str,
    ) -> None:
        """Add one message.

        Args:
            topic: The topic.
            data: The body: bytes, a bytearray or a memoryview.
            partition: The partition; None lets the key choose, or takes turns.
            key: Messages with one key go to one partition, in order.
            timestamp_ms: The time of the message in milliseconds since 1970; 0 takes this client's clock.
            **properties: Text to store beside the body.

        Raises:
            UnknownTopic: There is no such topic.
            UnknownPartition: The topic has no such partition.
            MessageTooLarge: The body is longer than the broker takes.
            BadRequest: A property has a reserved name, or an argument makes no sense.
            TypeError: The body is not bytes.
            QBError: As AsyncStage.add().
        """
        form = PublishForm(topic, partition, key, properties, timestamp_ms or now_ms())
        partition = self._routes.choose(topic, partition, key, await self._partitions(topic, partition))
        await self._add(SinglePartition(form, partition), (data,))

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
            timestamp_ms: The time of all of them in milliseconds since 1970; 0 takes this client's clock.

        Returns:
            How many bodies there were.

        Raises:
            QBError: As publish().
            Exception: What the iterable itself raised, unchanged.
        """
        check_keys(partition, key, keys)
        timestamp_ms = timestamp_ms or now_ms()
        form = PublishForm(topic, partition, key, properties, timestamp_ms)
        count = await self._partitions(topic, partition)
        with self._all_or_nothing():
            if partition is not None or key is not None:
                return await self._add(SinglePartition(form, self._routes.choose(topic, partition, key, count)), bodies)
            scatter = PartitionSpread(topic, count, self._routes, properties, timestamp_ms)
            return await self._add(scatter, bodies if keys is None else scatter.with_keys(bodies, keys))

    def _all_or_nothing(self) -> AbstractContextManager[None]:
        """What is raised inside may leave half of something: then the transaction cannot be committed any more."""
        return nullcontext() if self._stage is None else self._stage._book.whole()

    async def _partitions(self, topic: str, partition: int | None) -> int:
        """Return how many partitions a topic has; when nothing will be sent, as many as are needed."""
        if not self._open:
            raise RuntimeError("a transaction takes messages inside its block only")
        self._link.check_process()
        expected = max(partition or 0, 0) + 1
        return expected if self._stage is None else await self._client._count_partitions(topic, expected)

    async def _add(self, spread: PartitionSpread | SinglePartition, bodies: Bodies) -> int:
        """Stage what is full, keep the rest; returns how many bodies there were."""
        stage, added, limit = self._stage, 0, self._client._conversation.max_message_size
        async with aclosing(portions(bodies, spread.overhead, limit, spread.block_bytes)) as blocks:
            async for block in blocks:
                added += len(block)
                if stage is not None:
                    for portion in self._draft.add(spread.topic, spread.pieces(block)):
                        await stage.add(*portion)
        return added

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
        stages = []
        if self._stage is not None:
            for portion in self._draft.take_all():
                await self._stage.add(*portion)
            stages = [(self._stage.stage_id, await self._stage.finish())]
        self.receipt = await self._client.commit_transaction(self.transaction_id, stages, self.number)

    async def _give_up(self) -> None:
        """End the stage, if the broker can be told at once; otherwise it expires. Never undoes a commit."""
        if self._stage is None:
            return
        self._stage.abandon()
        if self._link.up:  # never in a child of fork()
            with shielded(), suppress(QBError):
                about = self.transaction_id, self.number, [self._stage.stage_id]
                await self._client._abort(*about, now() + ABORT_PATIENCE)


class AsyncTransactionMethods:
    """The part of AsyncBrokerClient that publishes whole transactions."""

    _link: AsyncLink
    _conversation: Conversation
    _routes: TopicRoutes
    _request_timeout: float

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

    async def begin_transaction(self, transaction_id: str, number: int | None = None) -> AsyncStage | None:
        """Open a stage for messages of a transaction. It may have several, of several clients; one of them commits.

        Args:
            transaction_id: The name of the transaction.
            number: Its number among those of the same name, or None.

        Returns:
            The stage; None if the transaction is committed already.

        Raises:
            BadName: The name breaks the rule for names.
            BadRequest: The number makes no sense.
        """
        begun = await self._insist(self._deadline(), "begin_transaction", transaction=transaction_id, number=number)
        if begun["committed"]:
            return None
        return AsyncStage(begun["stage"], self._link, self._conversation, self._request_timeout)

    async def commit_transaction(
        self, transaction_id: str, stages: Sequence[tuple[str, int]], number: int | None = None
    ) -> TransactionReceipt:
        """Publish the messages of some stages, and only these; return when they are visible.

        Asks again by itself when the connection is lost: the second time is answered as the first, with `replayed`.

        Args:
            transaction_id: The name of the transaction.
            stages: Tuples of the id of a stage and the number of messages in it.
            number: The transaction's number among those of the same name, or None.

        Returns:
            What was committed.

        Raises:
            UnknownStage, UnknownTopic, UnknownPartition, DiskFull, LogPoisoned, LogDamaged: Nothing was published.
            PartitionHeld: Another transaction on a partition is unfinished; nothing was published: commit again later.
            RequestTimedOut, ConnectionLost, TransactionUnfinished: It may be, or will be: ask again.
        """
        about = {"transaction": transaction_id, "number": number, "stages": stages_named(stages)}
        return receipt_in(await self._insist(self._deadline(), "commit_transaction", **about))

    async def abort_transaction(
        self, transaction_id: str, number: int | None = None, stages: Sequence[str] | None = None
    ) -> int:
        """End stages of a transaction. Never undoes a commit.

        Args:
            transaction_id: The name of the transaction.
            number: Its number among those of the same name, or None.
            stages: The ids of the stages; None ends all.

        Returns:
            How many stages were open.

        Raises:
            BadName: The name breaks the rule for names.
        """
        return await self._abort(transaction_id, number, stages, self._deadline())

    async def _abort(
        self, transaction_id: str, number: int | None, stages: Sequence[str] | None, deadline: float
    ) -> int:
        named = None if stages is None else list(stages)
        about = {"transaction": transaction_id, "number": number, "stages": named}
        ended = await self._insist(deadline, "abort_transaction", **about)
        aborted: int = ended["aborted"]
        return aborted

    async def list_transactions(self) -> dict[str, Any]:
        """List the open stages and the transactions that are being committed.

        Returns:
            Both, and how many committed transactions the broker knows.
        """
        listed: dict[str, Any] = await self._insist(self._deadline(), "list_transactions")
        return listed

    async def show_transaction(self, transaction_id: str) -> dict[str, Any]:
        """Show what the broker knows of a transaction.

        Args:
            transaction_id: The name of the transaction.

        Returns:
            Its state, stages, progress and receipt.

        Raises:
            UnknownTransaction: The broker knows none of that name.
        """
        shown: dict[str, Any] = await self._insist(self._deadline(), "show_transaction", transaction=transaction_id)
        return shown

    async def finish_transaction(self, transaction_id: str) -> TransactionReceipt:
        """Have the broker try at once to finish a committed transaction.

        Args:
            transaction_id: The name of the transaction.

        Returns:
            What was committed.

        Raises:
            UnknownTransaction: The broker knows none of that name.
            TransactionUnfinished: It still cannot be finished; the text says why.
        """
        return receipt_in(await self._insist(self._deadline(), "finish_transaction", transaction=transaction_id))

    async def abandon_transaction(self, transaction_id: str) -> TransactionReceipt:
        """Give up a committed transaction that cannot be finished. For operators only.

        What was not copied to its partitions yet is lost, and what was becomes visible.

        Args:
            transaction_id: The name of the transaction.

        Returns:
            What of it is visible from now on.

        Raises:
            UnknownTransaction: The broker knows none of that name.
            BadRequest: It is not one that can be given up.
        """
        return receipt_in(await self._insist(self._deadline(), "abandon_transaction", transaction=transaction_id))

    async def _insist(self, deadline: float, method: str, **arguments: Any) -> Any:
        """Call a method that does no harm when it is called twice: again, if the connection is lost."""
        lost: QBError | None = None
        while True:
            try:
                return answer_of(await self._link.ask(lambda: self._conversation.request(method, arguments), deadline))
            except (ConnectionLost, ShuttingDown) as error:
                if not self._link.started:  # we were disconnected on purpose
                    raise
                lost = error
            except BrokerUnavailable as error:
                raise lost or error from None

    async def _count_partitions(self, topic: str, expected: int = 1) -> int:
        """Return how many partitions a topic has. Raises UnknownTopic."""
        raise NotImplementedError

    def _deadline(self, seconds: float | None = None) -> float:
        raise NotImplementedError
