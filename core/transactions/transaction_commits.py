"""Deciding transactions and carrying the decisions out, one after another.

One task does all of it; callers wait, and may go away meanwhile. A decided transaction whose copy fails is tried again
later and later, and holds up only those that go to the same partitions.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from math import inf

import msgspec
import trio

from qb.core.pacing import spend
from qb.core.transactions.open_stages import OpenStages
from qb.core.transactions.remembered_transactions import RememberedTransactions
from qb.core.transactions.stage_copy import Append, StageCopy
from qb.core.transactions.unfinished_transactions import TransactionRequest, UnfinishedTransaction
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BadRequest, BrokerError, DiskFull, Internal, PartitionHeld
from qb.storage.engine import TRANSACTIONS, Engine, Where
from qb.storage.signals import Signal
from qb.storage.stages.transaction_records import (
    CommittedTransaction,
    NamedStage,
    ReservedPartition,
    TransactionRecord,
    add_up,
    check_stage,
)

logger = logging.getLogger(__name__)
MOST_STAGES = 10_000  # that one commit names: they are checked in one step of the event loop
SPARE_BYTES = 16 * 2**20  # that a commit leaves on the disk


class TransactionCommits:
    """Commits that are asked for, and decisions that are not yet carried out."""

    def __init__(self, engine: Engine, append: Append, opened: OpenStages, remembered: RememberedTransactions) -> None:
        """Partitions of unfinished transactions show nothing new from now on."""
        self._engine = engine
        self._append = append
        self._opened = opened
        self._remembered = remembered
        self.committed = 0  # since the start
        self._unfinished: dict[str, UnfinishedTransaction] = {}
        for decision in remembered.unfinished_at_start:
            copying = StageCopy(decision, engine, append)
            copying.resume()
            self._unfinished[decision.transaction] = UnfinishedTransaction(copying)
        self._next_number = self._first_free_number(remembered.unfinished_at_start)
        self._commits: deque[TransactionRequest] = deque()
        self._abandons: deque[TransactionRequest] = deque()
        self._blocked: list[TransactionRequest] = []  # commits to partitions that an unfinished transaction holds
        self._requested = Signal()

    def _first_free_number(self, unfinished: Sequence[TransactionRecord]) -> int:
        """Return a number larger than any that a message of a transaction has in a log."""
        used = [line.first_number + held.messages for line in unfinished for held in line.partitions]
        for topic in self._engine.topics().values():
            for partition in range(topic.partitions):
                ranges = self._engine.log(topic.topic, partition).ranges()
                used += [each.first_number + each.count for each in ranges if each.producer_id == TRANSACTIONS]
        return max(used, default=1)

    @property
    def unfinished(self) -> list[UnfinishedTransaction]:
        """The transactions that are decided and not visible, by id."""
        return [each for _, each in sorted(self._unfinished.items())]

    # Running

    async def finish_all(self) -> list[str]:
        """Try once to finish what was decided before the start; returns what became of each, for the operator."""
        notes: list[str] = []
        for unfinished in self.unfinished:
            receipt = await self._try(unfinished)
            name = unfinished.decision.name
            done = receipt and f"finished transaction {name}: {receipt.messages} messages became visible"
            notes.append(done or str(unfinished.reason))
        over = [stage for stage in self._engine.stages().values() if self._remembered.is_over(stage)]
        await self._opened.delete([stage.stage_id for stage in over if stage.transaction not in self._unfinished])
        return notes

    async def run(self) -> None:
        """Carry out requests, and try unfinished transactions again when it is time, until cancelled."""
        while True:
            if self._abandons:
                await self._serve(self._abandons.popleft(), self._abandon)
            elif self._commits:
                await self._serve(self._commits.popleft(), self._carry_out)
            else:
                with trio.move_on_at(min([each.next_try for each in self.unfinished], default=inf)):
                    await self._requested.wait()
            for unfinished in self.unfinished:
                if unfinished.next_try <= trio.current_time():
                    await self._try(unfinished)

    async def _serve(
        self, request: TransactionRequest, action: Callable[[TransactionRequest], Awaitable[None]]
    ) -> None:
        """Carry out a request; it is settled then, or waits for a transaction that is unfinished."""
        try:
            await action(request)
        except PartitionHeld as error:
            if request.is_late:
                request.settle(error)
            else:
                self._blocked.append(request)
        except BrokerError as error:
            request.settle(error)
        except Exception:
            logger.exception("transaction %r: a request failed by a fault of ours", request.transaction)
            request.settle(Internal("internal error; the broker's log has the details"))

    # Committing

    async def commit(self, transaction: str, number: int | None, stages: Sequence[NamedStage]) -> CommittedTransaction:
        """Make the messages of these stages visible as a whole; returns when they are.

        Raises TransactionUnfinished if it is decided but could not be finished for some seconds: the broker goes on
        trying. With any other BrokerError nothing is committed (UnknownStage, UnknownTopic, PartitionHeld, LogPoisoned,
        LogDamaged, DiskFull, LimitReached and others).
        """
        if (known := self._replay(transaction, number)) is not None:
            return known
        if len(stages) > MOST_STAGES:
            raise BadRequest(f"a commit can name {MOST_STAGES} stages, not {len(stages)}: put more messages into each")
        request = TransactionRequest(transaction, number, stages)
        self._commits.append(request)
        self._requested.set()
        return await request.wait()

    def _replay(self, transaction: str, number: int | None) -> CommittedTransaction | None:
        """Return the receipt of a transaction that is finished, or of an earlier number; None: there is none yet."""
        if not self._remembered.is_decided(transaction, number):
            return None
        known = self._remembered.get(transaction)
        assert known is not None
        if known.receipt is None and number == known.number:
            return None
        return known.replay(number, self._engine.durability)

    async def _carry_out(self, request: TransactionRequest) -> None:
        """Decide a commit and begin to carry it out; or let the request wait for what is decided already."""
        free = await self._engine.free_bytes()
        if (known := self._replay(request.transaction, request.number)) is not None:
            request.settle(known)
        elif self._remembered.is_decided(request.transaction, request.number):
            request.replays = True
            unfinished = self._unfinished[request.transaction]
            unfinished.waiting.append(request)
            await self._try(unfinished)
        else:
            await self._remembered.make_room()
            copying = self._decide(request, free)
            await self._write_down(copying)
            unfinished = self._unfinished[request.transaction] = UnfinishedTransaction(copying)
            unfinished.waiting.append(request)
            await self._try(unfinished)

    def _decide(self, request: TransactionRequest, free: int) -> StageCopy:
        """Check all of a commit in one step. Raises why it cannot be done."""
        if request.transaction in self._unfinished:
            raise PartitionHeld(str(self._unfinished[request.transaction].reason))
        self._remembered.check_room(request.transaction)
        spend(len(request.stages))
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
        return StageCopy(decision, self._engine, self._append)

    def _check_partition(self, where: Where, messages: int) -> ReservedPartition:
        log = self._engine.log(*where)
        log.check_writable()
        for unfinished in self._unfinished.values():
            if unfinished.copying.holds(where):
                raise PartitionHeld(f"{where[0]}/{where[1]} takes no other transaction now: {unfinished.reason}")
        return ReservedPartition(*where, log.end_offset, messages)

    async def _write_down(self, copying: StageCopy) -> None:
        """Make the decision durable. Raises BrokerError, and then nothing was decided."""
        names = [named.stage for named in copying.decision.stages]
        self._opened.close(names)
        copying.hold()
        try:
            await self._remembered.write(copying.decision)
        except BrokerError:
            copying.release()
            self._opened.open(names)
            raise

    # Finishing

    async def _try(self, unfinished: UnfinishedTransaction) -> CommittedTransaction | None:
        """Try to finish a transaction; returns its receipt, or None if it has to be tried again."""
        try:
            await unfinished.copying.copy()
            receipt = await self._end(unfinished, abandoned=False)
        except Exception as error:
            unfinished.failed(error)
            return None
        finally:
            self._unblock()
        self.committed += 1
        await self._clear(unfinished.decision)
        return receipt

    def _unblock(self) -> None:
        """Serve the commits again that an unfinished transaction was in the way of."""
        self._commits.extendleft(reversed(self._blocked))
        self._blocked.clear()

    async def _end(self, unfinished: UnfinishedTransaction, *, abandoned: bool) -> CommittedTransaction:
        """Write down that a transaction is over, and show what was copied. Raises BrokerError; may be tried again."""
        decision, shares = unfinished.decision, unfinished.copying.shares
        receipt = CommittedTransaction(
            transaction=decision.transaction,
            number=decision.number,
            abandoned=abandoned,
            messages=sum(share.messages for share in shares),
            partitions=shares,
            timestamp=now_ms(),
            durability=self._engine.durability,
        )
        await self._remembered.write(msgspec.structs.replace(decision, stages=[], partitions=[], receipt=receipt))
        unfinished.copying.release()
        del self._unfinished[decision.transaction]
        unfinished.finished(receipt)
        return receipt

    async def _clear(self, decision: TransactionRecord) -> None:
        """Delete the stages of a transaction that is over, and what dead attempts have left of it."""
        over = [stage.stage_id for stage in self._engine.stages().values() if decision.ends(stage)]
        await self._opened.delete(over)

    # For operators

    async def finish(self, transaction: str) -> CommittedTransaction:
        """Try at once to finish a transaction; returns its receipt, also if it was finished before.

        Raises UnknownTransaction, and TransactionUnfinished with the reason if it cannot be finished now.
        """
        unfinished = self._unfinished.get(transaction)
        if unfinished is None:
            return msgspec.structs.replace(self._remembered.receipt(transaction), replayed=True)
        request = TransactionRequest(transaction, unfinished.decision.number)
        request.replays, request.deadline = True, trio.current_time()
        unfinished.waiting.append(request)
        unfinished.next_try = trio.current_time()
        self._requested.set()
        return await request.wait()

    async def abandon(self, transaction: str) -> CommittedTransaction:
        """End an unfinished transaction without what is not copied yet; what is copied becomes visible.

        Raises UnknownTransaction, and BadRequest if it is finished.
        """
        request = TransactionRequest(transaction)
        self._abandons.append(request)
        self._requested.set()
        return await request.wait()

    async def _abandon(self, request: TransactionRequest) -> None:
        unfinished = self._unfinished.get(request.transaction)
        if unfinished is None:
            receipt = self._remembered.receipt(request.transaction)
            if not receipt.abandoned:
                raise BadRequest(f"transaction {request.transaction!r} is finished: there is nothing to abandon")
            request.replays = True
            request.settle(receipt)
            return
        logger.warning("transaction %s is abandoned by request: %s", unfinished.decision.name, unfinished.reason)
        unfinished.waiting.append(request)
        await self._end(unfinished, abandoned=True)
        self._unblock()
        await self._clear(unfinished.decision)
