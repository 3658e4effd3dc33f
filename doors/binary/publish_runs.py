"""The PUBLISH frames of one peer: runs of them become runs of a log, and the answers to them become frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from qb.core.broker.message_broker import MessageBroker
from qb.core.broker.numbered_publishes import NumberedPublishes
from qb.core.broker.producers import NumberedRange
from qb.core.broker.repeated_publishes import Found
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import REPLIES, BrokerError, OutOfSequence, UnknownTopic
from qb.doors.binary.replies import refusal, stored
from qb.doors.binary.server_connection import PublishRun, ServerConnection
from qb.doors.peer_identity import PeerIdentity
from qb.storage.engine import AppendRun, PartitionLog
from qb.storage.signals import Wait

ANSWERED_EACH = 256  # publishes in a run of a peer that gets an answer to each of them


class PublishRuns:
    """Takes runs of PUBLISH frames from a connection to their logs; each run is answered when it is durable."""

    def __init__(
        self,
        broker: MessageBroker,
        connection: ServerConnection,
        send: Callable[[bytes], None],
        identity: PeerIdentity,
        failed: Callable[[Exception], None],
    ) -> None:
        """`failed` is called with a fault of ours that leaves publishes without an answer."""
        self._appends = broker.appends
        self._connection = connection
        self._identity = identity if identity.restricts else None  # None: rights need not be checked
        self._send = send
        self._failed = failed
        self._publishes = NumberedPublishes(
            broker.appends, broker.producers, broker.producer_secrets, self._answers, failed
        )
        self.wait_until_settled = self._publishes.wait_until_settled
        self._in_runs = False

    def answer_in_runs(self) -> None:
        """Answer runs of publishes from now on, and not each of them; to be called before the first."""
        self._in_runs, self._publishes.answers_each = True, False

    async def continue_as(self, wanted: str, secret: str | None, owner: str) -> dict[str, str]:
        """Publish idempotently from now on; returns the id and the secret to continue with, as properties.

        That is the producer that is wanted if its secret is given, else a new one. Raises BadRequest, ProducerFenced if
        the secret is wrong.
        """
        producer_id, secret = await self._publishes.continue_as(wanted, secret, owner)
        return {"producer_id": str(producer_id), "producer_secret": secret}

    def publish(self, event: PublishRun) -> Wait | None:
        """Carry the publishes at the front of the connection to their log; returns what the next ones must wait for.

        Raises the BrokerErrors that a connection does not survive; others are answered.
        """
        first_number, route = event
        try:
            if self._identity is not None:
                self._identity.check_publish(route.topic)
            plan = self._publishes.plan(first_number, *route)
        except BrokerError as error:
            return self._refuse_or_create(event, error)
        log, first_offset, limit, same_key, producer_id, is_repeated = plan
        if not self._in_runs:
            limit = min(limit or ANSWERED_EACH, ANSWERED_EACH)
        time_ms = 0 if is_repeated else now_ms()  # a repeated publish is compared as it was sent
        run = self._connection.take_run(route, first_offset, time_ms, same_key, limit, producer_id)
        if is_repeated:
            return partial(self._answer_repeated, run, log)
        return self._publishes.append(log, run)

    def _refuse_or_create(self, event: PublishRun, error: BrokerError) -> Wait | None:
        """Answer a run that has no log, unless its topic is made by the first message for it: then it comes again."""
        if isinstance(error, UnknownTopic) and self._may_create(event.route.topic):
            return partial(self._create_topic, event)
        self._refuse_run(event, error)
        return None

    def _may_create(self, topic: str) -> bool:
        sees = self._identity is None or self._identity.principal.sees_topic(topic)
        return sees and self._appends.may_create(topic)

    async def _create_topic(self, event: PublishRun) -> None:
        """Make the topic of publishes that are still at the front of the connection; they come again as an event."""
        try:
            made_by = self._identity.principal.name if self._identity is not None else ""
            await self._appends.open_topic(event.route.topic, made_by=made_by)
        except BrokerError as error:
            self._refuse_run(event, error)

    def _refuse_run(self, event: PublishRun, error: BrokerError) -> None:
        if not REPLIES[type(error)].survives:
            raise error
        limit = None if self._in_runs else ANSWERED_EACH
        self._send(self._refusal(event.first_number, self._connection.skip_run(event.route, limit), error))

    async def _answer_repeated(self, run: AppendRun, log: PartitionLog) -> None:
        """Answer publishes whose numbers are stored: a duplicate must be the message that is stored.

        Raises the BrokerErrors that a connection does not survive.
        """
        try:
            compared = await self._publishes.compare(run, log)
        except BrokerError as error:
            if not REPLIES[type(error)].survives:
                raise
            self._send(self._refusal(run.first_number, len(run.positions), error))
            return
        for found, numbers in compared:
            self._send(self._repeated(numbers, found))

    # Answers

    def _answers(
        self, numbers: Sequence[NumberedRange], error: BrokerError | None, append_ms: int
    ) -> Callable[[], None]:
        """Return what sends the answers to publishes that a log has kept or refused."""
        if error is None:
            answers = [self._confirmation(each, append_ms) for each in numbers]
        else:
            answers = [self._refusal(each.first_number, each.size, error) for each in numbers]
        return partial(self._send_answers, b"".join(answers))

    def _send_answers(self, answers: bytes) -> None:
        try:
            self._send(answers)
        except Exception as fault:
            self._failed(fault)

    def _repeated(self, numbers: NumberedRange, found: Found) -> bytes:
        if found is not Found.OTHER:
            return self._confirmation(numbers, now_ms(), duplicate=True, unverified=found is Found.GONE)
        first, count, log, offset = numbers
        place = f"offset {offset} of {log.topic}/{log.partition}"
        return self._refusal(
            first, count, OutOfSequence(f"publish number {first} was used for another message, which is at {place}")
        )

    def _confirmation(
        self, numbers: NumberedRange, append_ms: int, *, duplicate: bool = False, unverified: bool = False
    ) -> bytes:
        first, count, log, offset = numbers
        about = log.topic, log.partition, self._appends.durability, append_ms, duplicate, unverified
        if self._in_runs or count == 1:
            return stored(first, count, offset, *about)
        return b"".join([stored(first + i, 1, offset + i, *about) for i in range(count)])

    def _refusal(self, first: int, count: int, error: BrokerError) -> bytes:
        if self._in_runs:
            return refusal(first, error, count)
        return b"".join([refusal(first + i, error) for i in range(count)])
