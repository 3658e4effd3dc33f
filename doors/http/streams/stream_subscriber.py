"""One stream that has joined a subscription."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import trio

from qb.core.push.active_subscription import ActiveSubscription
from qb.core.push.delivery_rounds import DeliveryRounds
from qb.core.push.delivery_sinks import FULL, PushedRun
from qb.core.wire.frames import data_frames
from qb.doors.http.requests.http_peer import HttpPeer
from qb.doors.http.streams.event_stream import event
from qb.doors.http.streams.message_events import EventBatch, encode_batch

REMEMBERED = 1_000  # messages of a stream with auto_ack that can be sent again


class SentMessage(NamedTuple):
    """A message that was handed to a connection and counts as done."""

    partition: int
    offset: int
    key: str | None


class StreamSubscriber:
    """One stream that has joined a subscription: takes deliveries, and gives them to its EventStream."""

    settled = 0
    settles_at_once = False  # not when it is handed to us, but when we have handed it on

    def __init__(
        self,
        active: ActiveSubscription,
        deliveries: DeliveryRounds,
        peer: HttpPeer,
        *,
        auto_ack: bool,
        closed: Callable[[StreamSubscriber], None],
    ) -> None:
        self.id = secrets.token_hex(8)
        self.name = f"http {peer.address} {self.id}"
        self.owner = peer.identity.principal.name  # only this user settles what the stream was sent
        self.active = active
        self.ended: dict[str, Any] | None = None
        self.delivered: deque[SentMessage] = deque(maxlen=REMEMBERED)
        self._deliveries = deliveries
        self._closed = closed
        self._transport = peer.transport
        self._auto_ack = auto_ack
        self._waiting: deque[PushedRun] = deque()
        self._waiting_bytes = 0
        self._some = trio.Event()

    # As the subscription sees it

    @property
    def full(self) -> bool:
        return self._waiting_bytes + self._transport.queued > FULL

    def deliver(self, delivery: PushedRun) -> None:
        self._waiting.append(delivery._replace(frames=bytes(delivery.frames)))  # the rest of its batch shall not wait
        self._waiting_bytes += len(delivery.frames)
        self._some.set()

    def removed(self, subscription_id: str, reason: str) -> None:
        self.end(reason)

    # As its EventStream sees it

    def opening(self) -> bytes:
        subscription = {"subscription_id": self.active.name, "topic": self.active.topic}
        options = {"auto_ack": self._auto_ack, "ack_deadline": self.active.subscription.options.ack_deadline}
        return event({"stream": self.id, **subscription, **options}, name="joined")

    async def next_batch(self) -> EventBatch | None:
        await self._some.wait()
        if not self._waiting:
            return None
        delivery = self._waiting.popleft()
        self._waiting_bytes -= len(delivery.frames)
        if not self._waiting and self.ended is None:
            self._some = trio.Event()
        return EventBatch(delivery.topic, delivery.partition, list(data_frames(delivery.frames)), delivery.attempt)

    def encode(self, batch: EventBatch) -> bytes:
        return encode_batch(batch)

    def sent(self, batch: EventBatch) -> None:
        if self._auto_ack and not self.active.gone:
            offsets = [message.sequence_number for message in batch.messages]
            self.ack(batch.partition, _runs(offsets))
            self.delivered.extend(
                SentMessage(batch.partition, message.sequence_number, message.properties.get("key"))
                for message in batch.messages
            )
        self._deliveries.serve_soon(self.active)

    def end(self, reason: str) -> None:
        """Push nothing more, and say why."""
        self.ended = {"reason": reason}
        self._some.set()

    async def close(self) -> None:
        died = self.ended is None and not self._auto_ack
        self._closed(self)  # first: the peer may be back before the others have had their turns
        await self._deliveries.leave_in_turn(self.active, self, died=died)

    # What the peer says of its messages

    def ack(self, partition: int, runs: Sequence[range]) -> int:
        """Settle messages; returns how many were held. Raises BadRequest."""
        acked = self.active.subscription.ack(self.name, partition, runs, trio.current_time())
        self._deliveries.serve_soon(self.active)
        return acked

    def nack(self, partition: int, offset: int, reason: str, delay: float | None) -> bool:
        """Give a message back as failed; False if it was not held. Raises BadRequest."""
        nacked = self.active.subscription.nack(self.name, partition, offset, trio.current_time(), reason, delay)
        self._deliveries.serve_soon(self.active)
        return nacked


def _runs(offsets: Sequence[int]) -> list[range]:
    if offsets[-1] - offsets[0] == len(offsets) - 1:
        return [range(offsets[0], offsets[-1] + 1)]
    return [range(offset, offset + 1) for offset in offsets]
