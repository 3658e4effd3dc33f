"""Messages that no broker has sent, to call a handler with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from qb.clients.protocol.message import FrameSource, Message, to_json
from qb.core.wire.frames import MessageType, encode_frame


class SettledByHand(NamedTuple):
    """What a handler did with a message: `what` is "ack", "nack" or "extend"."""

    what: str
    message: Message
    seconds: float | None = None  # of a nack its delay, of an extend for how long
    reason: str = ""


class MessageMaker:
    """Makes messages; `settled` lists what was done with them by hand: message.ack(), nack(), extend()."""

    def __init__(self) -> None:
        self.settled: list[SettledByHand] = []

    def __call__(
        self,
        body: Any = b"",
        *,
        topic: str = "test",
        partition: int = 0,
        offset: int = 0,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        timestamp: int | datetime | None = None,
        attempt: int = 1,
        subscription_id: str = "test",
    ) -> Message:
        """Return a message like one that a subscription pushes.

        Args:
            body: Bytes, a text, or what JSON can carry.
            topic: The topic.
            partition: The partition.
            offset: The offset.
            key: The key; None for none.
            properties: Text that was published beside the body.
            timestamp: A time, or milliseconds since 1970; None takes the clock.
            attempt: Which delivery this is.
            subscription_id: The subscription.

        Example:
            >>> handle(qb_message({"id": 1}, topic="orders", key="customer-7"))
        """
        stored = dict(properties or {}) | ({} if key is None else {"key": key})
        frame = encode_frame(MessageType.DATA, offset, _milliseconds(timestamp), stored, _bytes(body))
        source = FrameSource(
            frame, topic, partition, subscription_id=subscription_id, attempt=attempt, settler=_Recorder(self.settled)
        )
        (message,) = source.read(1)
        return message


class _Recorder:
    """The settler of messages that were made here."""

    def __init__(self, settled: list[SettledByHand]) -> None:
        self._settled = settled

    def ack(self, message: Message) -> None:
        self._settled.append(SettledByHand("ack", message))

    def nack(self, message: Message, delay: float | None, reason: str) -> None:
        self._settled.append(SettledByHand("nack", message, delay, reason))

    def extend(self, message: Message, seconds: float) -> None:
        self._settled.append(SettledByHand("extend", message, seconds))


def _bytes(body: Any) -> bytes:
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    return body.encode() if isinstance(body, str) else to_json(body)


def _milliseconds(timestamp: int | datetime | None) -> int:
    if timestamp is None:
        return time.time_ns() // 1_000_000
    return timestamp if isinstance(timestamp, int) else round(timestamp.timestamp() * 1000)
