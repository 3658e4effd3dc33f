"""Deciding transactions and carrying the decisions out, in rounds.

One task does all of it; callers wait, and may go away meanwhile. Commits that come while a round is under way gather
for the next one: a round has one record of decisions, and one batch in each log. A decided transaction whose copy fails
is tried again later and later, and holds up only those that go to the same partitions.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

import msgspec
import trio

from qb.core.pacing import spend
from qb.core.transactions.free_space import FreeSpace
from qb.core.transactions.open_stages import OpenStages
from qb.core.transactions.remembered_transactions import RememberedTransactions
from qb.core.transactions.stage_copy import Append, StageCopy
from qb.core.transactions.unfinished_transactions import (
    TransactionRequest,
    UnfinishedGroup,
    UnfinishedTransaction,
    grouped,
)
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BadRequest, BrokerError, DiskFull, Internal, PartitionHeld
from qb.storage.engine import TRANSACTIONS, Engine, Where
from qb.storage.faults import keep_running
from qb.storage.signals import Signal
from qb.storage.stages.transaction_records import (
    CommittedTransaction,
    DecidedMessages,
    NamedStage,
    ReservedPartition,
    TransactionRecord,
    add_up,
    check_stage,
    ended,
)

logger = logging.getLogger(__name__)
MOST_STAGES = 10_000  # that one commit names: they are checked in one step of the event loop
ROUND = 64  # transactions that are decided in one step
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
        grouped(each for each in self._unfinished.values() if not each.copying.is_complete)
        self._next_number = self._first_free_number(remembered.unfinished_at_start)
        self._commits: deque[TransactionRequest] = deque()
        self._abandons: deque[TransactionRequest] = deque()
        self._blocked: list[TransactionRequest] = []  # commits to partitions that an unfinished transaction holds
        self._requested = Signal()
        self._free = FreeSpace(engine)
        self._over: list[TransactionRecord] = []  # transactions whose stages are yet to be deleted
        self._some_are_over = Signal()

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
        members = self.unfinished
        for group in self._groups:
            await self._try([group])
        for unfinished in members:
            known = self._remembered.get(unfinished.decision.transaction)
            receipt, name = known and known.receipt, unfinished.decision.name
            done = receipt and f"finished transaction {name}: {receipt.messages} messages became visible"
            notes.append(done or str(unfinished.reason))
        over = [stage for stage in self._engine.stages().values() if self._remembered.is_over(stage)]
        await self._opened.delete([stage.stage_id for stage in over if stage.transaction not in self._unfinished])
        return notes

    async def run(self) -> None:
        """Carry out requests, and try unfinished transactions again when it is time, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_running, "deleting of stages", self._delete_stages_forever)
            while True:
                if self._abandons:
                    await self._serve(self._abandons.popleft(), self._abandon)
                elif self._commits:
                    await self._carry_out_round()
                else:
                    with trio.move_on_at(min([each.next_try for each in self._groups], default=inf)):
                        await self._requested.wait()
                now = trio.current_time()
                for group in [each for each in self._groups if each.next_try <= now]:
                    await self._try([group])

    @property
    def _groups(self) -> list[UnfinishedGroup]:
        return list(dict.fromkeys(each.group for each in self.unfinished))

    async def _serve(
        self, request: TransactionRequest, action: Callable[[TransactionRequest], Awaitable[None]]
    ) -> None:
        """Carry out a request; it is settled then, or waits for a transaction that is unfinished."""
        with self._settling(request):
            await action(request)

    @contextmanager
    def _settling(self, request: TransactionRequest) -> Iterator[None]:
        """A request whose handling raises is refused, or waits for the transaction that is in its way."""
        try:
            yield
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

    async def commit(
        self,
        transaction: str,
        number: int | None,
        stages: Sequence[NamedStage] = (),
        content: Sequence[DecidedMessages] = (),
    ) -> CommittedTransaction:
        """Make the messages of these stages, or these few messages, visible as a whole; returns when they are.

        Raises TransactionUnfinished if it is decided but could not be finished for some seconds: the broker goes on
        trying. With any other BrokerError nothing is committed (UnknownStage, UnknownTopic, PartitionHeld, LogPoisoned,
        LogDamaged, DiskFull, LimitReached and others).
        """
        if (known := self._replay(transaction, number)) is not None:
            return known
        if len(stages) > MOST_STAGES:
            raise BadRequest(f"a commit can name {MOST_STAGES} stages, not {len(stages)}: put more messages into each")
        request = TransactionRequest(transaction, number, stages, content)
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

    async def _carry_out_round(self) -> None:
        """Decide commits and begin to carry them out; or let the requests wait for what is decided already."""
        requests = self._next_requests()
        try:
            free = await self._free.look()
        except BrokerError as error:
            for request in requests:
                request.settle(error)
            return
        await self._remembered.make_room(len(requests))
        decided: list[UnfinishedTransaction] = []
        for request in requests:
            with self._settling(request):
                if unfinished := self._decide_or_wait(request, free):
                    decided.append(unfinished)
        if decided and await self._write_down(decided):
            await self._try(grouped(decided))

    def _next_requests(self) -> list[TransactionRequest]:
        """Take the requests of one round: one that names stages, which may be long, or several that do not.

        A round has at most one transaction of each id.
        """
        chosen = {self._commits[0].transaction: self._commits.popleft()}
        while self._commits and len(chosen) < ROUND and not any(each.stages for each in chosen.values()):
            request = self._commits[0]
            if request.stages or request.transaction in chosen:
                break
            chosen[request.transaction] = self._commits.popleft()
        return list(chosen.values())

    def _decide_or_wait(self, request: TransactionRequest, free: int) -> UnfinishedTransaction | None:
        """Return a decision that is to be written down; None: the request waits for one that was. Raises why not."""
        if (known := self._replay(request.transaction, request.number)) is not None:
            request.settle(known)
        elif self._remembered.is_decided(request.transaction, request.number):
            request.replays = True
            unfinished = self._unfinished[request.transaction]
            unfinished.waiting.append(request)
            unfinished.group.next_try = trio.current_time()
        else:
            unfinished = UnfinishedTransaction(self._decide(request, free))
            unfinished.waiting.append(request)
            return unfinished
        return None

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
        size = sum(stage.size for stage in stages) + sum(len(each.frames) for each in request.content)
        if size and free < size + SPARE_BYTES:
            raise DiskFull(f"the transaction needs {size} bytes and the disk has {free} left")
        totals = add_up(stages) or {each.where: each.messages for each in request.content}
        partitions = [self._check_partition(where, count) for where, count in sorted(totals.items())]
        decision = TransactionRecord(
            transaction=request.transaction,
            number=request.number,
            stages=list(request.stages),
            partitions=partitions,
            content=list(request.content),
            first_number=self._next_number,
            timestamp=now_ms(),
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

    async def _write_down(self, decided: Sequence[UnfinishedTransaction]) -> bool:
        """Make decisions durable; if that fails nothing was decided, and the requests are refused."""
        names = [named.stage for each in decided for named in each.decision.stages]
        self._opened.close(names)
        for each in decided:
            each.copying.hold()
        try:
            await self._remembered.write([each.decision for each in decided])
        except BrokerError as error:
            for each in decided:
                each.copying.release()
                each.waiting[0].settle(error)
            self._opened.open(names)
            return False
        self._unfinished |= {each.decision.transaction: each for each in decided}
        return True

    # Finishing

    async def _try(self, groups: Sequence[UnfinishedGroup]) -> None:
        """Try to finish transactions; those that cannot be finished are tried again later."""
        if len(groups) == 1:  # mostly: then a nursery would only cost two turns of the event loop
            await self._try_group(groups[0])
            return
        async with trio.open_nursery() as nursery:
            for group in groups:
                nursery.start_soon(self._try_group, group)

    async def _try_group(self, group: UnfinishedGroup) -> None:
        try:
            await group.copy()
            self._end(group)
        except Exception as error:
            group.failed(error)
        finally:
            self._unblock()

    def _unblock(self) -> None:
        """Serve the commits again that an unfinished transaction was in the way of."""
        self._commits.extendleft(reversed(self._blocked))
        self._blocked.clear()

    def _end(self, group: UnfinishedGroup) -> None:
        """Show what was copied, and let the requests have their receipts."""
        receipts = [self._receipt(member, abandoned=False) for member in group.members]
        for member, receipt in zip(group.members, receipts, strict=True):
            self._remembered.end(ended(member.decision, receipt))
            member.copying.release()
            del self._unfinished[member.decision.transaction]
        self.committed += len(receipts)
        for member, receipt in zip(group.members, receipts, strict=True):
            member.finished(receipt)
        self._clear(member.decision for member in group.members)

    def _receipt(self, unfinished: UnfinishedTransaction, *, abandoned: bool) -> CommittedTransaction:
        decision, shares = unfinished.decision, unfinished.copying.shares
        return CommittedTransaction(
            transaction=decision.transaction,
            number=decision.number,
            abandoned=abandoned,
            messages=sum(share.messages for share in shares),
            partitions=shares,
            timestamp=decision.timestamp or now_ms(),
            durability=self._engine.durability,
        )

    def _clear(self, over: Iterable[TransactionRecord]) -> None:
        """Have the stages deleted of transactions that are over, and what dead attempts have left of them."""
        if self._engine.stages():
            self._over += over
            self._some_are_over.set()

    async def _delete_stages_forever(self) -> None:
        while True:
            while not self._over:
                await self._some_are_over.wait()
            over = {each.transaction: each for each in self._over}
            self._over.clear()
            known = self._engine.stages().values()
            await self._opened.delete(
                [stage.stage_id for stage in known if stage.transaction in over and over[stage.transaction].ends(stage)]
            )

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
        unfinished.group.next_try = trio.current_time()
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
        receipt = self._receipt(unfinished, abandoned=True)
        await self._remembered.write([ended(unfinished.decision, receipt)])
        unfinished.group.leave(unfinished)
        del self._unfinished[request.transaction]
        if not unfinished.group.members:
            unfinished.copying.release()
        unfinished.finished(receipt)
        self._unblock()
        self._clear([unfinished.decision])
