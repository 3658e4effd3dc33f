"""The publishes of one peer on their way into the logs, and the answers to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import trio

from qb.core.broker.message_broker import MessageBroker
from qb.core.broker.producers import NEW, NumberedRange, Producer
from qb.core.broker.repeated_publishes import Found, compare
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import REPLIES, BadRequest, BrokerError, OutOfSequence, UnknownTopic
from qb.doors.binary.replies import refusal, stored
from qb.doors.binary.server_connection import PublishRun, ServerConnection
from qb.storage.engine import AppendRun, Done, PartitionLog
from qb.storage.signals import Signal, Wait

LOGS_REMEMBERED = 1_024  # of those that a peer publishes to


def _numbers(run: AppendRun, where: PartitionLog) -> NumberedRange:
    return NumberedRange(run.first_number, len(run.positions), where, run.first_offset)


class PublishRuns:
    """Takes runs of PUBLISH frames from a connection to their logs; each run is answered when it is durable."""

    def __init__(self, broker: MessageBroker, connection: ServerConnection, send: Callable[[bytes], None]) -> None:
        self._broker = broker
        self._connection = connection
        self._send = send
        self._producer: Producer | None = None
        self._dones: dict[PartitionLog, Done] = {}
        self._unsettled = 0  # runs given to a log and not yet answered
        self._all_settled = Signal()
        self.acks_in_runs = False

    async def continue_as(self, wanted: str, secret: str | None) -> dict[str, str]:
        """Publish idempotently from now on; returns the id and the secret to continue with.

        That is the producer that is wanted if its secret is given, else a new one. Raises BadRequest, ProducerFenced if
        the secret is wrong.
        """
        if wanted != "new" and not (wanted.isascii() and wanted.isdigit() and 0 < int(wanted) < 2**63):
            raise BadRequest(f"producer_id must be 'new' or a number that the broker gave out, not {wanted[:40]!r}")
        if wanted == "new" or secret is None:
            wanted = "new"
        else:
            await self._broker.producer_secrets.check(int(wanted), secret)
        producer = self._broker.producers.open(wanted, self)
        secret = await self._broker.producer_secrets.of(producer.producer_id)
        self._producer = producer
        return {"producer_id": str(producer.producer_id), "producer_secret": secret}

    def publish(self, event: PublishRun) -> Wait | None:
        """Carry the publishes at the front of the connection to their log; returns what the next ones must wait for.

        Raises the BrokerErrors that a connection does not survive; others are answered.
        """
        first_number, route = event
        try:
            topic = self._broker.topic(route.topic)
            where = self._broker.route(topic, route.partition, route.key)
            again, limit = NEW if self._producer is None else self._producer.judge(first_number, self)
        except BrokerError as error:
            if isinstance(error, UnknownTopic) and self._broker.may_make(route.topic):
                return partial(self._make_topic, event)
            self._refuse_run(event, error)
            return None
        if again is not None:
            run = self._connection.take_run(route, again.first_offset, 0, limit=again.size)
            return partial(self._answer_again, run, again.log)
        scattered = route.partition is None and topic.partitions > 1
        if scattered and route.key is None:
            limit = 1  # the next message is the next partition's turn
        producer_id = self._producer.producer_id if self._producer else 0
        offset = where.next_offset
        run = self._connection.take_run(route, offset, now_ms(), scattered, limit, producer_id)
        if self._producer is not None:
            self._producer.remember(_numbers(run, where))
        done = self._dones.get(where) or self._make_done(where)
        self._unsettled += 1
        try:
            where.append(run, done)
        except BrokerError as error:
            self._answers_to(where, (run,), error, 0)()
        return None if where.has_room else where.wait_for_room

    async def _make_topic(self, event: PublishRun) -> None:
        """Make the topic of publishes that are still at the front of the connection; they come again as an event."""
        try:
            await self._broker.ready_topic(event.route.topic)
        except BrokerError as error:
            self._refuse_run(event, error)

    def _refuse_run(self, event: PublishRun, error: BrokerError) -> None:
        if not REPLIES[type(error)].survives:
            raise error
        self._send(self._refusal(event.first_number, self._connection.skip_run(event.route), error))

    async def wait_until_settled(self) -> None:
        """Return when every run given to a log has been answered."""
        while self._unsettled:
            await self._all_settled.wait()

    # What the logs tell

    def _make_done(self, where: PartitionLog) -> Done:
        """Return what answers for runs in a log: always the same, so that the log tells of many of them at once."""
        if len(self._dones) >= LOGS_REMEMBERED:
            self._dones.clear()
        done = self._dones[where] = partial(self._answers_to, where)
        return done

    def _answers_to(
        self, where: PartitionLog, runs: Sequence[AppendRun], error: BrokerError | None, append_ms: int
    ) -> Callable[[], None]:
        """Return what sends the answers to runs; those that continue each other have one answer."""
        answers = []
        numbers = _numbers(runs[0], where)
        for run in runs[1:]:
            following = _numbers(run, where)
            if following.continues(numbers):
                numbers = numbers.joined(following)
            else:
                answers.append(self._answer(numbers, error, append_ms))
                numbers = following
        answers.append(self._answer(numbers, error, append_ms))
        self._settle(len(runs))
        return partial(self._send, b"".join(answers))

    def _answer(self, numbers: NumberedRange, error: BrokerError | None, append_ms: int) -> bytes:
        if self._producer is not None:
            self._producer.settled(numbers, error)
        if error is None:
            return self._confirmation(numbers, append_ms)
        return self._refusal(numbers.first_number, numbers.size, error)

    def _settle(self, runs: int) -> None:
        self._unsettled -= runs
        if not self._unsettled:
            self._all_settled.set()

    # Publishes that were sent again

    async def _answer_again(self, run: AppendRun, where: PartitionLog) -> None:
        """Answer publishes whose numbers are stored: a duplicate must be the message that is stored.

        Raises the BrokerErrors that a connection does not survive.
        """
        assert self._producer is not None
        numbers = _numbers(run, where)
        error = await _outcome(self._producer, numbers)
        if error is not None:
            self._send(self._refusal(numbers.first_number, numbers.size, error))
            return
        try:
            compared = await compare(run, where)
        except BrokerError as failure:
            if not REPLIES[type(failure)].survives:
                raise
            self._send(self._refusal(numbers.first_number, numbers.size, failure))
            return
        first = numbers.first_number
        for found, count in compared:
            self._send(self._answer_repeated(numbers.cut(first, first + count), found))
            first += count

    def _answer_repeated(self, numbers: NumberedRange, found: Found) -> bytes:
        first, count, log, offset = numbers
        if found is not Found.OTHER:
            return self._confirmation(numbers, now_ms(), duplicate=True, unverified=found is Found.GONE)
        place = f"offset {offset} of {log.topic}/{log.partition}"
        return self._refusal(
            first, count, OutOfSequence(f"publish number {first} was used for another message, which is at {place}")
        )

    # Answers

    def _confirmation(
        self, numbers: NumberedRange, append_ms: int, *, duplicate: bool = False, unverified: bool = False
    ) -> bytes:
        first, count, log, offset = numbers
        about = log.topic, log.partition, self._broker.engine.durability, append_ms, duplicate, unverified
        if self.acks_in_runs or count == 1:
            return stored(first, count, offset, *about)
        return b"".join([stored(first + i, 1, offset + i, *about) for i in range(count)])

    def _refusal(self, first: int, count: int, error: BrokerError) -> bytes:
        if self.acks_in_runs:
            return refusal(first, error, count)
        return b"".join([refusal(first + i, error) for i in range(count)])


async def _outcome(producer: Producer, numbers: NumberedRange) -> BrokerError | None:
    """Return when a log has kept these numbers, or why it has not."""
    settled, outcome = trio.Event(), []

    def tell(error: BrokerError | None) -> None:
        outcome.append(error)
        settled.set()

    producer.when_settled(numbers, tell)
    await settled.wait()
    return outcome[0]
