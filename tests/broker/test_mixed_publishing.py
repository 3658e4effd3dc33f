"""Messages of all lengths, one at a time and many at once, at the same time: what was acked is there, at its offset."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from qb import BrokerClient
from qb.core.wire.frames import MessageType, encode_frame
from qb.storage.verification import verify
from tests.support.brokers import BrokerProcess
from tests.support.peers import Peer

pytestmark = pytest.mark.timeout(120)

MIB = 1024 * 1024


def bodies(name: str, count: int, longest: int) -> list[bytes]:
    """Bodies that are mostly short, and each its own."""
    dice = random.Random(name)
    lengths = [dice.choice((5, 80, 900, 30_000, longest)) if dice.random() < 0.3 else 100 for _ in range(count)]
    return [b"%s %d " % (name.encode(), number) + dice.randbytes(length) for number, length in enumerate(lengths)]


class Publisher(threading.Thread):
    """Publishes with a client of its own and notes what lies where."""

    def __init__(self, port: int, name: str, publish: Callable[[BrokerClient, str], dict[int, bytes]]) -> None:
        super().__init__(name=name)
        self._port, self._publish = port, publish
        self.stored: dict[int, bytes] = {}
        self.start()

    def run(self) -> None:
        with BrokerClient(port=self._port) as client:
            self.stored = self._publish(client, self.name)


def one_at_a_time(client: BrokerClient, name: str) -> dict[int, bytes]:
    return {client.publish("t", body).offset: body for body in bodies(name, 400, 60_000)}


def many_at_once(client: BrokerClient, name: str) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for turn in range(6):
        some = bodies(f"{name}-{turn}", 60, 3 * MIB)
        found |= dict(zip(client.publish_many("t", some), some, strict=True))
    return found


def uniform(client: BrokerClient, name: str) -> dict[int, bytes]:
    some = [b"%s %07d" % (name.encode(), number) for number in range(100_000)]
    return dict(zip(client.publish_many("t", some), some, strict=True))


def read(client: BrokerClient, count: int) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while len(found) < count:
        fetched = client.fetch("t", offset=len(found), max_messages=50_000, max_bytes=8 * MIB)
        found |= {message.offset: message.body for message in fetched}
    return found


def test_whatever_is_published_at_once_lies_where_the_receipts_say(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(segment_bytes=20 * MIB)
    with BrokerClient(port=broker.port) as client:
        client.create_topic("t")
        ways = {"lone-1": one_at_a_time, "many": many_at_once, "uniform": uniform, "lone-2": one_at_a_time}
        publishers = [Publisher(broker.port, name, publish) for name, publish in ways.items()]
        for publisher in publishers:
            publisher.join()
        stored = {offset: body for publisher in publishers for offset, body in publisher.stored.items()}
        assert sorted(stored) == list(range(400 + 360 + 100_000 + 400))
        assert read(client, len(stored)) == stored
    broker.kill()
    report = verify(broker.data_dir)
    assert (report.findings, report.messages) == ([], len(stored))
    broker.restart()
    with BrokerClient(port=broker.port) as client:
        assert read(client, len(stored)) == stored


@pytest.mark.parametrize("hello", [False, True])
@pytest.mark.parametrize(("partitions", "step"), [(2, 1), (1, 2)])
def test_thousands_of_publishes_that_do_not_follow_each_other_are_all_answered(
    start_broker: Callable[..., BrokerProcess], hello: bool, partitions: int, step: int
) -> None:
    count, answered = 6_000, 0
    with Peer(start_broker().port, timeout=30) as peer:
        if hello:
            peer.hello()
        peer.create_topic("t", partitions=str(partitions))
        numbers = range(1, 1 + count * step, step)  # each the next partition's turn, or with a gap before it
        peer.send_bytes(b"".join([encode_frame(MessageType.PUBLISH, n, 0, {"topic": "t"}, b"x") for n in numbers]))
        while answered < count:
            answer = peer.receive()
            assert answer.properties["status"] == "success"
            answered += int(answer.properties.get("count", 1))
        assert answered == count
