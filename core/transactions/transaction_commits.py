"""Deciding transactions and carrying the decisions out, one after another.

One task does all of it; whoever asks for a commit waits, and may go away meanwhile.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import msgspec
import trio

from qb.core.transactions.open_stages import OpenStages
from qb.core.transactions.stage_copy import StageCopy
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BadRequest, BrokerError, DiskFull, Internal, LogPoisoned, TransactionUnfinished
from qb.core.wire.names import check_transaction
from qb.storage.engine import TRANSACTIONS, Engine, StageLog, Where
from qb.storage.faults import in_words
from qb.storage.signals import Signal
from qb.storage.stages.transaction_records import (
    KEY,
    CommittedTransaction,
    NamedStage,
    ReservedPartition,
    TransactionRecord,
    add_up,
    check_stage,
)

logger = logging.getLogger(__name__)
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0  # between two tries to copy to a full disk
SPARE_BYTES = 16 * 2**20  # that a commit leaves on the disk


class _Request:
    """A commit that somebody waits for."""

    def __init__(self, transaction: str, number: int | None, stages: Sequence[NamedStage]) -> None:
        self.transaction, self.number, self.stages = transaction, number, stages
        self.settled = trio.Event()
        self.outcome: CommittedTransaction | BrokerError = Internal("the commit was not carried out")


class TransactionCommits:
    """Every decision that is remembered, and what is not yet carried out of them."""

    def __init__(self, engine: Engine, opened: OpenStages) -> None:
        """Partitions of unfinished transactions show nothing new from now on."""
        self._engine = engine
        self._opened = opened
        self.committed = 0  # since the start
        saved = [msgspec.convert(entry.value, TransactionRecord) for entry in engine.metadata.under(KEY).values()]
        self._decisions = {decision.transaction: decision for decision in saved}
        self._unfinished: dict[str, StageCopy] = {}  # decided, and not visible
        self._stuck: dict[str, TransactionUnfinished] = {}  # of those, the ones that only a start can finish
        for decision in saved:
            if decision.receipt is None:
                copying = self._unfinished[decision.transaction] = StageCopy(decision, engine)
                copying.resume()
        self._next_number = self._first_free_number()
        forgettable = [line.receipt for line in saved if line.receipt and line.number is None]
        self._forgettable = deque(sorted(forgettable, key=lambda receipt: receipt.timestamp))
        self._requests: deque[_Request] = deque()
        self._requested = Signal()

    def _first_free_number(self) -> int:
        """Return a number larger than any that a message of a transaction has in a log."""
        used = [line.first_number + held.messages for line in self._decisions.values() for held in line.partitions]
        for topic in self._engine.topics().values():
            for partition in range(topic.partitions):
                ranges = self._engine.log(topic.topic, partition).ranges()
                used += [each.first_number + each.count for each in ranges if each.producer_id == TRANSACTIONS]
        return max(used, default=1)

    # Looking

    @property
    def unfinished(self) -> list[str]:
        """The transactions that are decided and not visible."""
        return sorted(self._unfinished)

    @property
    def remembered(self) -> int:
        """How many ids are known to be committed."""
        return len(self._decisions) - len(self._unfinished)

    def is_decided(self, transaction: str, number: int | None) -> bool:
        """Say whether it is committed. Raises BadName, BadRequest."""
        check_transaction(transaction)
        if number is not None and not 0 <= number < 2**63:
            raise BadRequest(f"a transaction's number must be from 0 to 2**63 - 1, not {number}")
        decision = self._decisions.get(transaction)
        return decision is not None and decision.covers(number)

    def is_over(self, stage: StageLog) -> bool:
        """Say whether nothing can become of a stage any more, unless it is being copied right now."""
        decision = self._decisions.get(stage.transaction)
        return decision is not None and decision.ends(stage)

    # Running

    async def finish(self) -> list[str]:
        """Finish what was decided before the start, as far as it can be done now; returns what became of it."""
        notes: list[str] = []
        for copying in list(self._unfinished.values()):
            name = copying.decision.name
            try:
                receipt = await self._complete(copying)
                notes.append(f"finished transaction {name}: {receipt.messages} messages became visible")
            except DiskFull as error:
                notes.append(f"transaction {name} is committed and waits for room on the disk: {error}")
            except Exception as error:
                notes.append(str(self._give_up(copying, error)))
        await self._clear()
        return notes

    async def run(self) -> None:
        """Carry out commits until cancelled; those first for which the disk was full at the start."""
        for copying in [each for name, each in self._unfinished.items() if name not in self._stuck]:
            try:
                await self._complete_patiently(copying)
            except TransactionUnfinished:
                pass  # it has been logged, and whoever asks is told
        while True:
            while self._requests:
                await self._answer(self._requests.popleft())
            await self._requested.wait()

    async def _answer(self, request: _Request) -> None:
        try:
            request.outcome = await self._carry_out(request)
        except BrokerError as error:
            request.outcome = error
        except Exception:
            logger.exception("a commit failed by a fault of ours")
            request.outcome = Internal("internal error; the broker's log has the details")
        request.settled.set()
        await self._clear()

    async def _clear(self) -> None:
        """Delete the stages of transactions that are finished, and what dead attempts have left of them."""
        over = [stage for stage in self._engine.stages().values() if self.is_over(stage)]
        await self._opened.delete([stage.stage_id for stage in over if stage.transaction not in self._unfinished])

    # Committing

    async def commit(self, transaction: str, number: int | None, stages: Sequence[NamedStage]) -> CommittedTransaction:
        """Make the messages of these stages visible as a whole; returns when they are.

        Raises TransactionUnfinished if it is decided but cannot be finished before the next start; with any other
        BrokerError nothing is committed (UnknownStage, UnknownTopic, LogPoisoned, LogDamaged, DiskFull and others).
        """
        if self.is_decided(transaction, number) and (known := self._replay(transaction, number)):
            return known
        request = _Request(transaction, number, stages)
        self._requests.append(request)
        self._requested.set()
        await request.settled.wait()
        if isinstance(request.outcome, BrokerError):
            raise request.outcome
        return request.outcome

    def _replay(self, transaction: str, number: int | None) -> CommittedTransaction | None:
        """Return the receipt of a decided transaction; None while it is being copied. Raises TransactionUnfinished."""
        decision = self._decisions[transaction]
        if decision.receipt is None and number == decision.number:
            if transaction in self._stuck:
                raise self._stuck[transaction].with_traceback(None)
            return None
        return decision.replay(number, self._engine.durability)

    async def _carry_out(self, request: _Request) -> CommittedTransaction:
        free = await self._engine.free_bytes()
        if self.is_decided(request.transaction, request.number):
            known = self._replay(request.transaction, request.number)
            assert known is not None, "only this task copies"
            return known
        copying = self._decide(request, free)
        await self._write_down(copying)
        return await self._complete_patiently(copying)

    def _decide(self, request: _Request, free: int) -> StageCopy:
        """Check all of a commit in one step. Raises why it cannot be done."""
        if request.transaction in self._stuck:
            raise LogPoisoned(str(self._stuck[request.transaction]))
        stages = [self._opened.get(named.stage) for named in request.stages]
        if len({stage.stage_id for stage in stages}) < len(stages):
            raise BadRequest("a commit must name each stage once")
        for stage, named in zip(stages, request.stages, strict=True):
            check_stage(stage, request.transaction, request.number, named.messages)
        size = sum(stage.size for stage in stages)
        if size and free < size + SPARE_BYTES:
            raise DiskFull(f"the transaction needs {size} bytes and the disk has {free} left")
        partitions = [self._check_partition(where, count) for where, count in sorted(add_up(stages).items())]
        decision = TransactionRecord(
            transaction=request.transaction,
            number=request.number,
            stages=list(request.stages),
            partitions=partitions,
            first_number=self._next_number,
        )
        self._next_number += max([held.messages for held in partitions], default=0)
        return StageCopy(decision, self._engine)

    def _check_partition(self, where: Where, messages: int) -> ReservedPartition:
        log = self._engine.log(*where)
        log.check_writable()
        for name, copying in self._unfinished.items():
            if copying.holds(where):
                raise LogPoisoned(f"{where[0]}/{where[1]} takes no other transaction: {self._stuck[name]}")
        return ReservedPartition(*where, log.end_offset, messages)

    async def _write_down(self, copying: StageCopy) -> None:
        """Make the decision durable. Raises BrokerError, and then nothing was decided."""
        decision = copying.decision
        names = [named.stage for named in decision.stages]
        self._opened.close(names)
        copying.hold()
        try:
            await self._engine.metadata.put(decision.key, decision)
        except BrokerError:
            copying.release()
            self._opened.open(names)
            raise
        self._decisions[decision.transaction] = decision
        self._unfinished[decision.transaction] = copying

    async def _complete_patiently(self, copying: StageCopy) -> CommittedTransaction:
        """Copy and show a decided transaction, however long the disk is full. Raises TransactionUnfinished."""
        delay = FIRST_DELAY
        while True:
            try:
                return await self._complete(copying)
            except DiskFull as error:
                logger.warning("transaction %s waits for room on the disk: %s", copying.decision.name, error)
            except Exception as error:
                raise self._give_up(copying, error) from error
            await trio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    def _give_up(self, copying: StageCopy, error: Exception) -> TransactionUnfinished:
        """Leave a decided transaction to the next start, also by a fault of ours: the others go on."""
        stuck = TransactionUnfinished(
            f"transaction {copying.decision.name} is committed, but its messages cannot be copied before the broker's "
            f"next start, and its partitions show nothing new until then: {in_words(error)}"
        )
        logger.error("%s", stuck, exc_info=None if isinstance(error, BrokerError) else error)
        self._stuck[copying.decision.transaction] = stuck
        return stuck

    async def _complete(self, copying: StageCopy) -> CommittedTransaction:
        """Copy the messages, write down that it is done, and show them. Raises BrokerError; may be tried again."""
        await copying.copy()
        decision, shares = copying.decision, copying.shares
        receipt = CommittedTransaction(
            transaction=decision.transaction,
            number=decision.number,
            messages=sum(share.messages for share in shares),
            partitions=shares,
            timestamp=now_ms(),
            durability=self._engine.durability,
        )
        done = msgspec.structs.replace(decision, stages=[], partitions=[], receipt=receipt)
        await self._engine.metadata.put(done.key, done)
        copying.release()
        self._decisions[decision.transaction] = done
        del self._unfinished[decision.transaction]
        self.committed += 1
        if decision.number is None:
            self._forgettable.append(receipt)
        return receipt

    # Forgetting

    async def forget_before(self, time_ms: float) -> None:
        """Forget the ids without number that were committed before then."""
        old: list[str] = []
        while self._forgettable and self._forgettable[0].timestamp < time_ms:
            old.append(self._decisions.pop(self._forgettable.popleft().transaction).key)
        if old:
            await self._engine.metadata.delete(*old)
