"""What becomes of calls when the connection is lost: nothing twice, nothing in silence."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qb import (
    AsyncBrokerClient,
    BrokerClient,
    BrokerUnavailable,
    ConnectionLost,
    PublishUncertain,
    TooManyConnections,
)
from qb.clients.protocol.reconnecting import LONGEST_PAUSE, READ_ONLY_METHODS, ReconnectBackoff, explain
from qb.core.wire.addresses import BrokerAddress
from qb.doors.binary.methods import METHODS
from tests.support.scripted_broker import Plan, ScriptedBroker

pytestmark = pytest.mark.timeout(40)


def numbered(count: int) -> list[bytes]:
    return [b"%d" % i for i in range(count)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# One publish


def test_a_publish_whose_ack_is_lost_is_answered_once_and_stored_once() -> None:
    with ScriptedBroker(Plan(lose_acks_after=1)) as broker, BrokerClient(port=broker.port) as client:
        receipt = client.publish("orders", b"x")
        assert (receipt.offset, receipt.duplicate) == (0, True)
        assert client.publish("orders", b"y").offset == 1
        assert broker.bodies == [b"x", b"y"]
        assert broker.duplicates == 1
        assert broker.hellos[1]["producer_id"] == "1001"
        assert broker.hellos[1]["producer_secret"] == "secret of 1001"


@pytest.mark.parametrize("second", [Plan(new_producer=True), Plan(refuse_hello="PRODUCER_FENCED")])
def test_a_publish_whose_producer_cannot_be_continued_is_uncertain_and_not_sent_again(second: Plan) -> None:
    with (
        ScriptedBroker(Plan(lose_acks_after=1), second) as broker,
        BrokerClient(port=broker.port) as client,
    ):
        with pytest.raises(PublishUncertain, match="may or may not be stored"):
            client.publish("orders", b"x")
        assert client.publish("orders", b"y").duplicate is False
        assert broker.bodies == [b"x", b"y"]
        assert broker.duplicates == 0


async def test_an_async_publish_whose_producer_cannot_be_continued_is_uncertain_and_not_sent_again() -> None:
    with ScriptedBroker(Plan(lose_acks_after=1), Plan(new_producer=True)) as broker:
        async with AsyncBrokerClient(port=broker.port) as client:
            with pytest.raises(PublishUncertain, match="may or may not be stored"):
                await client.publish("orders", b"x")
            assert (await client.publish("orders", b"y")).duplicate is False
            assert broker.bodies == [b"x", b"y"]


def test_a_publish_lost_before_it_was_stored_is_sent_again() -> None:
    with ScriptedBroker(Plan(drop_after=1)) as broker, BrokerClient(port=broker.port) as client:
        receipts = [client.publish("orders", body) for body in numbered(3)]
        assert [receipt.offset for receipt in receipts] == [0, 1, 2]
        assert broker.bodies == numbered(3)


def test_a_goodbye_is_no_error() -> None:
    with (
        ScriptedBroker(Plan(goodbye_after=1), Plan(goodbye_after=1)) as broker,
        BrokerClient(port=broker.port) as client,
    ):
        assert [client.publish("orders", body).offset for body in numbered(4)] == [0, 1, 2, 3]
        assert broker.bodies == numbered(4)
        assert broker.connections == 3


def test_without_idempotence_a_lost_ack_is_uncertain() -> None:
    with (
        ScriptedBroker(Plan(lose_acks_after=1)) as broker,
        BrokerClient(port=broker.port, idempotent=False) as client,
    ):
        with pytest.raises(PublishUncertain, match="may or may not be stored"):
            client.publish("orders", b"x")
        assert client.publish("orders", b"y").offset == 1
        assert "producer_id" not in broker.hellos[0]


def test_a_request_that_changes_something_says_that_its_answer_was_lost() -> None:
    with ScriptedBroker(Plan(silent=True)) as broker, BrokerClient(port=broker.port) as client:
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                client.delete_topic("orders")
            except ConnectionLost as error:
                failures.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        broker.wait_for(lambda: len(broker.frames) == 2)  # HELLO and the request
        broker.drop_connections()
        thread.join()
        assert len(failures) == 1
        assert client.list_topics()


READS: list[tuple[str, Callable[[BrokerClient], object]]] = [
    ("list_topics", lambda client: client.list_topics()),
    ("describe_topics", lambda client: client.describe_topics(["orders"])),
    ("offsets", lambda client: client.offsets("orders")),
    ("describe_subscription", lambda client: client.describe_subscription("billing")),
]


@pytest.mark.parametrize(("method", "read"), READS, ids=[method for method, _ in READS])
def test_what_only_reads_is_asked_again_when_its_answer_was_lost(
    method: str, read: Callable[[BrokerClient], object]
) -> None:
    plans = [Plan(lose_answer_to=method), Plan(lose_answer_to=method)]
    with ScriptedBroker(*plans) as broker, BrokerClient(port=broker.port) as client:
        broker.answers |= {"describe_topics": [], "offsets": {"first": 0, "next": 0}}
        read(client)
        asked = [frame for frame in broker.frames if frame.properties.get("method") == method]
        assert (len(asked), broker.connections) == (3, 3)


def test_what_only_reads_is_not_asked_again_by_a_client_that_is_closed() -> None:
    with ScriptedBroker(Plan(silent=True)) as broker, BrokerClient(port=broker.port) as client:
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                client.list_topics()
            except ConnectionLost as error:
                failures.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        broker.wait_for(lambda: len(broker.frames) == 2)  # HELLO and the request
        client.close()
        thread.join()
        assert (len(failures), broker.connections) == (1, 1)


def test_what_only_reads_says_that_it_was_lost_if_no_broker_comes_back_in_time() -> None:
    broker = ScriptedBroker(Plan(lose_answer_to="list_topics"))
    with broker, BrokerClient(port=broker.port, request_timeout=0.5) as client:
        broker.stop_listening()
        with pytest.raises(ConnectionLost):
            client.list_topics()


def test_every_method_that_the_client_asks_again_is_one_of_the_broker_that_changes_nothing() -> None:
    changing = {"create", "add", "delete", "seek", "pause", "resume", "fork", "retry", "purge", "join", "sync"}
    changing |= {"heartbeat", "leave", "commit", "reset", "begin", "abort", "finish", "abandon", "move"}
    changing |= {"rotate", "remove", "limit", "verify"}  # a verification is a pass over all copies
    assert {name for name in METHODS if name.partition("_")[0] not in changing} == READ_ONLY_METHODS


# Many publishes


@pytest.mark.parametrize(
    "plans",
    [
        [Plan(lose_acks_after=5_000)],
        [Plan(drop_after=5_000)],
        [Plan(goodbye_after=5_000)],
        [Plan(lose_acks_after=1), Plan(drop_after=3_000), Plan(lose_acks_after=8_000), Plan(goodbye_after=3)],
        [Plan(drop_after=3_000, ack_one_by_one=True), Plan(ack_one_by_one=True)],
    ],
    ids=["acks lost", "dropped", "goodbye", "one after another", "acks one by one"],
)
@pytest.mark.parametrize("partitions", [1, 3])
def test_many_publishes_across_lost_connections_are_stored_once_and_in_order(
    plans: list[Plan], partitions: int
) -> None:
    bodies = numbered(20_000)
    with ScriptedBroker(*plans, partitions=partitions) as broker, BrokerClient(port=broker.port) as client:
        offsets = client.publish_many("orders", iter(bodies))
        assert broker.bodies == bodies
        assert offsets == [message.offset for message in broker.messages]
        assert broker.connections == len([plan for plan in plans if plan != Plan(ack_one_by_one=True)]) + 1


def test_many_publishes_without_idempotence_are_uncertain_from_the_first_unanswered_on() -> None:
    plan = Plan(drop_after=10_000)
    with ScriptedBroker(plan) as broker, BrokerClient(port=broker.port, idempotent=False) as client:
        with pytest.raises(PublishUncertain, match="may or may not be stored") as caught:
            client.publish_many("orders", numbered(50_000))
        assert caught.value.index == 10_000
        assert caught.value.stored == range(10_000)
        assert broker.bodies[:10_000] == numbered(10_000)


def test_threads_on_one_client_all_survive_lost_connections() -> None:
    plans = [Plan(lose_acks_after=3), Plan(drop_after=100), Plan(lose_acks_after=1), Plan(goodbye_after=30)]
    offsets: dict[bytes, int] = {}
    with ScriptedBroker(*plans) as broker, BrokerClient(port=broker.port) as client:

        def work(name: int) -> None:
            for i in range(100):
                body = b"%d/%d" % (name, i)
                offsets[body] = client.publish("orders", body).offset

        threads = [threading.Thread(target=work, args=(name,)) for name in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert offsets == {message.body: message.offset for message in broker.messages}
        assert len(broker.messages) == 500


# No broker


def test_connect_says_at_once_that_nothing_listens() -> None:
    port = free_port()
    with pytest.raises(BrokerUnavailable) as caught:
        BrokerClient(port=port).connect()
    assert str(caught.value) == f"nothing listens on 127.0.0.1:{port}; start the broker with: qb-server"


def test_a_call_waits_for_the_broker_and_then_says_what_to_check() -> None:
    client = BrokerClient(port=free_port(), request_timeout=0.3)
    with pytest.raises(BrokerUnavailable, match="start the broker with"):
        client.publish("orders", b"x")
    with pytest.raises(BrokerUnavailable, match="start the broker with"):
        client.publish_many("orders", [b"x"])
    client.disconnect()


def test_a_call_made_before_the_broker_is_up_succeeds_when_it_comes() -> None:
    port = free_port()
    client = BrokerClient(port=port)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (client.publish("orders", b"x"), done.set()))
    thread.start()
    while not client._link._connection.trouble.failures:  # the first attempt has been refused
        assert not done.wait(0.01)
    with ScriptedBroker(port=port) as broker:
        assert done.wait(20)
        assert broker.bodies == [b"x"]
        client.connect(wait=5)
        client.disconnect()
    thread.join()


def test_a_broker_that_refuses_every_connection_is_quoted() -> None:
    with (
        ScriptedBroker(Plan(turn_away="TOO_MANY_CONNECTIONS")) as broker,
        pytest.raises(BrokerUnavailable, match="go away") as caught,
    ):
        BrokerClient(port=broker.port).connect()
    assert caught.value.code == "TOO_MANY_CONNECTIONS"
    assert isinstance(caught.value.__cause__, TooManyConnections)


def test_a_peer_that_speaks_another_protocol_is_not_taken_for_a_broker() -> None:
    plan = Plan(greeting=b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with ScriptedBroker(plan) as broker, pytest.raises(BrokerUnavailable, match="not a QB broker"):
        BrokerClient(port=broker.port).connect()


def test_a_silent_broker_is_given_up_after_two_heartbeat_intervals() -> None:
    with (
        ScriptedBroker(Plan(silent=True)) as broker,
        BrokerClient(port=broker.port, heartbeat_interval=0.05) as client,
    ):
        assert client.publish("orders", b"x").offset == 0
        assert broker.connections == 2


def test_disconnect_ends_the_waiting_of_other_threads() -> None:
    with ScriptedBroker(Plan(silent=True)) as broker:
        client = BrokerClient(port=broker.port)
        client.connect()
        failures: list[BaseException] = []

        def work() -> None:
            try:
                client.publish("orders", b"x")
            except PublishUncertain as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        broker.wait_for(lambda: broker.ignored)
        client.disconnect()
        thread.join()
        assert "disconnected" in str(failures[0])


def test_a_failed_connect_leaves_alone_those_who_wait_for_the_broker() -> None:
    port = free_port()
    client = BrokerClient(port=port)
    receipts: list[int] = []
    thread = threading.Thread(target=lambda: receipts.append(client.publish("orders", b"x").offset))
    thread.start()
    while not client._link.started:
        pass
    with pytest.raises(BrokerUnavailable):
        client.connect()
    with ScriptedBroker(port=port):
        thread.join()
        client.disconnect()
    assert receipts == [0]


def test_pauses_grow_up_to_a_limit_and_start_anew() -> None:
    backoff = ReconnectBackoff()
    pauses = [backoff.pause() for _ in range(12)]
    assert pauses[0] <= 0.05
    assert all(pause <= LONGEST_PAUSE for pause in pauses)
    assert min(pauses[-3:]) >= LONGEST_PAUSE / 2
    backoff.reset()
    assert backoff.pause() <= 0.05


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConnectionRefusedError(), "nothing listens on h:1; start the broker"),
        (socket.gaierror(), "'h' cannot be resolved"),
        (TimeoutError(), "no answer from h:1 within 5 s"),
        (EOFError(), "the broker has gone, or what listens there is not QB"),
        (OSError("no route"), "no connection to h:1: no route"),
    ],
)
def test_each_reason_has_its_sentence(error: Exception, says: str) -> None:
    assert says in explain(BrokerAddress("h", 1), error)


def test_a_port_that_cannot_be_is_said_to_be_none() -> None:
    with pytest.raises(BrokerUnavailable, match="there is no port 99999; a port is from 1 to 65535"):
        BrokerClient(port=99999, request_timeout=2).connect()


# A real broker, killed


@pytest.mark.process
@pytest.mark.kill
def test_many_publishes_survive_kill_9_of_a_real_broker_without_a_duplicate(broker: Any) -> None:
    total, kills_at = 120_000, {30_000, 60_000, 90_000}

    def bodies() -> Iterator[bytes]:
        for i in range(total):
            if i in kills_at:
                broker.restart()
            yield b"%d" % i

    with BrokerClient(port=broker.port) as client:
        client.create_topic("orders")
        offsets = client.publish_many("orders", bodies())
        assert offsets == range(total)
        [log] = client.describe_topic("orders")["logs"]
        assert log["next_offset"] == total


@pytest.mark.process
def test_publishes_go_on_when_a_real_broker_is_stopped_and_started(broker: Any) -> None:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("orders")
        assert client.publish("orders", b"a").offset == 0
        assert broker.stop() == 0
        broker.start()
        assert client.publish("orders", b"b").offset == 1
