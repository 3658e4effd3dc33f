"""Messages that become visible as a whole or not at all, once.

docs/TRANSACTIONS.md is the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio

from qb.core.pacing import portions
from qb.core.settings import ServerSettings
from qb.core.transactions.open_stages import Answer, OpenStages
from qb.core.transactions.remembered_transactions import RememberedTransactions
from qb.core.transactions.stage_copy import Append
from qb.core.transactions.transaction_commits import TransactionCommits
from qb.core.transactions.unfinished_transactions import UnfinishedTransaction
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BrokerError, UnknownTransaction
from qb.storage.engine import Engine, StageLog, Where
from qb.storage.faults import keep_running
from qb.storage.stages.transaction_records import (
    CommittedTransaction,
    DecidedMessages,
    NamedStage,
    TransactionRecord,
)

LOOKS = 10  # for what may be forgotten, in the time that an idle stage has


class TransactionManager:
    """Every transaction of the broker."""

    def __init__(self, engine: Engine, settings: ServerSettings, append: Append) -> None:
        """Partitions of unfinished transactions show nothing new from now on."""
        self._engine = engine
        self._settings = settings
        self._opened = OpenStages(engine, settings)
        self._remembered = RememberedTransactions(engine.metadata, settings)
        self._commits = TransactionCommits(engine, append, self._opened, self._remembered)
        known = engine.stages().values()
        self._opened.open([stage.stage_id for stage in known if not self._remembered.is_over(stage)])
        self.notes: list[str] = []  # what finish_all() has for the operator

    async def finish_all(self) -> None:
        """Finish what was decided before the start; to be awaited while the engine runs, before doors are opened."""
        self.notes += await self._commits.finish_all()

    async def run(self) -> None:
        """Commit and expire until cancelled; the engine must outlive this."""
        async with trio.open_nursery() as keepers:
            keepers.start_soon(keep_running, "committing", self._commits.run)
            keepers.start_soon(keep_running, "forgetting of transactions", self._forget_forever)

    async def _forget_forever(self) -> None:
        while True:
            await trio.sleep(self._settings.transaction_timeout / LOOKS)
            await self._opened.expire()
            await self._remembered.forget_old(now_ms())

    # What can be asked

    async def begin(self, transaction: str, number: int | None = None, opens: bool = True) -> dict[str, Any]:
        """Open a stage, durably, unless the transaction is committed; or (`opens` is False) only say whether it is.

        Raises BadName, BadRequest, DiskFull, LimitReached.
        """
        known = self.begin_at_once(transaction, number, opens)
        if known is not None:
            return known
        stage = await self._opened.begin(transaction, number)
        if not self._remembered.is_decided(transaction, number):
            self._opened.open([stage.stage_id])
            return {"committed": False, "stage": stage.stage_id}
        await self._opened.delete([stage.stage_id])
        return {"committed": True, "stage": None}

    def begin_at_once(self, transaction: str, number: int | None = None, opens: bool = True) -> dict[str, Any] | None:
        """Do what begin() does, if that needs no waiting; None: it does. Raises BadName, BadRequest, LimitReached."""
        if self._remembered.is_decided(transaction, number):
            return {"committed": True, "stage": None}
        self._remembered.check_room(transaction)
        return None if opens else {"committed": False, "stage": None}

    def stage(self, stage_id: str, where: Where, first: int, count: int, frame: bytes, answer: Answer) -> StageLog:
        """Take a STAGE frame; what this promises stands in OpenStages.take()."""
        return self._opened.take(stage_id, where, first, count, frame, answer)

    async def commit(
        self, transaction: str, stages: Sequence[NamedStage], number: int | None = None
    ) -> CommittedTransaction:
        """Make the messages of these stages visible; what this promises stands in TransactionCommits.commit()."""
        return await self._commits.commit(transaction, number, stages)

    async def publish(
        self, transaction: str, number: int | None, content: Sequence[DecidedMessages]
    ) -> CommittedTransaction:
        """Commit a transaction that needs no stage; what this promises stands in TransactionCommits.commit()."""
        return await self._commits.commit(transaction, number, content=content)

    def publish_then(
        self,
        transaction: str,
        number: int | None,
        content: Sequence[DecidedMessages],
        done: Callable[[CommittedTransaction | BrokerError], None],
    ) -> None:
        """Commit as publish() does, without waiting; what this promises stands in TransactionCommits.commit_then()."""
        self._commits.commit_then(transaction, number, content, done)

    async def abort(
        self, transaction: str, number: int | None = None, stages: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """End these stages, or all of the transaction; what is committed stays so. Raises BadName, BadRequest."""
        committed = self._remembered.is_decided(transaction, number)
        ours = [stage for stage in self._opened if (stage.transaction, stage.number) == (transaction, number)]
        named = None if stages is None else set(stages)
        chosen = [stage.stage_id for stage in ours if named is None or stage.stage_id in named]
        await self._opened.delete(chosen)
        return {"aborted": len(chosen), "committed": committed}

    async def list_all(self) -> dict[str, Any]:
        """Return the open stages, what is being copied, and how many transactions are known to be committed."""
        stages: list[dict[str, Any]] = []
        async for portion in portions(self._opened):
            stages += [self._describe(stage) for stage in portion if stage.stage_id in self._opened]
        unfinished = self._commits.unfinished
        return {
            "stages": stages,
            "committing": [each.decision.transaction for each in unfinished],
            "unfinished": [each.describe() for each in unfinished if each.reason],
            "committed": len(self._remembered) - len(unfinished),
        }

    async def show(self, transaction: str) -> dict[str, Any]:
        """Return all that is known of one id. Raises UnknownTransaction."""
        stages = [self._describe(stage) for stage in self._opened if stage.transaction == transaction]
        decision = self._remembered.get(transaction)
        if decision is None and not stages:
            raise UnknownTransaction(transaction)
        unfinished = [each for each in self._commits.unfinished if each.decision.transaction == transaction]
        return {
            "transaction": transaction,
            "state": _state(decision, unfinished),
            "stages": stages,
            "unfinished": unfinished[0].describe() if unfinished else None,
            "receipt": decision and decision.receipt,
        }

    async def finish(self, transaction: str) -> CommittedTransaction:
        """Try at once to finish a transaction; what this promises stands in TransactionCommits.finish()."""
        return await self._commits.finish(transaction)

    async def abandon(self, transaction: str) -> CommittedTransaction:
        """Give up an unfinished transaction; what this promises stands in TransactionCommits.abandon()."""
        return await self._commits.abandon(transaction)

    def _describe(self, stage: StageLog) -> dict[str, Any]:
        return {
            "stage": stage.stage_id,
            "transaction": stage.transaction,
            "number": stage.number,
            "messages": stage.messages,
            "bytes": stage.size,
            "idle": round(self._opened.idle(stage), 3),
        }

    # For metrics, and for pages that say how the broker is

    @property
    def faults(self) -> list[str]:
        """Why transactions that are committed are not visible, one sentence for each."""
        return [each.reason for each in self._commits.unfinished if each.reason]

    @property
    def committed(self) -> int:
        """How many became visible since the start."""
        return self._commits.committed

    @property
    def staged_bytes(self) -> list[int]:
        """The size of every open stage."""
        return [stage.size for stage in self._opened]


def _state(decision: TransactionRecord | None, unfinished: Sequence[UnfinishedTransaction]) -> str:
    if decision is None:
        return "open"
    if unfinished:
        return "unfinished" if unfinished[0].reason else "committing"
    return "abandoned" if decision.receipt and decision.receipt.abandoned else "committed"
