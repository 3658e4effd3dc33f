"""`produce` lines that follow each other, stored as one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qb.core.broker.append_service import AppendService
from qb.core.broker.outgoing_messages import BadBatchMessage, OutgoingMessage, StoredReceipt
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BrokerError
from qb.core.wire.frames import Frame, MessageType
from qb.doors.json_lines.json_answers import record

MOST = 500  # lines in a run: decoding them takes about 5 ms


class ProduceRun:
    """Messages for one topic that wait for those behind them. Each is stored or refused on its own."""

    def __init__(self, appends: AppendService) -> None:
        self._appends = appends
        self._topic = ""
        self._messages: list[OutgoingMessage] = []

    def takes(self, topic: str) -> bool:
        """Say whether a message for that topic may be added."""
        return not self._messages or (topic == self._topic and len(self._messages) < MOST)

    def add(self, topic: str, message: OutgoingMessage) -> None:
        """Add a message that the run takes."""
        self._topic = topic
        self._messages.append(message)

    async def store(self, made_by: str) -> list[dict[str, Any] | BrokerError]:
        """Store what was added and return an outcome for each when they are durable; then the run is empty.

        A topic that is missing may be made, for the user `made_by`.
        """
        messages, self._messages = self._messages, []
        timestamp_ms = now_ms()
        outcomes = await self._publish(messages, timestamp_ms, made_by) if messages else []
        return [
            each if isinstance(each, BrokerError) else _stored(message, each, timestamp_ms)
            for message, each in zip(messages, outcomes, strict=True)
        ]

    async def _publish(
        self, messages: Sequence[OutgoingMessage], timestamp_ms: int, made_by: str
    ) -> list[StoredReceipt | BrokerError]:
        outcomes: list[StoredReceipt | BrokerError] = []
        while rest := messages[len(outcomes) :]:
            try:
                outcomes += await self._appends.publish_many(self._topic, rest, timestamp_ms, made_by=made_by)
            except BadBatchMessage as bad:
                outcomes += [*await self._publish(rest[: bad.index], timestamp_ms, made_by), bad.error]
            except BrokerError as error:
                outcomes += [error] * len(rest)
        return outcomes


def _stored(message: OutgoingMessage, receipt: StoredReceipt, timestamp_ms: int) -> dict[str, Any]:
    """Return a message as a fetch would show it, with its partition."""
    key = {} if message.key is None else {"key": message.key}
    frame = Frame(MessageType.DATA, receipt.offset, timestamp_ms, {**(message.properties or {}), **key}, message.body)
    return {**record(frame), "partition": receipt.partition}
