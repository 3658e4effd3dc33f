"""No Python stack passes through storage twice: what peers are sent is sent when storage has finished its own step."""

from __future__ import annotations

import msgspec
import pytest

from qb.core.push.delivery_rounds import DeliveryRounds
from qb.core.wire.frames import MessageType as T
from qb.doors.transport import Transport
from tests.support.stores import storage_at_work
from tests.support.transaction_peers import begin, commit


@pytest.fixture
def seen(monkeypatch):
    """Notes what storage is in the middle of when a peer is sent something, and when a subscription is served."""
    found = []
    send, serve = Transport.send, DeliveryRounds.serve

    def noting_send(self, *parts):
        found.append(storage_at_work())
        send(self, *parts)

    def noting_serve(self, live):
        found.append(storage_at_work())
        serve(self, live)

    monkeypatch.setattr(Transport, "send", noting_send)
    monkeypatch.setattr(DeliveryRounds, "serve", noting_serve)
    return found


async def test_acks_pushes_saves_and_transactions_leave_storage_before_they_reach_a_peer(a_broker, seen):
    async with a_broker() as connect:
        publisher, subscriber = await connect(), await connect()
        await publisher.ask(T.CREATE_TOPIC, 1, topic="a")
        await subscriber.ask(T.HELLO, 1, protocol="1")
        await subscriber.ask(T.CREATE_SUBSCRIPTION, 2, subscription_id="s", topic="a", max_in_flight="2")
        await subscriber.ask(T.SUBSCRIBE, 3, subscription_id="s")
        for number in range(50):
            assert (await publisher.publish("a", b"%d" % number)).properties["status"] == "success"
            await acked(subscriber, number)
        stage = await begin(publisher, "x")
        await stage.send("a", 0, b"staged")
        await commit(publisher, "x", stage)
        await acked(subscriber, 50)
        await publisher.call("delete_topic", topic="a")
    assert len(seen) > 150
    assert not set().union(*seen)


async def acked(subscriber, offset):
    """Receive the message at an offset, and ack it."""
    deliver = await subscriber.receive()
    assert (deliver.type, deliver.properties["count"]) == (T.DELIVER, "1")
    await subscriber.send(T.SETTLE, offset + 10, msgspec.json.encode({"acks": [[0, offset]]}), subscription_id="s")
