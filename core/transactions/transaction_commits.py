"""Deciding transactions and carrying the decisions out, in rounds.

Commits that come while a round is under way gather for the next one: a round has one record of decisions, and one batch
in each log. A round that has nothing to wait for but its record is begun in the step of the event loop that brings its
requests, and carried out in the one that completes the record; one task does all others. Callers may go away meanwhile.
A decided transaction whose copy fails is tried again later and later, and holds up only those that go to the same
partitions.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf

import msgspec
import trio

from qb.core.transactions.decisions import Decisions
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
from qb.core.wire.errors import BadRequest, BrokerError, Internal, PartitionHeld
from qb.storage.engine import Engine
from qb.storage.faults import keep_running
from qb.storage.signals import Signal
from qb.storage.stages.transaction_records import (
    CommittedTransaction,
    DecidedMessages,
    NamedStage,
    TransactionRecord,
    ended,
)

logger = logging.getLogger(__name__)
MOST_STAGES = 10_000  # that one commit names: they are checked in one step of the event loop
ROUND = 64  # transactions that are decided in one step
# Transactions that are visible before their logs have stored them. With the rounds before and behind them, no more are
# without a durable receipt than a log remembers ranges for (TRANSACTION_RANGES): so a start finds all their offsets.
MOST_STORING = 128
MOST_NOTES = 10  # finished transactions that a start names
OWN_FAULT = "internal error; the broker's log has the details"


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
        self._decisions = Decisions(engine, opened, remembered.unfinished_at_start)
        self._commits: deque[TransactionRequest] = deque()
        self._abandons: deque[TransactionRequest] = deque()
        self._blocked: list[TransactionRequest] = []  # commits to partitions that an unfinished transaction holds
        self._requested = Signal()
        self._task_is_idle = False
        self._deciding = False  # is a record of decisions being written?
        self._decided: list[UnfinishedGroup] = []  # decisions that the task is to carry out
        self._storing: dict[str, StageCopy] = {}  # by id: visible, and not yet durable in all their logs
        self._free = FreeSpace(engine)
        self._over: list[TransactionRecord] = []  # transactions whose stages are yet to be deleted
        self._some_are_over = Signal()

    @property
    def unfinished(self) -> list[UnfinishedTransaction]:
        """The transactions that are decided and not visible, by id."""
        return [each for _, each in sorted(self._unfinished.items())]

    # Running

    async def finish_all(self) -> list[str]:
        """Try once to finish what was decided before the start; returns what became of each, for the operator."""
        notes, finished = list[str](), list[CommittedTransaction]()
        members = self.unfinished
        for group in self._groups:
            await self._try([group])
        for unfinished in members:
            known = self._remembered.get(unfinished.decision.transaction)
            if known and known.receipt:
                finished.append(known.receipt)
                notes.append(f"finished transaction {known.name}: {known.receipt.messages} messages became visible")
            else:
                notes.append(str(unfinished.reason))
        if len(finished) > MOST_NOTES:  # mostly they were visible already, and lacked their receipts
            count = sum(each.messages for each in finished)
            notes = [note for note in notes if not note.startswith("finished ")]
            notes.insert(0, f"finished {len(finished)} transactions: {count} messages are visible")
        over = [stage for stage in self._engine.stages().values() if self._remembered.is_over(stage)]
        await self._opened.delete([stage.stage_id for stage in over if stage.transaction not in self._unfinished])
        return notes

    async def run(self) -> None:
        """Carry out requests, and try unfinished transactions again when it is time, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_running, "deleting of stages", self._delete_stages_forever)
            while True:
                if self._deciding:
                    await self._requested.wait()
                elif self._decided:
                    decided, self._decided = self._decided, []
                    await self._try(decided)
                elif self._abandons:
                    await self._serve(self._abandons.popleft(), self._abandon)
                elif self._commits:
                    await self._begin_round()
                else:
                    await self._wait_for_requests()
                if not self._deciding and not self._decided:
                    await self._try_again()

    async def _wait_for_requests(self) -> None:
        self._task_is_idle = True
        try:
            with trio.move_on_at(min([each.next_try for each in self._groups], default=inf)):
                await self._requested.wait()
        finally:
            self._task_is_idle = False

    async def _try_again(self) -> None:
        now = trio.current_time()
        for group in [each for each in self._groups if each.next_try <= now] if self._unfinished else ():
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
            request.settle(Internal(OWN_FAULT))

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
        self._ask(request)
        return await request.wait()

    def commit_then(
        self,
        transaction: str,
        number: int | None,
        content: Sequence[DecidedMessages],
        done: Callable[[CommittedTransaction | BrokerError], None],
    ) -> None:
        """Make these few messages visible as commit() does, without waiting; then `done` is called with the outcome.

        Raises BadName, BadRequest, and then does nothing.
        """
        if (known := self._replay(transaction, number)) is not None:
            done(known)
        else:
            self._ask(TransactionRequest(transaction, number, (), content, done))

    def _ask(self, request: TransactionRequest) -> None:
        self._commits.append(request)
        if not self._deciding and not self._engine.before_commits(self._begin_round_at_once):
            self._requested.set()

    def _replay(self, transaction: str, number: int | None) -> CommittedTransaction | None:
        """Return the receipt of a transaction that is finished, or of an earlier number; None: there is none yet."""
        if not self._remembered.is_decided(transaction, number):
            return None
        known = self._remembered.get(transaction)
        assert known is not None
        if known.receipt is None and number == known.number:
            return None
        return known.replay(number, self._engine.durability)

    def _begin_round_at_once(self) -> None:
        """Begin a round in this step of the event loop, if the task is idle and nothing is to be waited for.

        What comes while a record is being written waits for its end, which begins the next round.
        """
        if self._deciding:
            return
        waits = not self._task_is_idle or not self._commits
        if waits or self._commits[0].stages or not self._free.is_plenty or not self._remembered.has_room(ROUND):
            self._requested.set()
        else:
            self._decide_round(self._next_requests())
            if self._commits and not self._deciding:  # none of those could be decided: the task goes on with the rest
                self._requested.set()

    async def _begin_round(self) -> None:
        """Begin a round, after what it has to wait for."""
        requests = self._next_requests()
        try:
            await self._free.look()
        except BrokerError as error:
            for request in requests:
                request.settle(error)
            return
        await self._remembered.make_room(len(requests))
        self._decide_round(requests)

    def _decide_round(self, requests: Sequence[TransactionRequest]) -> None:
        """Decide commits and begin to write that down; or let the requests wait for what is decided already."""
        decided: list[UnfinishedTransaction] = []
        for request in requests:
            with self._settling(request):
                if unfinished := self._decide_or_wait(request, self._free.bytes):
                    decided.append(unfinished)
        if decided:
            self._write_down(decided)

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
        if request.transaction in self._storing:  # its line must not be replaced
            self._storing[request.transaction].write_now()
            raise PartitionHeld(f"the last transaction {request.transaction!r} is not yet in all its logs")
        self._remembered.check_room(request.transaction)
        decision = self._decisions.decide(request, free, self._unfinished.values())
        return StageCopy(decision, self._engine, self._append)

    def _write_down(self, decided: Sequence[UnfinishedTransaction]) -> None:
        """Begin to make decisions durable."""
        self._opened.close(_stages_of(decided))
        for each in decided:
            each.copying.hold()
        self._deciding = True
        try:
            self._remembered.write_then([each.decision for each in decided], partial(self._written_down, decided))
        except Exception:
            logger.exception("decisions of transactions could not be written by a fault of ours")
            self._written_down(decided, Internal(OWN_FAULT))

    def _written_down(self, decided: Sequence[UnfinishedTransaction], error: BrokerError | None) -> None:
        """Carry durable decisions out; if they could not be written, nothing was decided."""
        self._deciding = False
        if error is None:
            self._unfinished |= {each.decision.transaction: each for each in decided}
            self._decided += [group for group in grouped(decided) if not self._shown_at_once(group)]
        else:
            for each in decided:
                each.copying.release()
                each.waiting[0].settle(error)
            self._opened.open(_stages_of(decided))
        if self._commits and not self._decided and not self._abandons and self._task_is_idle:
            self._begin_round_at_once()
        elif not self._task_is_idle or self._commits or self._decided or self._abandons or self._unfinished:
            self._requested.set()

    # Finishing

    def _shown_at_once(self, group: UnfinishedGroup) -> bool:
        """Show a group as _show_at_once() does. If that fails the task goes on with it, as with any that fails."""
        try:
            return self._show_at_once(group)
        except Exception:
            logger.exception("transactions could not be shown at once by a fault of ours")
            return False

    def _show_at_once(self, group: UnfinishedGroup) -> bool:
        """Give the logs what lies in the decisions, and show it if that needs no waiting; False: the task goes on.

        The decisions are durable and hold the messages. So what is shown may become durable in its logs later, if a
        start would give them the same offsets, and there is plenty of room.
        """
        if any(member.decision.stages for member in group.members) or not self._free.is_plenty:
            return False
        if len(self._storing) + len(group.members) > MOST_STORING:
            return False
        if not group.begin_at_once():
            return False
        self._end(group, early=True)
        self._unblock()
        return True

    def _stored(self, record: TransactionRecord) -> None:
        """The messages of a transaction that was shown early are durable in their logs: its decision may go."""
        del self._storing[record.transaction]
        self._remembered.end(record)
        if self._blocked:
            self._unblock()
            self._requested.set()

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

    def _end(self, group: UnfinishedGroup, *, early: bool = False) -> None:
        """Show what was copied (`early`: is on its way), and let the requests have their receipts."""
        receipts = [self._receipt(member, early=early) for member in group.members]
        for member, receipt in zip(group.members, receipts, strict=True):
            self._remember_end(member.copying, ended(member.decision, receipt), early=early)
            member.copying.release(early=early)
            self._unfinished.pop(member.decision.transaction, None)  # not there if a fault broke this off before
        self.committed += len(receipts)
        for member, receipt in zip(group.members, receipts, strict=True):
            member.finished(receipt)
        self._clear(member.decision for member in group.members)

    def _remember_end(self, copying: StageCopy, record: TransactionRecord, *, early: bool) -> None:
        if early and not copying.is_complete:
            self._storing[record.transaction] = copying
            self._remembered.show_end(record)
            copying.when_stored = partial(self._stored, record)
        else:
            self._remembered.end(record)

    def _receipt(
        self, unfinished: UnfinishedTransaction, *, abandoned: bool = False, early: bool = False
    ) -> CommittedTransaction:
        decision, copying = unfinished.decision, unfinished.copying
        shares = copying.given_shares if early else copying.shares
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


def _stages_of(decided: Iterable[UnfinishedTransaction]) -> list[str]:
    return [named.stage for each in decided for named in each.decision.stages]
