"""A live view of a topic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import trio

from qb.core.broker.fetching import messages
from qb.core.broker.message_broker import MessageBroker
from qb.core.wire.errors import BrokerError, OffsetOutOfRange, UnknownTopic
from qb.doors.http.streams.event_stream import event
from qb.doors.http.streams.message_events import EventBatch, encode_batch
from qb.storage.engine import PartitionLog

READ_BYTES = 65_536  # what is read at a time
READ_MESSAGES = 100


class TopicTail:
    """The messages of some partitions as they come: a view without a cursor. It falls behind, but drops nothing."""

    def __init__(
        self, broker: MessageBroker, topic: str, starts: Mapping[int, int], closed: Callable[[TopicTail], None]
    ) -> None:
        self.ended: dict[str, Any] | None = None
        self._closed = closed
        self._broker = broker
        self._topic = topic
        self._at = dict(starts)
        self._moved_partitions = dict.fromkeys(starts)  # that may have more; the one whose turn it is comes first
        self._logs: dict[int, PartitionLog] = {number: broker.topics.log(topic, number) for number in starts}
        self._moved = trio.Event()
        self._unwatch = [log.watch(partial(self._wake, number)) for number, log in self._logs.items()]

    def _wake(self, partition: int) -> None:
        self._moved_partitions[partition] = None
        self._moved.set()

    def opening(self) -> bytes:
        return event({"topic": self._topic, "next_offsets": self._at}, name="joined")

    async def next_batch(self) -> EventBatch | None:
        while self.ended is None:
            self._moved = trio.Event()
            try:
                while self._moved_partitions:
                    partition = next(iter(self._moved_partitions))
                    del self._moved_partitions[partition]
                    if self._logs[partition].end_offset > self._at[partition]:
                        self._moved_partitions[partition] = None  # there may be more behind what is read now
                        return await self._read(partition)
                self._check_topic()
            except BrokerError as error:
                self.end(str(error))
                break
            await self._moved.wait()
        return None

    async def _read(self, partition: int) -> EventBatch:
        log = self._logs[partition]
        try:
            chunk = (await log.read(self._at[partition], READ_BYTES)).first(READ_MESSAGES)
        except OffsetOutOfRange:  # retention was faster: the gap in the offsets shows it
            chunk = (await log.read(log.first_offset, READ_BYTES)).first(READ_MESSAGES)
        return EventBatch(self._topic, partition, messages(chunk))

    def _check_topic(self) -> None:
        """Raises UnknownTopic when the topic is gone, also if another one has its name now."""
        partition, log = next(iter(self._logs.items()))
        if self._broker.topics.log(self._topic, partition) is not log:
            raise UnknownTopic(self._topic)

    def encode(self, batch: EventBatch) -> bytes:
        return encode_batch(batch)

    def sent(self, batch: EventBatch) -> None:
        self._at[batch.partition] = batch.messages[-1].sequence_number + 1

    def end(self, reason: str) -> None:
        """Push nothing more, and say why."""
        self.ended = {"reason": reason}
        self._moved.set()

    async def close(self) -> None:
        for unwatch in self._unwatch:
            unwatch()
        self._closed(self)
