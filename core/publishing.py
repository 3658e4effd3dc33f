"""core.publishing: the publishes of one peer on their way into the logs, and the answers to them.

May import: core.broker, core.connection, core.errors, core.producers, core.replies, core.signals, storage.engine,
    the standard library.
Never: sockets, files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from core.broker import MessageBroker
from core.connection import Publishes, Route, ServerConnection
from core.errors import REPLIES, BadRequest, BrokerError, UnknownTopic
from core.producers import Producer, Stored
from core.replies import now_ms, refusal, stored
from core.signals import Signal, Wait
from storage.engine import Done, PartitionLog, Run


class Publishing:
    """Takes runs of PUBLISH frames from a connection to their logs; each run is answered when it is durable."""

    def __init__(self, broker: MessageBroker, connection: ServerConnection, send: Callable[[bytes], None]) -> None:
        self._broker = broker
        self._connection = connection
        self._send = send
        self._producer: Producer | None = None
        self._unsettled = 0  # runs given to a log and not yet answered
        self._all_settled = Signal()
        self.acks_in_runs = False

    def continue_as(self, wanted: str) -> str:
        """Publish idempotently from now on, as a new producer or as one seen before; returns its id."""
        if wanted != "new" and not (wanted.isascii() and wanted.isdigit() and 0 < int(wanted) < 2**63):
            raise BadRequest(f"producer_id must be 'new' or a number that the broker gave out, not {wanted[:40]!r}")
        self._producer = self._broker.producers.open(wanted, self)
        return str(self._producer.producer_id)

    def publish(self, event: Publishes) -> Wait | None:
        """Carry the publishes at the front of the connection to their log; returns what the next ones must wait for.

        Raises the BrokerErrors that a connection does not survive; others are answered.
        """
        try:
            where = self._broker.route(*event.route)
            again, limit = self._judge(event.first_number)
        except BrokerError as error:
            if isinstance(error, UnknownTopic) and self._broker.may_make(event.route.topic):
                return partial(self._make_topic, event)
            self._refuse_run(event, error)
            return None
        if again is not None:
            skipped = self._connection.skip_run(event.route, again.size)
            self._answer_again(again.cut(again.first_number, again.first_number + skipped))
            return None
        self._append(where, self._take_run(where, event.route, limit))
        return None if where.has_room else where.wait_for_room

    async def _make_topic(self, event: Publishes) -> None:
        """Make the topic of publishes that are still at the front of the connection; they come again as an event."""
        try:
            await self._broker.ready_topic(event.route.topic)
        except BrokerError as error:
            self._refuse_run(event, error)

    def _refuse_run(self, event: Publishes, error: BrokerError) -> None:
        if not REPLIES[type(error)].survives:
            raise error
        self._refuse(event.first_number, self._connection.skip_run(event.route), error)

    async def wait_until_settled(self) -> None:
        """Return when every run given to a log has been answered."""
        while self._unsettled:
            await self._all_settled.wait()

    def _judge(self, number: int) -> tuple[Stored | None, int | None]:
        if self._producer is None:
            return None, None
        self._producer.check_owner(self)
        return self._producer.judge(number)

    # New publishes

    def _take_run(self, where: PartitionLog, route: Route, limit: int | None) -> Run:
        scattered = route.partition is None and self._broker.topic(route.topic).partitions > 1
        if scattered and route.key is None:
            limit = 1  # the next message is the next partition's turn
        producer_id = self._producer.producer_id if self._producer else 0
        return self._connection.take_run(
            route, where.next_offset, now_ms(), by_key=scattered, limit=limit, producer_id=producer_id
        )

    def _append(self, where: PartitionLog, run: Run) -> None:
        done: Done = partial(self._answer, where, run)
        if self._producer is not None:
            numbers = Stored(run.first_number, len(run.positions), where, run.first_offset)
            self._producer.remember(numbers)
            done = partial(self._answer_numbered, self._producer, numbers, done)
        self._unsettled += 1
        try:
            where.append(run, done)
        except BrokerError as error:
            done(error, 0)

    def _answer_numbered(
        self, producer: Producer, numbers: Stored, answer: Done, error: BrokerError | None, append_ms: int
    ) -> None:
        producer.settled(numbers, error)
        answer(error, append_ms)

    def _answer(self, where: PartitionLog, run: Run, error: BrokerError | None, append_ms: int) -> None:
        count = len(run.positions)
        if error is None:
            self._confirm(Stored(run.first_number, count, where, run.first_offset), append_ms)
        else:
            self._refuse(run.first_number, count, error)
        self._settle()

    def _settle(self) -> None:
        self._unsettled -= 1
        if not self._unsettled:
            self._all_settled.set()

    # Publishes that were sent again

    def _answer_again(self, again: Stored) -> None:
        def answer(error: BrokerError | None) -> None:
            if error is None:
                self._confirm(again, now_ms(), duplicate=True)
            else:
                self._refuse(again.first_number, again.size, error)
            self._settle()

        assert self._producer is not None
        self._unsettled += 1
        self._producer.when_settled(again, answer)

    # Answers

    def _confirm(self, numbers: Stored, append_ms: int, *, duplicate: bool = False) -> None:
        first, count, log, offset = numbers
        about = log.topic, log.partition
        durability = self._broker.engine.durability
        if self.acks_in_runs or count == 1:
            self._send(stored(first, count, *about, offset, durability, append_ms, duplicate=duplicate))
            return
        each = [
            stored(first + i, 1, *about, offset + i, durability, append_ms, duplicate=duplicate) for i in range(count)
        ]
        self._send(b"".join(each))

    def _refuse(self, first: int, count: int, error: BrokerError) -> None:
        if self.acks_in_runs:
            self._send(refusal(first, error, count))
        else:
            self._send(b"".join([refusal(first + i, error) for i in range(count)]))
