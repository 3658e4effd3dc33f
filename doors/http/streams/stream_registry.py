"""Every stream of the HTTP door: who has joined what, and what can be sent once more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from qb.core.broker.message_broker import MessageBroker
from qb.core.pacing import spend
from qb.core.push.active_subscription import ActiveSubscription
from qb.core.push.delivery_rounds import DeliveryRounds
from qb.core.rights.principals import Principal
from qb.core.wire.errors import BadRequest, NotJoined
from qb.doors.http.requests.http_peer import HttpPeer
from qb.doors.http.streams.event_stream import EventStream, StreamPace
from qb.doors.http.streams.message_events import parse_event_id
from qb.doors.http.streams.stream_subscriber import SentMessage, StreamSubscriber
from qb.doors.http.streams.topic_tail import TopicTail

WINDOW = 100  # messages in flight to a stream that asks for no other number
NARROW = 1_000  # and to one that asks for more: their events are made in one step
ENDED = 1_000  # ended streams that are remembered
REMEMBERED_IN_ALL = 100_000  # messages of all of them


class EndedStream(NamedTuple):
    """A stream that is over, and what it was sent last, in that order."""

    active: ActiveSubscription
    sent: dict[tuple[int, int], SentMessage]  # by partition and offset


class StreamRegistry:
    """Every stream of this door."""

    def __init__(self, broker: MessageBroker) -> None:
        self._deliveries: DeliveryRounds = broker.subscriptions.deliveries
        self.tails: set[TopicTail] = set()
        self._broker = broker
        self._pace = StreamPace()
        self._open: dict[str, StreamSubscriber] = {}
        self._ended: OrderedDict[str, EndedStream] = OrderedDict()  # streams with auto_ack, by id, the oldest first
        self._remembered = 0  # messages of all of them

    def __len__(self) -> int:
        return len(self._open) + len(self.tails)

    def drain(self) -> None:
        """End all of them."""
        streams: list[StreamSubscriber | TopicTail] = [*self._open.values(), *self.tails]
        for stream in streams:
            stream.end("the broker is shutting down")

    def tail(self, topic: str, starts: Mapping[int, int], peer: HttpPeer) -> EventStream:
        """Return a live tail from these offsets on. Raises UnknownTopic, UnknownPartition, ShuttingDown."""
        self._broker.check_open()
        tail = TopicTail(self._broker, topic, starts, self.tails.discard)
        self.tails.add(tail)
        return EventStream(tail, peer, self._pace)

    def join(
        self,
        subscription_id: str,
        peer: HttpPeer,
        *,
        window: int | None,
        auto_ack: bool,
        last_event_id: str = "",
    ) -> EventStream:
        """Return a stream that has joined.

        Raises UnknownSubscription, SubscriptionBusy, BadRequest, QuotaExceeded, ShuttingDown.
        """
        self._broker.check_open()
        active = self._broker.subscriptions.active(subscription_id)
        subscriber = StreamSubscriber(active, self._deliveries, peer, auto_ack=auto_ack, closed=self._remember)
        wanted = WINDOW if window is None else min(window, NARROW)
        self._deliveries.join(active, subscriber, wanted, announces=False, allowances=peer.identity.allowances)
        self._open[subscriber.id] = subscriber
        if auto_ack:
            self._send_again(active, last_event_id)
        return EventStream(subscriber, peer, self._pace)

    def _remember(self, subscriber: StreamSubscriber) -> None:
        """A stream is over, but its peer may come back and say that it has not seen everything."""
        del self._open[subscriber.id]
        if subscriber.delivered:
            sent = {(each.partition, each.offset): each for each in subscriber.delivered}
            self._ended[subscriber.id] = EndedStream(subscriber.active, sent)
            self._remembered += len(sent)
        while len(self._ended) > ENDED or self._remembered > REMEMBERED_IN_ALL:
            self._remembered -= len(self._ended.popitem(last=False)[1].sent)

    def _send_again(self, active: ActiveSubscription, last_event_id: str) -> None:
        """Deliver once more what an ended stream was sent after the last event that its peer has seen."""
        position = parse_event_id(last_event_id)
        spend(len(self._ended))
        for id, ended in reversed(self._ended.items()):
            if ended.active is active and position in ended.sent:
                for sent in list(ended.sent.values())[list(ended.sent).index(position) + 1 :]:
                    active.subscription.retry(sent.partition, sent.offset, sent.key)
                self._remembered -= len(self._ended.pop(id).sent)
                self._deliveries.serve_soon(active)
                return

    def find(self, subscription_id: str, stream: str | None, principal: Principal) -> StreamSubscriber:
        """Return a stream of this user; without an id, the only one. Raises UnknownSubscription, NotJoined."""
        active = self._broker.subscriptions.active(subscription_id)
        owned = [(id, each) for id, each in self._open.items() if each.owner == principal.name]
        joined = {id: each for id, each in owned if each.active is active}
        if stream is None:
            if len(joined) > 1:
                raise BadRequest(f"{len(joined)} streams have joined subscription {subscription_id!r}: say which one")
            stream = next(iter(joined), "")
        if stream not in joined:
            raise NotJoined(f"there is no open stream {stream[:80]!r} of subscription {subscription_id!r}")
        return joined[stream]
