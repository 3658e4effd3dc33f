"""A message pushed to a basic peer counts as delivered when its TCP has acknowledged it, else it goes to the others."""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator, Callable

import pytest
import trio
import trio.lowlevel

from qb.core.push.delivery_sinks import PushedRun
from qb.core.wire.frames import MessageType as T
from qb.doors import delivery_receipts
from qb.doors.delivery_receipts import AwaitedDelivery, DeliveryReceipts
from qb.doors.transport import Transport
from tests.support.brokers import BrokerProcess
from tests.support.peers import Peer
from tests.support.waiting import wait_until

SMALL = 4_096  # bytes that the kernel of a peer takes for it while it does not read; the kernel rounds up
BODY = b"x" * 20_000
COUNT = 150

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what a peer has acknowledged")


def a_peer_that_does_not_read(port: int) -> Peer:
    peer = Peer.__new__(Peer)
    peer.socket = socket.socket()
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    peer.socket.settimeout(20)
    peer.socket.connect(("127.0.0.1", port))
    peer._unread = b""
    return peer


def test_what_was_pushed_to_a_basic_peer_that_has_died_goes_to_the_next_one(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    broker = start_broker()
    with Peer(broker.port) as operator:
        operator.create_topic("a")
        operator.call("create_subscription", subscription_id="s", topic="a")
        dead = a_peer_that_does_not_read(broker.port)
        assert dead.ask(T.SUBSCRIBE, 1, subscription_id="s").properties["status"] == "success"
        for number in range(COUNT):
            operator.publish("a", b"%04d" % number + BODY)
        wait_until(lambda: operator.call("describe_subscription", subscription_id="s")["in_flight"] > 20)
        dead.abort()
        with Peer(broker.port) as alive:
            alive.ask(T.SUBSCRIBE, 1, subscription_id="s")
            got: list[int] = []
            while not got or max(got) < COUNT - 1 or len(set(got)) < COUNT - 20:
                frame = alive.receive()
                assert frame is not None
                if frame.type == T.DATA:
                    got.append(int(frame.body[:4]))
            lost = set(range(COUNT)) - set(got)
            assert lost == set(range(len(lost))), "only what its kernel had taken for it, from the first one on"
            wait_until(lambda: operator.call("describe_subscription", subscription_id="s")["lag"] == 0)
            assert operator.call("dead_letters", subscription_id="s") == []


def test_a_basic_peer_that_reads_gets_everything_once(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    with Peer(broker.port) as operator, Peer(broker.port) as reader:
        operator.create_topic("a")
        operator.call("create_subscription", subscription_id="s", topic="a", options={"max_in_flight": 7})
        reader.ask(T.SUBSCRIBE, 1, subscription_id="s")
        got = []
        for number in range(COUNT):
            operator.publish("a", b"%d" % number)
        while len(got) < COUNT:
            frame = reader.receive()
            assert frame is not None
            got += [int(frame.body)] if frame.type == T.DATA else []
        wait_until(lambda: operator.call("describe_subscription", subscription_id="s")["lag"] == 0)
        reader.ask(T.UNSUBSCRIBE, 2, subscription_id="s")
        assert got == list(range(COUNT))


class Receipts:
    """Receipts of a peer whose TCP acknowledges when the test says so."""

    def __init__(self) -> None:
        mine, self.peer = socket.socketpair()
        self.transport = Transport(mine)
        self.acknowledged = 0
        self.asked = 0  # how often the kernel was
        self.received: list[int] = []
        self.renewed = 0
        self.looks = DeliveryReceipts(self.transport, self._received, self._renew)

    def push(self, offset: int, size: int = 100) -> None:
        self.transport.send(bytes(size))
        self.looks.expect(PushedRun("s", "t", 0, 1, 1, 0, b"", runs=(range(offset, offset + 1),)))

    def unacknowledged(self, sock: socket.socket) -> int:
        self.asked += 1
        return self.transport.taken - self.acknowledged

    def _received(self, deliveries: list[AwaitedDelivery]) -> None:
        self.received += [offset for each in deliveries for run in each.runs for offset in run]

    def _renew(self) -> None:
        self.renewed += 1


@pytest.fixture
async def receipts(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receipts]:
    opened = Receipts()
    monkeypatch.setattr(delivery_receipts, "unacknowledged", opened.unacknowledged)
    with opened.peer:
        yield opened
        opened.transport.close()


async def test_deliveries_count_when_their_last_byte_is_acknowledged(receipts: Receipts) -> None:
    receipts.push(0)
    receipts.push(1)
    assert not receipts.looks.look()
    receipts.acknowledged = 199
    assert receipts.looks.look()
    assert receipts.received == [0]
    receipts.acknowledged = 200
    assert receipts.looks.look()
    assert receipts.received == [0, 1]
    assert not receipts.looks.look()


async def test_the_kernel_is_asked_once_a_look_and_not_once_a_message(receipts: Receipts) -> None:
    for offset in range(300):
        receipts.push(offset, size=1)
    receipts.acknowledged = 300
    assert receipts.looks.look()
    assert receipts.received == list(range(300))
    assert receipts.asked == 1


async def test_leases_are_renewed_while_a_peer_does_not_acknowledge(
    receipts: Receipts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_receipts, "RENEWAL", 0.01)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receipts.looks.run)
            receipts.push(0)
            while receipts.renewed < 2:
                await trio.lowlevel.checkpoint()
            receipts.acknowledged = 100
            while not receipts.received:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
