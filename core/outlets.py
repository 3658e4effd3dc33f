"""core.outlets: where a subscriber's deliveries go: the two dialects of the binary door.

May import: core.frames, core.replies, core.transport, the standard library.
Never: trio, files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from core.frames import Frame, MessageType, decode_frame, encode_frame, encode_head, frame_length
from core.replies import now_ms
from core.transport import Transport

FULL = 524_288  # bytes that wait for the peer to read; past this, its subscriptions give it nothing more


class Delivery(NamedTuple):
    """What is pushed: a run of stored frames with what is to be said of them."""

    subscription_id: str
    topic: str
    partition: int
    attempt: int
    size: int
    settled: int  # the last SETTLE of this subscriber that counted when it was decided
    frames: bytes | memoryview
    suspects: bool = False  # of an unexplained death: to be handled one at a time


class Outlet(Protocol):
    """A joined subscriber as the broker reaches it."""

    name: str
    settles_at_once: bool  # True: it never acks; what was handed to it is done
    settled: int  # the number of the last SETTLE seen; 0 where there are none

    @property
    def full(self) -> bool:
        """True while it takes nothing more."""

    def deliver(self, delivery: Delivery) -> None:
        """Push a run. Does not block."""

    def removed(self, subscription_id: str, reason: str) -> None:
        """Tell it that the subscription is no more."""


class FastOutlet:
    """DELIVER frames, for a peer that has said HELLO."""

    settles_at_once = False

    def __init__(self, name: str, transport: Transport) -> None:
        self.name = name
        self.settled = 0  # the number of the last SETTLE seen
        self._transport = transport

    @property
    def full(self) -> bool:
        return self._transport.queued > FULL

    def deliver(self, delivery: Delivery) -> None:
        properties = (
            f"subscription_id={delivery.subscription_id}\0topic={delivery.topic}\0partition={delivery.partition}\0"
            f"count={delivery.size}\0attempt={delivery.attempt}\0settled={delivery.settled}\0"
        )
        if delivery.suspects:
            properties += "suspects=true\0"
        head = encode_head(MessageType.DELIVER, 0, now_ms(), properties.encode(), len(delivery.frames))
        self._transport.send(head, delivery.frames)

    def removed(self, subscription_id: str, reason: str) -> None:
        self._transport.send(_removal(subscription_id, reason))


class BasicOutlet:
    """Plain DATA frames, for a peer that knows only types 1 to 9."""

    settles_at_once = True
    settled = 0

    def __init__(self, name: str, transport: Transport) -> None:
        self.name = name
        self._transport = transport

    @property
    def full(self) -> bool:
        return self._transport.queued > FULL

    def deliver(self, delivery: Delivery) -> None:
        about = {
            "subscription_id": delivery.subscription_id,
            "topic": delivery.topic,
            "partition": str(delivery.partition),
        }
        frames = [
            encode_frame(
                MessageType.DATA,
                offset,
                timestamp,
                about | {k: v for k, v in properties.items() if k not in about},
                body,
            )
            for _, offset, timestamp, properties, body in data_frames(delivery.frames)
        ]
        self._transport.send(b"".join(frames))

    def removed(self, subscription_id: str, reason: str) -> None:
        self._transport.send(_removal(subscription_id, reason))


def data_frames(data: bytes | memoryview) -> Iterator[Frame]:
    """Return the messages among stored frames."""
    at = 0
    while at < len(data):
        frame = decode_frame(data, at)
        if frame.type == MessageType.DATA:
            yield frame
        at += frame_length(data, at)


def _removal(subscription_id: str, reason: str) -> bytes:
    properties = {"subscription_id": subscription_id, "reason": reason}
    return encode_frame(MessageType.UNSUBSCRIBE, 0, now_ms(), properties)
