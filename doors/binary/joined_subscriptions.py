"""The subscriptions that one peer has joined, and what it says about its deliveries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import trio

from qb.core.push.active_subscription import ActiveSubscription
from qb.core.push.delivery_sinks import DeliverySink
from qb.core.push.subscription_manager import SubscriptionManager
from qb.core.wire.errors import BadRequest, NotJoined
from qb.core.wire.frames import Frame
from qb.doors.binary.deliver_frames import BasicSink, DeliverSink
from qb.doors.binary.peer_compression import Pack, unpacked
from qb.doors.binary.settle_requests import advance, carry_out, decode_settle
from qb.doors.delivery_receipts import AwaitedDelivery, DeliveryReceipts
from qb.doors.peer_identity import PeerIdentity
from qb.doors.transport import Transport
from qb.storage.signals import Wait

NARROW = 1_000  # messages in flight to a peer whose deliveries are made message by message, in one step


def narrow(window: int | None) -> int:
    """Return the window for a peer whose deliveries are made message by message."""
    return NARROW if window is None else min(window, NARROW)


class JoinedSubscriptions:
    """What one peer has joined."""

    def __init__(
        self,
        manager: SubscriptionManager,
        transport: Transport,
        identity: PeerIdentity,
        pack: Pack = unpacked,
        epoch: int = 0,
    ) -> None:
        """`epoch`: of a broker of a cluster."""
        self._epoch = epoch
        self._manager = manager
        self._identity = identity
        self._transport = transport
        self._pack = pack
        self._joined: dict[str, tuple[ActiveSubscription, DeliverySink]] = {}
        self.receipts = DeliveryReceipts(transport, self._received, self._renew)
        self.fast = False

    @property
    def wants_receipts(self) -> bool:
        """Is there one whose deliveries count when the peer's TCP has acknowledged them?"""
        return bool(self._joined) and not self.fast

    @property
    def any(self) -> bool:
        """Is there one that this peer is pushed to?"""
        return any(not active.gone for active, _ in self._joined.values())

    def join(self, subscription_id: str, member: str, window: int | None, announces: bool) -> Mapping[str, str]:
        """Join; deliveries start after the caller has had the chance to answer. Raises as join_with()."""
        sink: DeliverySink = DeliverSink(member, self._transport, self._pack, self._epoch)
        if not self.fast:
            sink, window = BasicSink(member, self._transport, self.receipts), narrow(window)
        active = self.join_with(sink, subscription_id, window, announces)
        options = active.subscription.options
        return {
            "subscription_id": subscription_id,
            "topic": active.topic,
            "mode": options.mode.value,
            "ack_deadline": f"{options.ack_deadline:g}",
            "window": str(active.subscription.window(member)),
        }

    def join_with(
        self, sink: DeliverySink, subscription_id: str, window: int | None, announces: bool = False
    ) -> ActiveSubscription:
        """Join with a sink of the door's own.

        Raises UnknownSubscription, SubscriptionBusy, BadRequest, QuotaExceeded.
        """
        active = self._manager.active(subscription_id)
        if self._is_joined(subscription_id):
            raise BadRequest(f"this connection has joined subscription {subscription_id!r} already")
        self._manager.deliveries.join(active, sink, window, announces, self._identity.allowances)
        self._joined = {name: joined for name, joined in self._joined.items() if not joined[0].gone}
        self._joined[subscription_id] = active, sink
        return active

    def leave(self, subscription_id: str) -> None:
        """Leave in good order. Raises NotJoined."""
        self.receipts.look()
        active, sink = self._find(subscription_id)
        del self._joined[subscription_id]
        self._manager.deliveries.leave(active, sink, died=False)

    async def leave_all(self, *, died: bool) -> None:
        """The connection has ended. What a basic peer has not received is held against no message.

        It is done as a whole, even if the caller is cancelled; others run in between.
        """
        self.receipts.look()
        with trio.CancelScope(shield=True):
            while self._joined:
                _, (active, sink) = self._joined.popitem()
                died_with_it = died and not isinstance(sink, BasicSink)
                await self._manager.deliveries.leave_in_turn(active, sink, died=died_with_it)

    def has_room(self) -> None:
        """The peer has read what waited for it: give it more."""
        for active, _ in list(self._joined.values()):
            self._manager.deliveries.serve(active)

    def settle(self, frame: Frame) -> Wait | None:
        """Carry out a SETTLE; returns the wait for the rest of a large one. Raises NotJoined, BadRequest."""
        active, sink = self._find(frame.properties.get("subscription_id", ""))
        settle = decode_settle(frame.body)
        if isinstance(sink, DeliverSink):
            sink.settled = frame.sequence_number
        steps = carry_out(active.subscription, sink.name, settle, trio.current_time())
        if not advance(steps, active.subscription, sink.name):
            return partial(self._go_on, active, sink.name, steps)
        self._manager.deliveries.serve(active)
        return None

    def ack(self, subscription_id: str, partition: int, offset: int) -> bool:
        """Settle one message; False if this peer does not hold it. Raises NotJoined, BadRequest."""
        active, sink = self._find(subscription_id)
        one = range(offset, offset + 1)
        acked = active.subscription.ack(sink.name, partition, (one,), trio.current_time())
        self._manager.deliveries.serve_soon(active)
        return acked > 0

    def nack(self, subscription_id: str, partition: int, offset: int, reason: str, delay: float | None) -> bool:
        """Give one message back as failed; False if this peer does not hold it. Raises NotJoined, BadRequest."""
        active, sink = self._find(subscription_id)
        nacked = active.subscription.nack(sink.name, partition, offset, trio.current_time(), reason, delay)
        self._manager.deliveries.serve_soon(active)
        return nacked

    async def _go_on(self, active: ActiveSubscription, name: str, steps: Iterator[None]) -> None:
        """Carry out the rest of a large SETTLE, with checkpoints, while the frames behind it wait."""
        done = False
        while not done:
            await trio.lowlevel.checkpoint()
            done = advance(steps, active.subscription, name)
        self._manager.deliveries.serve(active)

    def _received(self, deliveries: list[AwaitedDelivery]) -> None:
        """Settle what the TCP of a basic peer has acknowledged."""
        now = trio.current_time()
        settled: dict[ActiveSubscription, None] = {}
        for _, subscription_id, partition, runs in deliveries:
            if self._is_joined(subscription_id):
                active, sink = self._joined[subscription_id]
                active.subscription.ack(sink.name, partition, runs, now)
                settled[active] = None
        for active in settled:
            self._manager.deliveries.serve(active)

    def _renew(self) -> None:
        """Renew the leases of a basic peer: what it has not received goes to the others when its connection ends."""
        for active, sink in self._joined.values():
            if isinstance(sink, BasicSink) and not active.gone:
                seconds = active.subscription.options.ack_deadline
                for _ in active.subscription.extend_all(sink.name, seconds, trio.current_time()):
                    pass

    def _is_joined(self, subscription_id: str) -> bool:
        known = self._joined.get(subscription_id)
        return known is not None and not known[0].gone

    def _find(self, subscription_id: str) -> tuple[ActiveSubscription, DeliverySink]:
        if not self._is_joined(subscription_id):
            raise NotJoined(f"this connection has not joined subscription {subscription_id[:80]!r}")
        return self._joined[subscription_id]
