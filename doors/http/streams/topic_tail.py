"""A live view of a topic."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
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
        self._turn = deque(starts)
        self._logs: dict[int, PartitionLog] = {number: broker.topics.log(topic, number) for number in starts}
        self._moved = trio.Event()
        self._unwatch = [log.watch(self._wake) for log in self._logs.values()]

    def _wake(self) -> None:
        self._moved.set()

    def opening(self) -> bytes:
        return event({"topic": self._topic, "next_offsets": self._at}, name="joined")

    async def next_batch(self) -> EventBatch | None:
        while self.ended is None:
            self._moved = trio.Event()
            try:
                for _ in self._logs:
                    self._turn.rotate(-1)
                    if self._logs[self._turn[0]].end_offset > self._at[self._turn[0]]:
                        return await self._read(self._turn[0])
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
        for partition, log in self._logs.items():
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

    def close(self) -> None:
        for unwatch in self._unwatch:
            unwatch()
        self._closed(self)
