"""The requests about transactions that AsyncBrokerClient can make."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from qb.clients.aio.methods.stages import AsyncStage
from qb.clients.aio.methods.topics import AsyncTopicMethods
from qb.clients.protocol.conversation import answer_of
from qb.clients.protocol.staged_messages import (
    TransactionReceipt,
    receipt_in,
    stages_named,
)
from qb.clients.results import TransactionInfo, TransactionList
from qb.core.wire.frames import MessageType


class AsyncTransactionRequests(AsyncTopicMethods):
    """The part of AsyncBrokerClient that begins, commits, ends and shows transactions."""

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

    async def _is_committed(self, transaction_id: str, number: int | None) -> bool:
        """Ask whether a transaction is committed; nothing is begun. Raises as begin_transaction()."""
        arguments = {"transaction": transaction_id, "number": number, "opens": False}
        return bool((await self._insist(self._deadline(), "begin_transaction", **arguments))["committed"])

    async def _publish_transaction(self, transaction_id: str, number: int | None, body: bytes) -> TransactionReceipt:
        """Commit messages that fit into one frame. Raises as commit_transaction()."""
        named = {"transaction": transaction_id} | ({} if number is None else {"number": str(number)})
        compose = partial(self._conversation.compose, MessageType.TRANSACTION, named, body)
        return receipt_in(answer_of(await self._repeat(compose, self._deadline())))

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

    async def list_transactions(self) -> TransactionList:
        """List the open stages and the transactions that are being committed.

        Returns:
            Both, and how many committed transactions the broker knows.

        Raises:
            BrokerUnavailable: There is no broker; nothing was asked.
            RequestTimedOut: The broker did not answer within `request_timeout` seconds.
        """
        return TransactionList(await self._insist(self._deadline(), "list_transactions"))

    async def show_transaction(self, transaction_id: str) -> TransactionInfo:
        """Show what the broker knows of a transaction.

        Args:
            transaction_id: The name of the transaction.

        Returns:
            Its state, stages, progress and receipt.

        Raises:
            UnknownTransaction: The broker knows none of that name.
        """
        shown = await self._insist(self._deadline(), "show_transaction", transaction=transaction_id)
        return TransactionInfo(shown)

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
