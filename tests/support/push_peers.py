"""Peers of the binary door that join subscriptions and read their deliveries."""

from __future__ import annotations

import msgspec

from qb.core.wire.frames import MessageType as T
from qb.core.wire.frames import data_frames


async def a_topic(connect, count=0, topic="a", **topic_properties):
    peer = await connect()
    await peer.ask(T.CREATE_TOPIC, 1, topic=topic, **topic_properties)
    for number in range(count):
        await peer.publish(topic, b"%d" % number)
    return peer


async def a_fast_peer(connect, **hello):
    peer = await connect()
    await peer.ask(T.HELLO, 1, protocol="1", **hello)
    return peer


async def joined(connect, subscription="s", **properties):
    peer = await a_fast_peer(connect)
    answer = await peer.ask(T.SUBSCRIBE, 2, subscription_id=subscription, announces="true", **properties)
    assert answer.properties["status"] == "success", answer
    return peer


class Delivered:
    """Reads DELIVER frames of a peer one message at a time."""

    def __init__(self, peer):
        self.peer = peer
        self.settle_number = 0
        self._waiting = []

    async def next(self):
        """Return (partition, offset, body, attempt)."""
        while not self._waiting:
            await self._receive()
        return self._waiting.pop(0)

    async def _receive(self):
        frame = await self.peer.receive()
        assert frame is not None, "the broker closed the connection"
        if frame.type == T.DELIVER:
            about = frame.properties
            found = [
                (int(about["partition"]), data.sequence_number, data.body, int(about["attempt"]))
                for data in data_frames(frame.body)
            ]
            assert len(found) == int(about["count"])
            self._waiting += found
        return frame

    async def take(self, count):
        return [(await self.next())[2] for _ in range(count)]

    async def settle(self, subscription="s", **parts):
        self.settle_number += 1
        await self.peer.send(T.SETTLE, self.settle_number, msgspec.json.encode(parts), subscription_id=subscription)
        await self.peer.send(T.HEARTBEAT, self.settle_number)
        while (await self._receive()).type != T.HEARTBEAT:
            pass  # once the heartbeat is answered, the SETTLE before it has been carried out


async def all_saved(peer, subscription="s"):
    """Return when every ack is durable, so that it has given its place back."""
    while True:
        described = await peer.call("describe_subscription", subscription_id=subscription)
        if not any(each["unsaved_acks"] for each in described["subscribers"]):
            return


def bodies(first, end):
    return [b"%d" % number for number in range(first, end)]
