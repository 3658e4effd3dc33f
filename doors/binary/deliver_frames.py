"""Deliveries as frames: DELIVER for peers that said HELLO, DATA for those that know only types 1 to 9."""

from __future__ import annotations

from qb.core.pacing import spend
from qb.core.push.delivery_sinks import FULL, PushedRun
from qb.core.wire.clock import now_ms
from qb.core.wire.frames import MessageType, data_frames, encode_frame, encode_head
from qb.doors.binary.peer_compression import Pack
from qb.doors.delivery_receipts import DeliveryReceipts
from qb.doors.transport import Transport


class DeliverSink:
    """DELIVER frames, for a peer that has said HELLO."""

    settles_at_once = False

    def __init__(self, name: str, transport: Transport, pack: Pack, epoch: int = 0) -> None:
        """`epoch`: of a broker of a cluster."""
        self.name = name
        self._more = f"epoch={epoch}\0" if epoch else ""
        self._pack = pack
        self.settled = 0  # the number of the last SETTLE seen
        self._transport = transport

    @property
    def full(self) -> bool:
        return self._transport.has_queued(FULL)

    def deliver(self, delivery: PushedRun) -> None:
        properties = (
            f"subscription_id={delivery.subscription_id}\0topic={delivery.topic}\0partition={delivery.partition}\0"
            f"count={delivery.size}\0attempt={delivery.attempt}\0settled={delivery.settled}\0{self._more}"
        )
        if delivery.suspects:
            properties += "suspects=true\0"
        head = encode_head(MessageType.DELIVER, 0, now_ms(), properties.encode(), len(delivery.frames))
        self._transport.send(*self._pack(head, delivery.frames))

    def removed(self, subscription_id: str, reason: str) -> None:
        self._transport.send(_removal(subscription_id, reason))


class BasicSink:
    """Plain DATA frames, for a peer that knows only types 1 to 9: its TCP acks for it."""

    settled = 0

    def __init__(self, name: str, transport: Transport, receipts: DeliveryReceipts) -> None:
        self.name = name
        self._transport = transport
        self._receipts = receipts
        self.settles_at_once = not receipts.available

    @property
    def full(self) -> bool:
        return self._transport.has_queued(FULL)

    def deliver(self, delivery: PushedRun) -> None:
        spend(delivery.size)
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
        if not self.settles_at_once:
            self._receipts.expect(delivery)

    def removed(self, subscription_id: str, reason: str) -> None:
        self._transport.send(_removal(subscription_id, reason))


def _removal(subscription_id: str, reason: str) -> bytes:
    properties = {"subscription_id": subscription_id, "reason": reason}
    return encode_frame(MessageType.UNSUBSCRIBE, 0, now_ms(), properties)
