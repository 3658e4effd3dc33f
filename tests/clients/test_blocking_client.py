"""BrokerClient over real sockets: first against a scripted broker, then against a real one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from qb import (
    BadRequest,
    BrokerClient,
    DiskFull,
    MessageTooLarge,
    PublishFailed,
    PublishUncertain,
    RequestTimedOut,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from qb.clients.protocol.conversation import WINDOW_BYTES
from qb.clients.protocol.publish_frames import PORTION
from qb.core.wire.frames import PROBE, MessageType
from tests.support.scripted_broker import Plan, ScriptedBroker

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def scripted() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


@pytest.fixture
def client(scripted: ScriptedBroker) -> Iterator[BrokerClient]:
    with BrokerClient(port=scripted.port, client_id="tester") as client:
        yield client


def numbered(count: int) -> list[bytes]:
    return [b"%d" % i for i in range(count)]


def test_the_first_use_connects(scripted: ScriptedBroker) -> None:
    client = BrokerClient(port=scripted.port, client_id="tester")
    assert scripted.connections == 0
    assert client.ping() > 0
    client.disconnect()
    assert scripted.hellos == [
        {
            "protocol": "1",
            "features": "redirect,publish_runs",
            "compression": "zstd,lz4",
            "client_id": "tester",
            "producer_id": "new",
        }
    ]


def test_disconnecting_does_not_wait_for_a_thread_that_stands_aside(
    scripted: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qb.clients.blocking.connection.link_thread.STAND_ASIDE", 3600.0)
    client = BrokerClient(port=scripted.port)
    for _ in range(3):
        client.ping()  # who waits for one answer reads for itself: the thread leaves the socket alone
    client.disconnect()  # the test's own timeout would end it


def test_a_publish_returns_its_receipt(scripted: ScriptedBroker, client: BrokerClient) -> None:
    receipt = client.publish("orders", b"one", partition=0, key="k", timestamp_ms=5, colour="red")
    assert receipt
    assert receipt == ("orders", 0, 0, 1_700_000_000_123, "fsynced", False, False)
    [message] = scripted.messages
    assert (message.body, message.timestamp) == (b"one", 5)
    assert message.properties == {"topic": "orders", "partition": "0", "key": "k", "colour": "red"}


def test_text_is_published_as_utf_8(scripted: ScriptedBroker, client: BrokerClient) -> None:
    assert client.publish_text("orders", "grün", colour="red").offset == 0
    assert scripted.bodies == ["grün".encode()]


@pytest.mark.parametrize("body", [bytearray(b"abc"), memoryview(b"abc"), b"abc"], ids=lambda body: type(body).__name__)
def test_anything_bytes_like_is_a_body(scripted: ScriptedBroker, client: BrokerClient, body: Any) -> None:
    client.publish("orders", body)
    client.publish_many("orders", [body])
    assert scripted.bodies == [b"abc", b"abc"]


def test_mistakes_are_found_before_anything_is_sent(scripted: ScriptedBroker, client: BrokerClient) -> None:
    with pytest.raises(TypeError, match="publish_text"):
        client.publish("orders", "text")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="client_id"):
        client.publish("orders", b"x", client_id="me")
    with pytest.raises(MessageTooLarge, match="1048576"):
        client.publish("orders", bytes((1 << 20) + 1))
    assert client.publish("orders", b"x").offset == 0
    assert scripted.bodies == [b"x"]


def test_requests_carry_their_arguments_and_return_the_answer(client: BrokerClient) -> None:
    created = client.create_topic("orders", partitions=3, retention_hours=1.5)
    assert created["arguments"] == {"topic": "orders", "partitions": 3, "retention_hours": 1.5}
    assert client.list_topics() == [{"method": "list_topics", "arguments": {}}]
    assert client.server_info()["method"] == "server_info"


def test_a_refusal_raises_its_type_with_the_brokers_words(client: BrokerClient) -> None:
    with pytest.raises(UnknownTopic, match="there is no topic 'unknown'") as caught:
        client.describe_topic("unknown")
    assert caught.value.code == "UNKNOWN_TOPIC"


def test_a_refused_publish_raises_and_the_next_one_succeeds(scripted: ScriptedBroker, client: BrokerClient) -> None:
    scripted.refuse[b"bad"] = "DISK_FULL"
    with pytest.raises(DiskFull):
        client.publish("orders", b"bad")
    assert client.publish("orders", b"good").offset == 0


def test_many_are_published_in_order_from_any_iterable(scripted: ScriptedBroker, client: BrokerClient) -> None:
    bodies = numbered(20_000)
    assert client.publish_many("orders", (body for body in bodies), properties={"colour": "red"}) == range(20_000)
    assert client.publish_many("orders", []) == []
    assert client.publish_many("orders", bodies[:3]) == [20_000, 20_001, 20_002]
    assert scripted.bodies == bodies + bodies[:3]
    assert scripted.messages[-4].properties == {"topic": "orders", "colour": "red"}


def test_offsets_follow_the_bodies_over_several_partitions() -> None:
    bodies = numbered(5_000)
    with ScriptedBroker(partitions=3) as broker, BrokerClient(port=broker.port) as client:
        offsets = client.publish_many("orders", bodies)
        assert offsets == [i // 3 for i in range(5_000)]
        assert [run.partition for run in offsets.runs[:4]] == [0, 1, 2, 0]


def test_a_generator_is_read_no_further_than_the_window_allows() -> None:
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 1000

    with ScriptedBroker(Plan(silent=True)) as broker, BrokerClient(port=broker.port, request_timeout=0.3) as client:
        with pytest.raises(PublishUncertain) as caught:
            client.publish_many("orders", endless())
        assert (caught.value.index, list(caught.value.stored)) == (0, [])
    assert 0.9 * WINDOW_BYTES < taken * 1_000 < WINDOW_BYTES + 2 * PORTION


def test_a_refusal_among_many_says_where_and_what_was_stored(scripted: ScriptedBroker, client: BrokerClient) -> None:
    scripted.refuse[b"2"] = "DISK_FULL"
    with pytest.raises(PublishFailed, match="DISK_FULL") as caught:
        client.publish_many("orders", numbered(5))
    assert caught.value.index == 2
    assert caught.value.stored == [0, 1, 2, 3]
    assert isinstance(caught.value.__cause__, DiskFull)
    assert caught.value.code == "DISK_FULL"
    assert [(run.start, run.size) for run in caught.value.stored.runs] == [(0, 2), (3, 2)]  # type: ignore[attr-defined]


def test_a_body_too_large_among_many_stops_there(scripted: ScriptedBroker, client: BrokerClient) -> None:
    with pytest.raises(PublishFailed) as caught:
        client.publish_many("orders", [b"a", b"b", bytes(1 << 21), b"c"])
    assert (caught.value.index, list(caught.value.stored)) == (2, [0, 1])
    assert scripted.bodies == [b"a", b"b"]


def test_what_a_generator_raises_comes_out_after_its_bodies_are_stored(
    scripted: ScriptedBroker, client: BrokerClient
) -> None:
    def broken() -> Iterator[bytes]:
        yield b"a"
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        client.publish_many("orders", broken())
    assert scripted.bodies == [b"a"]


def test_threads_share_one_client(scripted: ScriptedBroker, client: BrokerClient) -> None:
    receipts: dict[bytes, int] = {}

    def one_by_one(name: bytes) -> None:
        for i in range(200):
            body = b"%s %d" % (name, i)
            receipts[body] = client.publish("orders", body).offset

    def in_bulk(name: bytes) -> None:
        bodies = [b"%s %d" % (name, i) for i in range(5_000)]
        receipts.update(zip(bodies, client.publish_many("orders", bodies), strict=True))

    threads = [threading.Thread(target=one_by_one, args=(b"single%d" % i,)) for i in range(4)]
    threads += [threading.Thread(target=in_bulk, args=(b"bulk%d" % i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(receipts) == 4 * 200 + 2 * 5_000
    assert receipts == {message.body: message.offset for message in scripted.messages}
    assert scripted.connections == 1


def test_a_broker_that_does_not_answer_leaves_the_publish_uncertain() -> None:
    with ScriptedBroker(Plan(silent=True)) as broker, BrokerClient(port=broker.port, request_timeout=0.2) as client:
        with pytest.raises(PublishUncertain, match="may or may not be stored"):
            client.publish("orders", b"x")
        with pytest.raises(RequestTimedOut, match="did not answer in time"):
            client.list_topics()


def test_a_probe_is_answered() -> None:
    with ScriptedBroker(Plan(probe=True)) as broker, BrokerClient(port=broker.port):
        broker.wait_for(lambda: any(frame.sequence_number == PROBE for frame in broker.frames))


def test_an_idle_client_sends_heartbeats_and_stays_connected(scripted: ScriptedBroker) -> None:
    with BrokerClient(port=scripted.port, heartbeat_interval=0.02) as client:
        scripted.wait_for(lambda: sum(frame.type == MessageType.HEARTBEAT for frame in scripted.frames) >= 5)
        client.publish("orders", b"x")
    assert scripted.connections == 1


def test_a_client_can_be_used_again_after_disconnect(scripted: ScriptedBroker, client: BrokerClient) -> None:
    client.publish("orders", b"a")
    client.disconnect()
    client.disconnect()
    client.publish("orders", b"b")
    assert scripted.bodies == [b"a", b"b"]
    assert scripted.connections == 2


# Against a real broker


@pytest.mark.process
def test_a_real_broker_does_what_the_client_promises(broker: Any) -> None:
    with BrokerClient(port=broker.port, client_id="tester") as client:
        assert client.create_topic("orders", partitions=2)["partitions"] == 2
        with pytest.raises(TopicExists):
            client.create_topic("orders")
        assert [topic["topic"] for topic in client.list_topics()] == ["orders"]
        receipt = client.publish("orders", b"one", partition=1, colour="red")
        assert (receipt.topic, receipt.partition, receipt.offset, receipt.durability) == ("orders", 1, 0, "fsynced")
        assert client.publish_many("orders", numbered(3_000), partition=1) == range(1, 3_001)
        assert [log["next_offset"] for log in client.describe_topic("orders")["logs"]] == [0, 3_001]
        with pytest.raises(UnknownTopic, match="create-topic"):
            client.publish("nowhere", b"x")
        with pytest.raises(UnknownPartition):
            client.publish("orders", b"x", partition=7)
        assert client.ping() > 0
        assert client.server_info()["durability"] == "fsynced"
        client.delete_topic("orders")
        assert client.list_topics() == []


@pytest.mark.process
def test_offsets_of_many_are_right_when_a_real_broker_picks_the_partitions(broker: Any) -> None:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("orders", partitions=4)
        offsets = client.publish_many("orders", numbered(10_000))
        assert len(offsets) == 10_000
        counts = [log["next_offset"] for log in client.describe_topic("orders")["logs"]]
        found = [sum(run.size for run in offsets.runs if run.partition == partition) for partition in range(4)]
        assert found == counts
