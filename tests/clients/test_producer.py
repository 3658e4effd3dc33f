"""Producers of the blocking client: batches, handles, errors, and a broker that dies in the middle."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from qb import (
    BadRequest,
    BrokerClient,
    BrokerUnavailable,
    BufferFull,
    ConnectionLost,
    Delivery,
    DiskFull,
    MessageTooLarge,
    PublishFailed,
    PublishUncertain,
    RequestTimedOut,
    UnknownPartition,
    UnknownTopic,
    UsedAfterFork,
)
from qb.clients.protocol.partition_spread import partition_of
from tests.support.brokers import ROOT, BrokerProcess, free_port
from tests.support.forks import child, raised_by
from tests.support.scripted_broker import Plan, ScriptedBroker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)
PATIENCE = 30.0
AN_HOUR = 3_600_000  # a linger that no test waits for


@pytest.fixture
def scripted() -> Iterator[ScriptedBroker]:
    with ScriptedBroker(max_message_size=5000) as broker:
        yield broker


@pytest.fixture
def client(scripted: ScriptedBroker) -> Iterator[BrokerClient]:
    with BrokerClient(port=scripted.port, request_timeout=10) as client:
        yield client


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


@contextmanager
def silenced(broker: ScriptedBroker, request_timeout: float = PATIENCE) -> Iterator[BrokerClient]:
    """A client that does not have to ask for the partitions of a topic."""
    with BrokerClient(port=broker.port, request_timeout=request_timeout) as client:
        client._routes.learn("orders", 1, float("inf"))
        yield client


# Batches


def test_send_returns_before_anything_is_sent_and_the_handle_has_the_receipt(
    scripted: ScriptedBroker, client: BrokerClient
) -> None:
    with client.producer("orders", linger_ms=AN_HOUR) as producer:
        handles = [producer.send(body) for body in numbered(3)]
        assert not any(handle.done() for handle in handles)
        assert scripted.bodies == []
        assert "pending" in repr(handles[0])
        producer.flush()
        assert all(handle.done() for handle in handles)
    assert [handle.result().offset for handle in handles] == [0, 1, 2]
    assert handles[1].result(timeout=0)[:3] == ("orders", 0, 1)
    assert handles[1].result().durability == "fsynced"
    assert "offset=1" in repr(handles[1])


def test_a_batch_goes_when_it_has_so_many_messages_or_bytes(scripted: ScriptedBroker, client: BrokerClient) -> None:
    with client.producer("orders", linger_ms=AN_HOUR, batch_size=3) as producer:
        handles = [producer.send(body) for body in numbered(4)]
        assert [handle.result(PATIENCE).offset for handle in handles[:3]] == [0, 1, 2]
        assert not handles[3].done()
    with client.producer("orders", linger_ms=AN_HOUR, batch_bytes=2000) as producer:
        small, large = producer.send(b"small"), producer.send(b"x" * 2000)
        assert (small.result(PATIENCE).offset, large.result(PATIENCE).offset) == (4, 5)


def test_a_lone_message_goes_after_the_linger(client: BrokerClient) -> None:
    with client.producer("orders", linger_ms=1) as producer:
        assert producer.send(b"one").result(PATIENCE).offset == 0
        assert producer.send(b"two").result(PATIENCE).offset == 1


def test_a_batch_is_one_write_of_consecutive_numbers(scripted: ScriptedBroker, client: BrokerClient) -> None:
    with client.producer("orders", linger_ms=AN_HOUR) as producer:
        for body in numbered(5000):
            producer.send(body)
    assert scripted.bodies == numbered(5000)
    assert len([frame for frame in scripted.frames if frame.properties.get("method") == "describe_topic"]) == 1


def test_every_option_of_a_message_reaches_the_broker(scripted: ScriptedBroker, client: BrokerClient) -> None:
    when = datetime(2026, 11, 18, tzinfo=UTC)
    with client.producer("orders") as producer:
        producer.send(bytearray(b"one"), key="k", properties={"colour": "red"}, partition=0, timestamp=when)
        producer.send(b"two", timestamp=7)
        producer.send(memoryview(b"three"))
    one, two, three = scripted.messages
    expected = {"topic": "orders", "partition": "0", "key": "k", "colour": "red"}
    assert (one.body, one.timestamp, one.properties) == (b"one", int(when.timestamp() * 1000), expected)
    assert (two.timestamp, two.properties) == (7, {"topic": "orders"})
    assert (three.body, three.timestamp) == (b"three", 0)


def test_what_makes_no_sense_is_raised_by_send_itself(client: BrokerClient) -> None:
    with client.producer("orders") as producer:
        with pytest.raises(TypeError, match="bytes, not str"):
            producer.send("text")  # type: ignore[arg-type]
        with pytest.raises(BadRequest):
            producer.send(b"x", properties={"topic": "t"})
        with pytest.raises(TypeError, match="key must be a str"):
            producer.send(b"x", key=7)  # type: ignore[arg-type]
        producer.send(b"x").result(PATIENCE)
        with pytest.raises(MessageTooLarge):
            producer.send(b"x" * 5001)
    with pytest.raises(RuntimeError, match="this producer is closed"):
        producer.send(b"x")


def test_what_cannot_be_called_is_refused_before_anything_is_sent(client: BrokerClient) -> None:
    async def report(delivery: Delivery) -> None: ...

    with pytest.raises(TypeError, match="on_delivery is a function of one Delivery, not int"):
        client.producer("orders", on_delivery=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="on_delivery is an async def"):
        client.producer("orders", on_delivery=report)


def test_the_client_closes_its_producers_when_it_disconnects(scripted: ScriptedBroker) -> None:
    with BrokerClient(port=scripted.port) as client:
        producer = client.producer("orders", linger_ms=AN_HOUR)
        handle = producer.send(b"one")
    assert handle.result().offset == 0
    with pytest.raises(RuntimeError, match="closed"):
        producer.send(b"two")


# Errors


def test_an_error_reaches_the_handle_the_callback_and_the_log(
    scripted: ScriptedBroker, client: BrokerClient, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.refuse[b"bad"] = "UNKNOWN_TOPIC"
    deliveries: list[Delivery] = []
    with client.producer("orders", on_delivery=deliveries.append) as producer:
        good, bad = producer.send(b"good", key="k"), producer.send(b"bad")
        with pytest.raises(UnknownTopic):
            bad.result(PATIENCE)
    assert "failed: refused" in repr(bad)
    assert [(each.value, each.key, each.receipt, type(each.error)) for each in deliveries] == [
        (b"good", "k", good.result(), type(None)),
        (b"bad", None, None, UnknownTopic),
    ]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [(record.name, record.getMessage()) for record in errors] == [
        ("qb.client", "1 message for topic orders is not stored: refused: UNKNOWN_TOPIC")
    ]


def test_a_failure_that_nothing_has_reported_is_raised_by_flush_and_by_the_end_of_the_block(
    scripted: ScriptedBroker, client: BrokerClient
) -> None:
    scripted.refuse[b"bad"] = "UNKNOWN_TOPIC"
    text = "1 message for topic orders is not known to be stored"
    with pytest.raises(PublishFailed, match=text), client.producer("orders") as producer:
        producer.send(b"bad")
        with pytest.raises(PublishFailed) as failed:
            producer.flush()
        assert (failed.value.code, type(failed.value.__cause__)) == ("UNKNOWN_TOPIC", UnknownTopic)
        producer.flush()  # reported once
        producer.send(b"bad")
    with pytest.raises(ZeroDivisionError), client.producer("orders") as producer:
        producer.send(b"bad")
        raise ZeroDivisionError  # which is not hidden


def test_a_callback_that_raises_harms_no_other_message(client: BrokerClient, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[bytes] = []

    def on_delivery(delivery: Delivery) -> None:
        seen.append(delivery.value)
        raise ZeroDivisionError

    with client.producer("orders", on_delivery=on_delivery) as producer:
        for body in numbered(3):
            producer.send(body)
    assert seen == numbered(3)
    assert caplog.text.count("on_delivery of a producer for topic orders has raised") == 3


def test_a_callback_may_send_and_wait_for_handles_but_not_for_itself(
    scripted: ScriptedBroker, client: BrokerClient
) -> None:
    found: list[object] = []
    called = threading.Event()

    def answer(delivery: Delivery) -> None:
        if delivery.value == b"question":
            found.append(producer.send(b"answer").result(PATIENCE).offset)
            found.extend(raised_by(call) for call in (producer.flush, producer.close))
            called.set()

    with client.producer("orders", on_delivery=answer) as producer:
        assert producer.send(b"question").result(PATIENCE).offset == 0
        assert called.wait(PATIENCE)
    assert found == [1, "RuntimeError", "RuntimeError"]
    assert scripted.bodies == [b"question", b"answer"]


def test_without_a_broker_a_message_fails_after_the_retries_and_nothing_was_sent() -> None:
    client = BrokerClient(port=free_port(), request_timeout=0.05)
    with client.producer("orders", retries=2, retry_backoff_ms=1) as producer:
        handle = producer.send(b"one")
        with pytest.raises(BrokerUnavailable):
            handle.result(PATIENCE)
    client.disconnect()


def test_a_message_that_the_broker_never_answers_is_uncertain() -> None:
    with ScriptedBroker(Plan(silent=True)) as broker, silenced(broker, request_timeout=0.1) as client:
        producer = client.producer("orders", retries=1)
        with pytest.raises(PublishUncertain):
            producer.send(b"one").result(PATIENCE)


def test_a_handle_and_a_flush_wait_only_as_long_as_they_are_asked_to() -> None:
    with ScriptedBroker(Plan(silent=True)) as broker, silenced(broker) as client:
        producer = client.producer("orders")
        handle = producer.send(b"one")
        with pytest.raises(RequestTimedOut):
            handle.result(0.01)
        with pytest.raises(RequestTimedOut):
            producer.flush(0.01)
        waiting = producer.send(b"never sent in this test", key="k")
        with pytest.raises(PublishUncertain):
            producer.close(0.01)
        assert isinstance(handle.batch.error, PublishUncertain)
        with pytest.raises((PublishUncertain, ConnectionLost)):
            waiting.result(0)


# A full buffer


def test_a_full_buffer_blocks_until_there_is_room(scripted: ScriptedBroker, client: BrokerClient) -> None:
    with client.producer("orders", linger_ms=0, max_buffered_bytes=500) as producer:
        handles = [producer.send(b"x" * 100) for _ in range(100)]
        assert producer.buffered_bytes <= 500 + 200
        assert handles[-1].result(PATIENCE).offset == 99
    assert producer.buffered_bytes == 0


def test_a_full_buffer_raises_if_asked_to_and_takes_messages_again() -> None:
    with ScriptedBroker(Plan(silent=True)) as broker, silenced(broker) as client:
        with client.producer("orders", max_buffered_bytes=300, when_full="raise") as producer:
            producer.send(b"x" * 300)
            with pytest.raises(BufferFull, match="300 bytes are buffered"):
                producer.send(b"not taken")
            broker.drop_connections()  # the next one is answered
            producer.flush()
            producer.send(b"again")
        assert broker.bodies == [b"x" * 300, b"again"]


def test_a_message_longer_than_the_buffer_is_sent_alone(scripted: ScriptedBroker, client: BrokerClient) -> None:
    with client.producer("orders", max_buffered_bytes=10) as producer:
        assert producer.send(b"x" * 1000).result(PATIENCE).offset == 0
        assert producer.send(b"y" * 1000).result(PATIENCE).offset == 1


# Acks


def test_acks_none_is_done_when_it_is_sent_and_the_receipt_says_so() -> None:
    with ScriptedBroker(Plan(silent=True)) as broker, silenced(broker) as client:
        with client.producer("orders", acks="none") as producer:
            receipt = producer.send(b"one").result(PATIENCE)
        assert receipt == ("orders", -1, -1, 0, "none", False, False)


def test_a_refusal_with_acks_none_reaches_the_log(
    scripted: ScriptedBroker, client: BrokerClient, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.refuse[b"bad"] = "UNKNOWN_TOPIC"
    with client.producer("orders", acks="none") as producer:
        assert producer.send(b"bad").result(PATIENCE).durability == "none"
        wait_until(lambda: "sent with acks=none is not stored: refused: UNKNOWN_TOPIC" in caplog.text)


@pytest.mark.parametrize("acks", ["all", "leader"])
def test_with_one_broker_all_and_leader_mean_fsynced(shared: BrokerProcess, acks: str) -> None:
    with BrokerClient(port=shared.port) as client:
        client.create_topic(f"acks-{acks}")
        with client.producer(f"acks-{acks}", acks=acks) as producer:
            assert producer.send(b"one").result(PATIENCE).durability == "fsynced"


# Retries, order, and a broker that dies


def test_order_holds_when_a_full_disk_refuses_and_takes_again(scripted: ScriptedBroker, client: BrokerClient) -> None:
    scripted.refuse |= {b"%d" % number: "DISK_FULL" for number in range(10, 30)}

    def make_room() -> None:
        scripted.wait_for(lambda: len(scripted.messages) == 10)
        scripted.refuse.clear()

    room = threading.Thread(target=make_room)
    room.start()
    with client.producer("orders", batch_size=30, linger_ms=AN_HOUR, retries=1000, retry_backoff_ms=1) as producer:
        handles = [producer.send(body) for body in numbered(30)]
        producer.flush()
    room.join(PATIENCE)
    assert scripted.bodies == numbered(30)
    assert [handle.result().offset for handle in handles] == list(range(30))


def test_a_disk_that_stays_full_fails_the_message(scripted: ScriptedBroker, client: BrokerClient) -> None:
    scripted.refuse[b"bad"] = "DISK_FULL"
    with client.producer("orders", retries=2, retry_backoff_ms=1) as producer, pytest.raises(DiskFull):
        producer.send(b"bad").result(PATIENCE)


@pytest.mark.parametrize("plan", [Plan(drop_after=700), Plan(lose_acks_after=700), Plan(goodbye_after=700)], ids=str)
def test_a_lost_connection_loses_and_doubles_nothing(plan: Plan) -> None:
    with ScriptedBroker(plan) as broker, BrokerClient(port=broker.port, request_timeout=PATIENCE) as client:
        with client.producer("orders", batch_size=100) as producer:
            handles = [producer.send(body) for body in numbered(3000)]
        assert broker.bodies == numbered(3000)
        assert [handle.result().offset for handle in handles] == list(range(3000))
        assert broker.connections == 2


@pytest.mark.process
def test_kill_9_of_the_broker_in_the_middle_loses_and_doubles_nothing_and_keeps_the_order(
    broker: BrokerProcess,
) -> None:
    total, kills, keys = 30_000, 2, [f"key-{number}" for number in range(8)]
    with BrokerClient(port=broker.port, request_timeout=PATIENCE) as client:
        client.create_topic("t", 4)
        with client.producer("t", batch_size=500, linger_ms=1, max_buffered_bytes=1 << 20) as producer:
            handles = []
            for number in range(total):
                handles.append(producer.send(b"%d" % number, key=keys[number % 8]))
                if number % (total // (kills + 1)) == total // (kills + 1) - 1 and number < total - 1:
                    broker.restart()  # with batches in flight
        receipts = [handle.result() for handle in handles]
        found = defaultdict(list)
        for partition in range(4):
            while some := client.fetch("t", partition, len(found[partition]), max_messages=100_000, max_bytes=1 << 24):
                found[partition] += [message.body for message in some]
    assert sum(map(len, found.values())) == total
    for number, receipt in enumerate(receipts):
        assert receipt.partition == partition_of(keys[number % 8], 4)
        assert found[receipt.partition][receipt.offset] == b"%d" % number
    for bodies in found.values():
        assert [int(body) for body in bodies] == sorted({int(body) for body in bodies})


@pytest.mark.process
def test_messages_of_several_threads_are_stored_once_each(shared: BrokerProcess) -> None:
    with BrokerClient(port=shared.port) as client:
        client.create_topic("threads")
        with client.producer("threads", batch_size=50, linger_ms=1, max_buffered_bytes=20_000) as producer:
            results: list[list[int]] = [[] for _ in range(4)]

            def produce(number: int) -> None:
                handles = [producer.send(b"%d %d" % (number, index)) for index in range(1000)]
                results[number] = [handle.result(PATIENCE).offset for handle in handles]

            threads = [threading.Thread(target=produce, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
        log = [each.body for each in client.fetch("threads", max_messages=10_000)]
    assert len(log) == 4000
    for number, offsets in enumerate(results):
        assert [log[offset] for offset in offsets] == [b"%d %d" % (number, index) for index in range(1000)]


def test_an_unknown_partition_fails_its_messages_alone(shared: BrokerProcess) -> None:
    with BrokerClient(port=shared.port) as client:
        client.create_topic("two", 2)
        with client.producer("two") as producer:
            here, there = producer.send(b"here", partition=1), producer.send(b"there", partition=7)
            assert here.result(PATIENCE)[1:3] == (1, 0)
            with pytest.raises(UnknownPartition):
                there.result(PATIENCE)


def test_batches_without_keys_take_the_partitions_in_turn(shared: BrokerProcess) -> None:
    with BrokerClient(port=shared.port) as client:
        client.create_topic("turns", 3)
        with client.producer("turns", batch_size=10, linger_ms=AN_HOUR) as producer:
            handles = [producer.send(b"x") for _ in range(60)]
            partitions = [handle.result(PATIENCE).partition for handle in handles]
    assert partitions == [number // 10 % 3 for number in range(60)]


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_batches_travel_compressed_and_are_stored_plain(shared: BrokerProcess, codec: str) -> None:
    bodies = [b'{"id": %d, "name": "tea"}' % number for number in range(1000)]
    with BrokerClient(port=shared.port) as client:
        client.create_topic(codec)
        packed: list[str | None] = []
        pack = client._conversation.compression.packed
        client._conversation.compression.packed = lambda codec, *more: (packed.append(codec), pack(codec, *more))[1]  # type: ignore[method-assign]
        with client.producer(codec, compression=codec) as producer:
            for body in bodies:
                producer.send(body)
        assert set(packed) == {codec}
        assert [each.body for each in client.fetch(codec, max_messages=1000)] == bodies


# Forks


PROGRAM_WITHOUT_AN_END = """
import sys
from qb import BrokerClient

