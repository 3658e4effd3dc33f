"""The publishes of one connection on their way into the logs: numbered, and idempotent if the peer wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import trio

from qb.core.broker.append_service import AppendService
from qb.core.broker.producer_secrets import ProducerSecrets
from qb.core.broker.producers import KnownProducer, NumberedRange, Producers
from qb.core.broker.repeated_publishes import Found, compare
from qb.core.pacing import AT_ONCE
from qb.core.wire.errors import BadRequest, BrokerError
from qb.core.wire.whole_numbers import whole_number
from qb.storage.engine import AppendRun, Done, PartitionLog
from qb.storage.signals import Signal, Wait

LOGS_REMEMBERED = 1_024  # of those that a peer publishes to
# Answers to one peer that wait for logs. Its next publishes wait until all are given: to make them is one step.
MOST_OWED = 10_000

# Called with ranges of publishes, and with None and their append time in ms, or with why nothing of them was kept.
# Ranges that continue each other have been joined. What it returns sends the answers.
Answer = Callable[[Sequence[NumberedRange], BrokerError | None, int], Callable[[], None]]


# What is to be done with the publishes that are next: the log that they go to; the offset of the first of them; how
# many of them, at most (None: all that have the same topic and partition); whether only those with the same key; the id
# of the producer (0: not idempotent); and whether they are repeated, that is stored already from that offset on. A
# plain tuple: each run makes one.
RunPlan = tuple[PartitionLog, int, int | None, bool, int, bool]


class NumberedPublishes:
    """Judges runs of publishes, gives them to their logs, and has them answered."""

    def __init__(
        self,
        appends: AppendService,
        producers: Producers,
        secrets: ProducerSecrets,
        answer: Answer,
        failed: Callable[[Exception], None],
    ) -> None:
        """`failed` is called with a fault of ours that leaves publishes without an answer."""
        self._appends = appends
        self._producers = producers
        self._secrets = secrets
        self._answer = answer
        self._failed = failed
        self._producer: KnownProducer | None = None
        self._claim = object()  # stands for this connection in its producer, which outlives it
        self._dones: dict[PartitionLog, Done] = {}
        self.answers_each = True  # does each message get an answer? Else each run; to be changed before the first one
        self._owed = 0  # answers to what was given to a log
        self._all_settled = Signal()

    async def continue_as(self, wanted: str, secret: str | None, owner: str = "") -> tuple[int, str]:
        """Publish idempotently from now on; returns the id and the secret to continue with.

        That is the producer that is wanted if its secret is given, else a new one of the user `owner`. Raises
        BadRequest, ProducerFenced if the secret is wrong, or is another user's.
        """
        if wanted != "new" and whole_number(wanted, least=1) is None:
            raise BadRequest(f"producer_id must be 'new' or a number that the broker gave out, not {wanted[:40]!r}")
        if wanted == "new" or secret is None:
            wanted = "new"
        else:
            await self._secrets.check(int(wanted), secret, owner)
        producer = self._producers.open(wanted, self._claim)
        secret = await self._secrets.of(producer.producer_id, owner)
        self._producer = producer
        return producer.producer_id, secret

    def plan(self, number: int, topic: str, partition: int | None, key: str | None) -> RunPlan:
        """Say what is to be done with the publish of this number, and with those right after it.

        Raises OutOfSequence, ProducerFenced, and as AppendService.route().
        """
        log, limit, same_key = self._appends.route(topic, partition, key)
        producer = self._producer
        if producer is None:
            return log, log.next_offset, limit, same_key, 0, False
        stored, new = producer.judge(number, self._claim)
        if stored is not None:
            return stored.log, stored.first_offset, min(stored.size, AT_ONCE), False, 0, True
        return log, log.next_offset, limit or new, same_key, producer.producer_id, False

    def append(self, log: PartitionLog, run: AppendRun) -> Wait | None:
        """Give a run that is as plan() said to its log; returns what the next one must wait for."""
        if self._producer is not None:
            self._producer.remember(_numbers(run, log))
        self._owed += len(run.positions) if self.answers_each else 1
        self._appends.append(log, run, self._dones.get(log) or self._make_done(log))
        if self._owed > MOST_OWED:
            return self.wait_until_settled
        return None if log.has_room else log.wait_for_room

    async def wait_until_settled(self) -> None:
        """Return when every run given to a log has been answered."""
        while self._owed:
            await self._all_settled.wait()

    def _make_done(self, log: PartitionLog) -> Done:
        """Return the completion of runs in a log: always the same one, so that many runs share a call of it."""
        if len(self._dones) >= LOGS_REMEMBERED:
            self._dones.clear()
        done = self._dones[log] = partial(self._settle, log)
        return done

    def _settle(
        self, log: PartitionLog, runs: Sequence[AppendRun], error: BrokerError | None, append_ms: int
    ) -> Callable[[], None] | None:
        """Take note of what became of runs; returns what sends the answers."""
        self._owed -= sum([len(run.positions) for run in runs]) if self.answers_each else len(runs)
        if not self._owed:
            self._all_settled.set()
        try:
            return self._note(log, runs, error, append_ms)
        except Exception as fault:  # else the peer would wait for its answers
            self._failed(fault)
            return None

    def _note(
        self, log: PartitionLog, runs: Sequence[AppendRun], error: BrokerError | None, append_ms: int
    ) -> Callable[[], None]:
        numbers = [_numbers(runs[0], log)]
        if len(runs) > 1:
            _join(numbers, [_numbers(run, log) for run in runs[1:]])
        if self._producer is not None:
            for each in numbers:
                self._producer.settled(each, error)
        return self._answer(numbers, error, append_ms)

    async def compare(self, run: AppendRun, log: PartitionLog) -> list[tuple[Found, NumberedRange]]:
        """Say of publishes that were sent again what the log has under their numbers, when that is durable.

        Raises the BrokerError that kept it from being stored, or from being read.
        """
        assert self._producer is not None
        numbers = _numbers(run, log)
        await _durable(self._producer, numbers)
        found, first = [], numbers.first_number
        for each, count in await compare(run, log):
            found.append((each, numbers.cut(first, first + count)))
            first += count
        return found


def _numbers(run: AppendRun, log: PartitionLog) -> NumberedRange:
    return NumberedRange(run.first_number, len(run.positions), log, run.first_offset)


def _join(numbers: list[NumberedRange], following: Sequence[NumberedRange]) -> None:
    """Add ranges to those before them, joined where they continue each other."""
    for each in following:
        if each.continues(numbers[-1]):
            numbers[-1] = numbers[-1].joined(each)
        else:
            numbers.append(each)


async def _durable(producer: KnownProducer, numbers: NumberedRange) -> None:
    """Return when a log has kept these numbers. Raises why it has not."""
    settled, outcome = trio.Event(), []

    def note(error: BrokerError | None) -> None:
        outcome.append(error)
        settled.set()

    producer.when_settled(numbers, note)
    await settled.wait()
    if outcome[0] is not None:
        raise outcome[0]
