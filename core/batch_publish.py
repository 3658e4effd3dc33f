"""core.batch_publish: many messages of one request into the logs of a topic, one run for each partition.

May import: core.broker, core.errors, core.frames, core.replies, storage.engine, trio, the standard library.
Never: sockets, files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import trio

from core.broker import MessageBroker, Receipt
from core.errors import BrokerError
from core.frames import TYPE_AND_SEQUENCE, MessageType, encode_frame
from core.replies import now_ms
from storage.engine import PartitionLog, Run

AT_ONCE = 1_000  # messages made into frames before others get the processor


class Outgoing(NamedTuple):
    """A message to be published."""

    body: bytes
    partition: int | None = None
    key: str | None = None
    properties: Mapping[str, str] | None = None


class BadMessage(Exception):
    """One message of a batch cannot be published, so none was."""

    def __init__(self, index: int, error: BrokerError) -> None:
        super().__init__(str(error))
        self.index, self.error = index, error


class Gathered:
    """The messages of a request that go to one log, as one run."""

    def __init__(self, where: PartitionLog) -> None:
        self.where = where
        self.indexes: list[int] = []  # which of the request's messages they are
        self._data = bytearray()
        self._positions: list[int] = []
        self._settled = trio.Event()
        self._error: BrokerError | None = None
        self._time_ms = 0
        self._first_offset = 0

    def add(self, index: int, frame: bytes) -> None:
        """Take one more frame; its offset is filled in later."""
        self.indexes.append(index)
        self._positions.append(len(self._data))
        self._data += frame

    def append(self) -> None:
        """Give the run to the log. Does not block: nobody may come between reading the next offset and using it."""
        self._first_offset, self._time_ms = self.where.next_offset, now_ms()
        for offset, position in enumerate(self._positions, self._first_offset):
            TYPE_AND_SEQUENCE.pack_into(self._data, position + 4, MessageType.DATA, offset)
        try:
            self.where.append(Run(bytes(self._data), self._positions, self._first_offset), self._done)
        except BrokerError as error:
            self._done((), error, 0)

    def _done(self, runs: Sequence[Run], error: BrokerError | None, append_ms: int) -> None:
        self._error, self._time_ms = error, append_ms or self._time_ms
        self._settled.set()

    async def wait(self) -> None:
        """Return when the log has said what became of the run."""
        await self._settled.wait()

    def outcome(self, number: int, durability: str) -> Receipt | BrokerError:
        """Return what is known of its message with that number, counted from 0."""
        if self._error is not None:
            return self._error
        return Receipt(
            topic=self.where.topic,
            partition=self.where.partition,
            offset=self._first_offset + number,
            timestamp=self._time_ms,
            durability=durability,
        )


async def publish_many(
    broker: MessageBroker, topic: str, messages: Sequence[Outgoing], timestamp_ms: int, *, wait: bool = True
) -> list[Receipt | BrokerError]:
    """Store messages, all of that time, and return for each where it is or why it is not, when they are durable.

    Those of one partition are kept as a whole or not at all. Without `wait`, returns when the logs have taken them: the
    receipts then promise nothing. Raises BrokerError, BadMessage; then nothing was kept.
    """
    await broker.ready_topic(topic)
    gathered = await _gather(broker, topic, messages, timestamp_ms)
    for part in gathered:
        await part.where.wait_for_room()
        part.append()
    if wait:
        for part in gathered:
            await part.wait()
    durability = broker.engine.durability if wait else "none"
    outcomes: dict[int, Receipt | BrokerError] = {}
    for part in gathered:
        for number, index in enumerate(part.indexes):
            outcomes[index] = part.outcome(number, durability)
    return [outcomes[index] for index in range(len(messages))]


async def _gather(broker: MessageBroker, topic: str, messages: Sequence[Outgoing], timestamp_ms: int) -> list[Gathered]:
    """Make frames of the messages and sort them by log. Raises BrokerError, BadMessage."""
    known_topic = broker.topic(topic)
    most = broker.settings.server.max_message_size
    known: dict[tuple[int | None, str | None], bytes] = {}  # the properties of messages that have none of their own
    gathered: dict[PartitionLog, Gathered] = {}
    for index, (body, partition, key, properties) in enumerate(messages):
        encoded = None if properties or len(body) > most else known.get((partition, key))
        try:
            if encoded is None:
                encoded = broker.stored_properties(topic, partition, key, properties, body)
                if not properties:
                    known[partition, key] = encoded
            where = broker.route(known_topic, partition, key)
        except BrokerError as error:
            raise BadMessage(index, error) from None
        if where not in gathered:
            gathered[where] = Gathered(where)
        gathered[where].add(index, encode_frame(MessageType.DATA, 0, timestamp_ms, encoded, body))
        if index % AT_ONCE == AT_ONCE - 1:
            await trio.lowlevel.checkpoint()
    return list(gathered.values())
