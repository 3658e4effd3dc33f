"""Transactions that are decided and not yet visible, and the requests that wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import trio

from qb.core.transactions.stage_copy import StageCopy
from qb.core.wire.errors import BrokerError, TransactionUnfinished
from qb.storage.faults import Fault
from qb.storage.stages.transaction_records import CommittedTransaction, NamedStage

FIRST_DELAY = 0.1  # seconds between the first two tries to finish a transaction
PATIENCE = 5.0  # seconds of failed tries before a request is answered with a refusal


class TransactionRequest:
    """A commit, or the end of one, that a caller waits for."""

    def __init__(self, transaction: str, number: int | None = None, stages: Sequence[NamedStage] = ()) -> None:
        self.transaction, self.number, self.stages = transaction, number, stages
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
        self.next_try = 0.0
        self.reason: str | None = None  # why it is not visible; None: no try has failed
        self._fault = Fault(f"transaction {copying.decision.name}", FIRST_DELAY)
        self._tries = 0

    def failed(self, error: Exception) -> None:
        """A try has failed: say so in the state of its partitions, and to the requests that have waited long enough."""
        self.next_try = trio.current_time() + self._fault.note(error)
        self._tries += 1
        self.reason = (
            f"transaction {self.decision.name} is committed but not visible yet, so its partitions show nothing new; "
            f"the broker tries again by itself (see: qb transactions show {self.decision.transaction}): "
            f"{self._fault.text}"
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
            "failed_tries": self._tries,
            "next_try": round(max(0.0, self.next_try - trio.current_time()), 3),
            "partitions": self.copying.progress,
        }
