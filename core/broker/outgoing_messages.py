"""Messages on their way into the logs of one topic, for publishers that hand them over one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import trio

from qb.core.wire.errors import BrokerError
from qb.core.wire.frames import TYPE_AND_SEQUENCE, MessageType
from qb.storage.engine import AppendRun, PartitionLog


class OutgoingMessage(NamedTuple):
    """A message to be published."""

    body: bytes
    partition: int | None = None
    key: str | None = None
    properties: Mapping[str, str] | None = None


class StoredReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """Where a message is stored, and what that promises."""

    topic: str
    partition: int
    offset: int
    timestamp: int  # when it was appended, in ms
    durability: str


class BadBatchMessage(Exception):
    """One message of a batch cannot be published, so none was."""

    def __init__(self, index: int, error: BrokerError) -> None:
        super().__init__(str(error))
        self.index, self.error = index, error


class PartitionBatch:
    """The messages of a request that go to one log, as one run."""

    def __init__(self, log: PartitionLog) -> None:
        self.log = log
        self.indexes: list[int] = []  # which of the request's messages they are
        self._data = bytearray()
        self._positions: list[int] = []
        self._settled = trio.Event()
        self._error: BrokerError | None = None
        self._append_ms = 0
        self._first_offset = 0

    def add(self, index: int, frame: bytes) -> None:
        """Take one more frame; its offset is filled in by run()."""
        self.indexes.append(index)
        self._positions.append(len(self._data))
        self._data += frame

    def run(self, now_ms: int) -> AppendRun:
        """Return the messages as a run at the log's next offset: to be appended before anything else is awaited."""
        self._first_offset, self._append_ms = self.log.next_offset, now_ms
        for offset, position in enumerate(self._positions, self._first_offset):
            TYPE_AND_SEQUENCE.pack_into(self._data, position + 4, MessageType.DATA, offset)
        return AppendRun(bytes(self._data), self._positions, self._first_offset)

    def done(self, runs: Sequence[AppendRun], error: BrokerError | None, append_ms: int) -> None:
        """Take note of what became of the run."""
        self._error, self._append_ms = error, append_ms or self._append_ms
        self._settled.set()

    async def wait(self) -> None:
        """Return when done() has been called."""
        await self._settled.wait()

    def outcome(self, number: int, durability: str) -> StoredReceipt | BrokerError:
        """Return what is known of its message with that number, counted from 0."""
        if self._error is not None:
            return self._error
        return StoredReceipt(
            topic=self.log.topic,
            partition=self.log.partition,
            offset=self._first_offset + number,
            timestamp=self._append_ms,
            durability=durability,
        )
