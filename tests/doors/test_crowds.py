"""Many peers at once, against a real server process: what all of them together hold is bounded."""

from __future__ import annotations

import json
import select
import socket
import urllib.request

import pytest

from qb import BrokerClient
from qb.core.wire.frames import MessageType, encode_frame
from tests.support.brokers import BrokerProcess, free_port
from tests.support.bystanders import GoodClient, memory
from tests.support.peers import Peer
from tests.support.waiting import holds_for, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

MiB = 2**20
FRAME = encode_frame(MessageType.PUBLISH, 2, 0, {"topic": "big"}, bytes(15 * MiB))
LINE = b'{"type":"produce","topic":"big","value":"' + b"x" * 15 * MiB
GREETINGS = {"frames": encode_frame(MessageType.HEARTBEAT, 1), "json": b'{"type":"listTopics"}\n'}
HALVES = {"frames": FRAME[: 14 * MiB], "json": LINE[: 14 * MiB]}


@pytest.fixture
def broker(start_broker) -> BrokerProcess:
    return start_broker(
        max_unfinished_bytes="32MiB", tail_bytes="4MiB", json_port=free_port(), http_port=free_port(), frame_deadline=60
    )


def port_of(broker: BrokerProcess, door: str) -> int:
    return broker.port if door == "frames" else int(broker._settings[f"{door}_port"])


def connect(broker: BrokerProcess, door: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(broker, door)), timeout=30)


def say(peer: socket.socket, data: bytes) -> None:
    """Send as much as the broker lets us."""
    try:
        peer.sendall(data)
    except ConnectionError:
        pass


def last_words(peer: socket.socket) -> bytes:
    """Return all that comes until the broker closes."""
    heard = b""
    try:
        while data := peer.recv(65_536):
            heard += data
    except ConnectionError:
        pass
    return heard


@pytest.mark.parametrize("door", ["frames", "json"])
@pytest.mark.parametrize("greets", [True, False])
def test_half_sent_messages_of_many_peers_share_one_budget_and_a_whole_one_still_goes_through(broker, door, greets):
    with BrokerClient(port=broker.port) as client:
        client.create_topic("big")
        good = GoodClient(broker.port)
        good.wait_for_more()
        before = memory(broker, "VmHWM")
        peers = [connect(broker, door) for _ in range(20)]
        for peer in peers:
            if greets:
                peer.sendall(GREETINGS[door])
                assert peer.recv(65_536)
            say(peer, HALVES[door])
        assert client.publish("big", bytes(MiB)).offset == 0
        good.wait_for_more()
        refused = [last_words(peer) for peer in peers if select.select([peer], [], [], 0)[0]]
        assert len(refused) >= 17
        assert all(b"QB_MAX_UNFINISHED_BYTES" in words for words in refused)
        assert memory(broker, "VmHWM") - before < 96 * MiB  # of 280 that were sent; the C library keeps some
        for peer in peers:
            peer.close()
        good.stop()
    assert "Traceback" not in broker.log


@pytest.mark.parametrize("door", ["frames", "json"])
def test_a_message_that_is_sent_for_ever_ends_at_its_deadline(start_broker, door):
    broker = start_broker(frame_deadline=0.5, json_port=free_port())
    with connect(broker, door) as peer:
        peer.sendall(GREETINGS[door])
        assert peer.recv(65_536)
        peer.sendall(HALVES[door][:1_000])

        def trickles() -> bool:
            say(peer, b"x")
            return bool(select.select([peer], [], [], 0)[0])

        wait_until(trickles)
        assert b"QB_FRAME_DEADLINE" in last_words(peer)


def test_idle_json_peers_are_dropped_unless_they_are_pushed_to(start_broker):
    broker = start_broker(json_idle_timeout=0.5, json_port=free_port())
    with BrokerClient(port=broker.port) as client, connect(broker, "json") as idle, connect(broker, "json") as pushed:
        client.create_topic("a")
        client.create_subscription("s", "a")
        pushed.sendall(b'{"type":"subscribe","subscription":"s","autoAck":true}\n')
        assert b'"ok":true' in pushed.recv(65_536)
        assert b"QB_JSON_IDLE_TIMEOUT" in last_words(idle)
        holds_for(1.0, lambda: not select.select([pushed], [], [], 0)[0])
        client.publish("a", b"still here")
        assert b"still here" in pushed.recv(65_536)


def test_idle_json_peers_leave_room_for_the_operators_client_and_for_health(start_broker):
    broker = start_broker(max_connections=20, json_port=free_port(), http_port=free_port())
    idle = [connect(broker, "json") for _ in range(30)]
    answers = [json.loads(last_words(peer)) for peer in idle[18:]]
    assert all("QB_JSON_MAX_CONNECTIONS" in answer["error"] for answer in answers)
    peers = [Peer(broker.port) for _ in range(2)]
    for peer in peers:
        peer.send(MessageType.HEARTBEAT, 7)
        assert peer.receive().type == MessageType.HEARTBEAT
    for _ in range(50):  # there is always one more for the operator, also beside others that are on this machine
        with Peer(broker.port) as operator:
            operator.send(MessageType.HEARTBEAT, 7)
            assert operator.receive().type == MessageType.HEARTBEAT
    lingering = [Peer(broker.port) for _ in range(30)]
    with BrokerClient(port=broker.port) as client:
        assert client.list_topics() == []
    for peer in lingering:
        peer.socket.close()
    hanging = [connect(broker, "http") for _ in range(20)]  # these take the brief slots, and say nothing
    with urllib.request.urlopen(f"http://127.0.0.1:{port_of(broker, 'http')}/health", timeout=30) as answer:
        assert answer.status == 200
    for peer in (*idle, *hanging, *(each.socket for each in peers)):
        peer.close()


def test_connections_of_one_address_are_limited_where_that_is_set(start_broker):
    broker = start_broker(max_connections_per_address=3, json_port=free_port())
    with BrokerClient(port=broker.port) as client:
        peers = [Peer(broker.port) for _ in range(2)]
        for peer in peers:
            peer.send(MessageType.HEARTBEAT, 7)
            assert peer.receive().type == MessageType.HEARTBEAT
        with connect(broker, "json") as refused:
            assert b"QB_MAX_CONNECTIONS_PER_ADDRESS" in last_words(refused)
        with BrokerClient(port=broker.port) as operator:
            assert operator.list_topics() == client.list_topics() == []
        for peer in peers:
            peer.socket.close()


def test_peers_that_fetch_much_and_read_nothing_share_one_budget_and_hold_up_no_other(start_broker):
    broker = start_broker(max_unread_bytes="64MiB", tail_bytes="4MiB")
    with BrokerClient(port=broker.port) as client:
        client.create_topic("a")
        client.publish_many("a", [bytes(7 * MiB)] * 2)
        client.create_topic("b")
        client.publish("b", b"x")
        before = memory(broker, "VmHWM")
        peers = [Peer(broker.port) for _ in range(60)]
        for peer in peers:
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            peer.send(MessageType.FETCH, 1, topic="a", offset="0", max_bytes=str(16 * MiB))
            assert [message.body for message in client.fetch("b", 0)] == [b"x"]
        assert "QB_MAX_UNREAD_BYTES" not in broker.log  # it has not waited until others were dropped
        wait_until(lambda: broker.log.count("QB_MAX_UNREAD_BYTES") >= 5)
        assert memory(broker, "VmHWM") - before < 192 * MiB  # of 600 that they are sent and the kernel does not take
        for peer in peers:
            peer.socket.close()
