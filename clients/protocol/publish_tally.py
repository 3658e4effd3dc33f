"""The bookkeeping of one publish_many."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from qb.clients.protocol.client_errors import (
    BrokerUnavailable,
    PublishFailed,
    PublishUncertain,
    QBError,
    RequestTimedOut,
    UsedAfterFork,
)
from qb.clients.protocol.receipts import Offsets, SpreadOffsets, SpreadRun, StoredRun
from qb.clients.protocol.unacked_publishes import UnackedBatch


class PublishTally:
    """What was sent, what became of it, and where it failed first."""

    def __init__(self) -> None:
        self.sent = 0
        self.pending: deque[tuple[Sequence[int], UnackedBatch]] = deque()  # the indexes of its bodies, and the batch
        self._runs: list[StoredRun] = []
        self._scattered: list[SpreadRun] = []  # used instead if the bodies of a batch do not follow each other
        self._failure: tuple[int, Exception] | None = None

    @property
    def hopeless(self) -> bool:
        """Is it in vain to wait for more answers: was it for the sending, or are they the parent's since a fork?"""
        in_vain = BrokerUnavailable | RequestTimedOut | UsedAfterFork
        return self._failure is not None and isinstance(self._failure[1], in_vain)

    def add(self, batch: UnackedBatch, indexes: Sequence[int] | None = None) -> None:
        """Note that a batch was sent, with the bodies of these indexes or the next ones."""
        self.pending.append((range(self.sent, self.sent + batch.count) if indexes is None else indexes, batch))
        self.sent += batch.count

    def fail(self, index: int, error: Exception) -> None:
        """Note a failure; the one with the lowest index counts."""
        if self._failure is None or index < self._failure[0]:
            self._failure = (index, error)

    def collect(self) -> None:
        """Take in the batches that are answered, oldest first."""
        while self.pending and not self.pending[0][1].left:
            self._take(*self.pending.popleft())

    def check(self) -> None:
        """Raise if something has failed: nothing may be stored behind a gap that we know of."""
        self.collect()
        if self._failure is not None:
            raise self._failure[1]

    def _take(self, indexes: Sequence[int], batch: UnackedBatch) -> None:
        if isinstance(indexes, range) and indexes.step == 1:
            self._runs += batch.stored_runs(indexes.start)
        else:
            for start, size, partition, offset in batch.stored_runs(0):
                self._scattered.append(SpreadRun(indexes[start : start + size], partition, offset))
        if refused := batch.failure():
            self.fail(indexes[refused.number - batch.first], refused.error)

    def _stored(self) -> Offsets:
        if not self._scattered:
            return Offsets(self._runs)
        runs = [SpreadRun(range(run.start, run.start + run.size), *run[2:]) for run in self._runs]
        return SpreadOffsets(runs + self._scattered)

    def offsets(self) -> Offsets:
        """Return all offsets; what is still pending now counts as uncertain.

        Raises PublishFailed or PublishUncertain, or unchanged what the iterable of bodies raised.
        """
        for indexes, batch in self.pending:
            self._take(indexes, batch)
            if batch.left:
                text = "the broker did not answer in time: it may or may not be stored"
                self.fail(indexes[batch.first_unanswered], PublishUncertain(text))
        stored = self._stored()
        if self._failure is None:
            return stored
        index, error = self._failure
        if not isinstance(error, QBError):
            raise error
        failed = _failed(index, stored, error)
        failed.code = error.code
        raise failed from error


def _failed(index: int, stored: Offsets, error: QBError) -> PublishFailed:
    if not isinstance(error, PublishUncertain):
        return PublishFailed(f"body {index} failed, {len(stored)} were stored: {error}", index, stored)
    text = f"from body {index} on it is not known what is stored; {len(stored)} surely are: {error}"
    return PublishUncertain(text, index, stored)
