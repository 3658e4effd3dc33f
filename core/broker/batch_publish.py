"""Many messages of one request into the logs of a topic, one run for each partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import trio

from qb.core.broker.message_broker import MessageBroker, StoredReceipt
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BrokerError
from qb.core.wire.frames import TYPE_AND_SEQUENCE, MessageType, encode_frame
from qb.storage.engine import AppendRun, PartitionLog

AT_ONCE = 1_000  # messages made into frames before others get the processor


class OutgoingMessage(NamedTuple):
    """A message to be published."""

    body: bytes
    partition: int | None = None
    key: str | None = None
    properties: Mapping[str, str] | None = None


class BadBatchMessage(Exception):
    """One message of a batch cannot be published, so none was."""

    def __init__(self, index: int, error: BrokerError) -> None:
        super().__init__(str(error))
        self.index, self.error = index, error


class PartitionBatch:
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
            self.where.append(AppendRun(bytes(self._data), self._positions, self._first_offset), self._done)
        except BrokerError as error:
            self._done((), error, 0)

    def _done(self, runs: Sequence[AppendRun], error: BrokerError | None, append_ms: int) -> None:
        self._error, self._time_ms = error, append_ms or self._time_ms
        self._settled.set()

    async def wait(self) -> None:
        """Return when the log has said what became of the run."""
        await self._settled.wait()

    def outcome(self, number: int, durability: str) -> StoredReceipt | BrokerError:
        """Return what is known of its message with that number, counted from 0."""
        if self._error is not None:
            return self._error
        return StoredReceipt(
            topic=self.where.topic,
            partition=self.where.partition,
            offset=self._first_offset + number,
            timestamp=self._time_ms,
            durability=durability,
        )


async def publish_many(
    broker: MessageBroker, topic: str, messages: Sequence[OutgoingMessage], timestamp_ms: int, *, wait: bool = True
) -> list[StoredReceipt | BrokerError]:
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
    outcomes: dict[int, StoredReceipt | BrokerError] = {}
    for part in gathered:
        for number, index in enumerate(part.indexes):
            outcomes[index] = part.outcome(number, durability)
    return [outcomes[index] for index in range(len(messages))]


async def _gather(
    broker: MessageBroker, topic: str, messages: Sequence[OutgoingMessage], timestamp_ms: int
) -> list[PartitionBatch]:
    """Make frames of the messages and sort them by log. Raises BrokerError, BadMessage."""
    known_topic = broker.topic(topic)
    most = broker.settings.server.max_message_size
    known: dict[tuple[int | None, str | None], bytes] = {}  # the properties of messages that have none of their own
    gathered: dict[PartitionLog, PartitionBatch] = {}
    for index, (body, partition, key, properties) in enumerate(messages):
        encoded = None if properties or len(body) > most else known.get((partition, key))
        try:
            if encoded is None:
                encoded = broker.stored_properties(topic, partition, key, properties, body)
                if not properties:
                    known[partition, key] = encoded
            where = broker.route(known_topic, partition, key)
        except BrokerError as error:
            raise BadBatchMessage(index, error) from None
        if where not in gathered:
            gathered[where] = PartitionBatch(where)
        gathered[where].add(index, encode_frame(MessageType.DATA, 0, timestamp_ms, encoded, body))
        if index % AT_ONCE == AT_ONCE - 1:
            await trio.lowlevel.checkpoint()
    return list(gathered.values())