client = BrokerClient(port=int(sys.argv[1]), request_timeout=30)
producer = client.producer(sys.argv[2], linger_ms=60_000)
producer.send(b"one")
producer.send(b"two")
"""


def run_without_an_end(port: int, topic: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM_WITHOUT_AN_END, str(port), topic]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)


def test_a_program_that_ends_sends_what_its_producers_have_buffered(shared: BrokerProcess) -> None:
    topic = "unclosed"
    with BrokerClient(port=shared.port) as client:
        client.create_topic(topic)
        done = run_without_an_end(shared.port, topic)
        assert (done.returncode, done.stderr) == (0, "")
        assert [message.body for message in client.fetch(topic)] == [b"one", b"two"]


def test_what_a_program_that_ends_cannot_send_is_in_its_log(shared: BrokerProcess) -> None:
    done = run_without_an_end(shared.port, "no-such-topic")
    assert "2 messages for topic no-such-topic are not stored: there is no topic" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_of_fork_sends_with_a_buffer_of_its_own_and_the_parent_goes_on(shared: BrokerProcess) -> None:
    with BrokerClient(port=shared.port, request_timeout=10) as client:
        client.create_topic("fork")
        with client.producer("fork", linger_ms=AN_HOUR) as producer:
            before = producer.send(b"of the parent")

            def of_the_child() -> tuple[str, int]:
                handle = producer.send(b"of the child")
                producer.flush()
                return raised_by(lambda: before.result(PATIENCE)), handle.result(PATIENCE).offset

            assert child(of_the_child) == (UsedAfterFork.__name__, 0)
            producer.send(b"of the parent again")
        assert before.result().offset == 1
        stored = [each.body for each in client.fetch("fork")]
        assert stored == [b"of the child", b"of the parent", b"of the parent again"]
