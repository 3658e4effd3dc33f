"""Transactions that are decided and not yet visible, and the requests that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec
import trio

from qb.core.transactions.stage_copy import StageCopy
from qb.core.wire.errors import BrokerError, TransactionUnfinished
from qb.storage.engine import Where
from qb.storage.faults import Fault
from qb.storage.stages.transaction_records import CommittedTransaction, DecidedMessages, NamedStage

FIRST_DELAY = 0.1  # seconds between the first two tries to finish a transaction
PATIENCE = 5.0  # seconds of failed tries before a request is answered with a refusal


class TransactionRequest:
    """A commit, or the end of one, that a caller waits for."""

    def __init__(
        self,
        transaction: str,
        number: int | None = None,
        stages: Sequence[NamedStage] = (),
        content: Sequence[DecidedMessages] = (),
        done: Callable[[CommittedTransaction | BrokerError], None] | None = None,
    ) -> None:
        """`done` is called with the outcome, in the step of the event loop that settles the request."""
        self.transaction, self.number, self.stages, self.content = transaction, number, stages, content
        self._done = done
        self.replays = False  # was the transaction decided before this was asked for?
        self.deadline = trio.current_time() + PATIENCE
        self._settled = trio.Event()
        self._outcome: CommittedTransaction | BrokerError | None = None

    @property
    def is_late(self) -> bool:
        return trio.current_time() >= self.deadline

    def settle(self, outcome: CommittedTransaction | BrokerError) -> None:
        """Let the caller have the receipt, or why there is none; the first outcome counts."""
        if self._settled.is_set():
            return
        if isinstance(outcome, CommittedTransaction) and self.replays:
            outcome = msgspec.structs.replace(outcome, replayed=True)
        self._outcome = outcome
        self._settled.set()
        if self._done is not None:
            self._done(outcome)

    async def wait(self) -> CommittedTransaction:
        """Return the receipt. Raises BrokerError."""
        await self._settled.wait()
        assert self._outcome is not None
        if isinstance(self._outcome, BrokerError):
            raise self._outcome.with_traceback(None)
        return self._outcome


class UnfinishedTransaction:
    """A decided transaction on its way, tried again until it is visible."""

    def __init__(self, copying: StageCopy) -> None:
        self.copying = copying
        self.decision = copying.decision
        self.waiting: list[TransactionRequest] = []
        self.group = UnfinishedGroup([self])
        self.reason: str | None = None  # why it is not visible; None: no try has failed

    def failed(self, why: str) -> None:
        """A try has failed: say so in the state of its partitions, and to the requests that have waited long enough."""
        self.reason = (
            f"transaction {self.decision.name} is committed but not visible yet, so its partitions show nothing new; "
            f"the broker tries again by itself (see: qb transactions show {self.decision.transaction}): {why}"
        )
        self.copying.hold(self.reason)
        late = [request for request in self.waiting if request.is_late]
        self.waiting = [request for request in self.waiting if not request.is_late]
        for request in late:
            request.settle(TransactionUnfinished(self.reason))

    def finished(self, receipt: CommittedTransaction) -> None:
        """It is over: let the requests have its receipt."""
        for request in self.waiting:
            request.settle(receipt)

    def describe(self) -> dict[str, Any]:
        """Return it as tools see it."""
        return {
            "transaction": self.decision.transaction,
            "number": self.decision.number,
            "reason": self.reason,
            "failed_tries": self.group.tries,
            "next_try": round(max(0.0, self.group.next_try - trio.current_time()), 3),
            "partitions": self.copying.progress,
        }


class UnfinishedGroup:
    """Transactions that were decided in one step and share partitions: they become visible in one step too."""

    def __init__(self, members: list[UnfinishedTransaction]) -> None:
        self.members = members  # in the order of their numbers
        self.next_try = 0.0
        self.tries = 0  # that have failed
        self._fault: Fault | None = None
        self._begun: Sequence[StageCopy] = ()  # what begin_at_once() has given to the logs
        self._begin_error: Exception | None = None  # why it could not give them all

    def begin_at_once(self) -> bool:
        """Give the logs what lies in the decisions; True: all of it may be shown at once. False: copy() goes on.

        It may be shown if a start would give the logs the same messages at the same offsets. Raises nothing.
        """
        copies = [member.copying for member in self.members]
        at_once = all(each.is_next for each in copies)
        self._begun, self._begin_error = copies, None
        try:
            with copies[0].step():
                for each in copies:
                    each.begin(lags=at_once)
        except Exception as error:
            self._begin_error = error
        at_once = at_once and not self._begin_error and all(each.is_given for each in copies)
        if not at_once:
            for each in copies:
                each.write_now()
        return at_once

    async def copy(self) -> None:
        """Return when all messages of all members are durable in their logs. Raises as StageCopy.copy().

        A log takes them in the order of their numbers. What lies in decisions that follow each other is given to the
        logs in one step, so that it shares their syncs.
        """
        copies = [member.copying for member in self.members]
        if self._begun:
            begun, self._begun = self._begun, ()
            await _finish(begun, self._begin_error)
            return
        for has_stages, some in groupby(copies, lambda each: bool(each.decision.stages)):
            for portion in [[each] for each in some] if has_stages else [list(some)]:
                await _copy(portion)

    def failed(self, error: Exception) -> None:
        """A try has failed."""
        self._fault = self._fault or Fault(f"transaction {self.members[0].decision.name}", FIRST_DELAY)
        self.next_try = trio.current_time() + self._fault.note(error)
        self.tries += 1
        for member in self.members:
            member.failed(self._fault.text or str(error))

    def leave(self, member: UnfinishedTransaction) -> None:
        """Go on without a member that was abandoned."""
        self.members.remove(member)
        self.next_try = trio.current_time()


async def _copy(copies: Sequence[StageCopy]) -> None:
    error = None
    try:
        with copies[0].step():
            for each in copies:
                each.begin()
    except Exception as failure:
        error = failure
    await _finish(copies, error)


async def _finish(copies: Sequence[StageCopy], error: Exception | None) -> None:
    """Wait for what is on its way, and copy the rest; `error` is why they could not all begin."""
    for each in copies:
        await each.wait()
    if error is not None:
        raise error
    for each in copies:
        await each.copy_stages()


def grouped(transactions: Iterable[UnfinishedTransaction]) -> list[UnfinishedGroup]:
    """Return transactions in groups: two that have a partition in common, also through others, are in one."""
    by_partition: dict[Where, UnfinishedGroup] = {}
    groups: dict[UnfinishedGroup, None] = {}
    for each in sorted(transactions, key=_number):
        partitions = each.copying.partitions
        first, *others = {by_partition[where]: None for where in partitions if where in by_partition} or [each.group]
        for other in others:
            first.members += other.members
            del groups[other]
        if others:
            first.members.sort(key=_number)
            by_partition |= {where: first for where, group in by_partition.items() if group in others}
        if each not in first.members:
            first.members.append(each)
        groups[first] = None
        by_partition |= dict.fromkeys(partitions, first)
    for group in groups:
        for member in group.members:
            member.group = group
    return list(groups)


def _number(unfinished: UnfinishedTransaction) -> int:
    return unfinished.decision.first_number
