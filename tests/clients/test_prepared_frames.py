"""Messages that come as whole frames are published like any others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qb import BrokerClient, PublishFailed, UnknownTopic
from qb.clients.protocol.prepared_frames import publish_frames
from qb.core.wire.frames import MessageType, encode_frame
from tests.support.brokers import BrokerProcess
from tests.support.peers import Peer

pytestmark = pytest.mark.process


def frames(topic: str, partition: int, *bodies: bytes) -> tuple[bytes, int]:
    named = {"topic": topic, "partition": str(partition), "key": "k"}
    return b"".join(encode_frame(MessageType.DATA, 0, 7, named, body) for body in bodies), len(bodies)


def test_frames_are_stored_with_all_that_they_say(broker: BrokerProcess) -> None:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("events", 2)
        assert publish_frames(client, [frames("events", 1, b"a", b"", b"c"), frames("events", 0, b"d")]) == 4
        assert publish_frames(client, []) == 0
    with Peer(broker.port) as peer:
        peer.hello()
        assert peer.bodies("events", 0) == [b"d"]
        first, *_ = peer.messages("events", 1)
        assert peer.bodies("events", 1) == [b"a", b"", b"c"]
    assert (first.timestamp, first.properties) == (7, {"topic": "events", "partition": "1", "key": "k"})


def test_what_the_broker_refuses_is_raised_and_what_came_before_is_stored(broker: BrokerProcess) -> None:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("events")
        with pytest.raises(PublishFailed, match="there is no topic 'nowhere'") as failed:
            publish_frames(client, [frames("events", 0, b"a"), frames("nowhere", 0, b"b")])
        assert isinstance(failed.value.__cause__, UnknownTopic)
        assert [message.body for message in client.fetch("events")] == [b"a"]


def test_a_broker_that_restarts_meanwhile_stores_each_frame_once(broker: BrokerProcess) -> None:
    def runs() -> Iterator[tuple[bytes, int]]:
        yield frames("events", 0, b"a", b"b")
        broker.restart()
        yield frames("events", 0, b"c")

    with BrokerClient(port=broker.port) as client:
        client.create_topic("events")
        assert publish_frames(client, runs()) == 3
        assert [message.body for message in client.fetch("events")] == [b"a", b"b", b"c"]
