"""Consumer, the blocking member of a group, against a real broker."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from qb import (
    BadName,
    BrokerClient,
    BrokerUnavailable,
    Consumer,
    GroupInUse,
    Message,
    StaleGeneration,
    UnknownTopic,
)
from tests.support.brokers import BrokerProcess
from tests.support.waiting import holds_for, wait_until

pytestmark = pytest.mark.timeout(40)
PARTITIONS = 4  # of the topic that each test has


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def take(consumer: Consumer, count: int) -> list[Message]:
    """Return so many messages; the last one stays in hand."""
    found: list[Message] = []
    for message in consumer:
        found.append(message)
        if len(found) == count:
            break
    return found


class Worker(threading.Thread):
    """A consumer that notes what it handles, in a thread of its own."""

    def __init__(self, consumer: Consumer) -> None:
        super().__init__(daemon=True)
        self.consumer, self.handled = consumer, list[tuple[int, int]]()
        self.start()

    def run(self) -> None:
        with self.consumer:
            self.consumer.run(lambda message: self.handled.append((message.partition, message.offset)))

    def end(self) -> None:
        self.consumer.stop()
        self.join()


# One consumer


def test_iteration_yields_every_message_of_all_partitions_in_order(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, numbered(20_000))
    with client.consumer("g1", topic) as consumer:
        found = take(consumer, 20_000)
    assert sorted(found_body for found_body in (message.body for message in found)) == sorted(numbered(20_000))
    for partition in range(4):
        offsets = [message.offset for message in found if message.partition == partition]
        assert offsets == list(range(len(offsets)))


def test_a_group_goes_on_where_it_left_and_another_one_gets_everything(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, numbered(100), partition=0)
    with client.consumer("g2", topic) as consumer:
        take(consumer, 40)
    with client.consumer("g2", topic) as consumer:
        assert take(consumer, 1)[0].body == b"39"  # it was in hand, and the next one was not asked for
    with client.consumer("g2b", topic) as consumer:
        assert [message.body for message in take(consumer, 100)] == numbered(100)


def test_the_latest_start_sees_only_what_comes_after_and_an_offset_begins_there(
    client: BrokerClient, topic: str
) -> None:
    client.publish_many(topic, numbered(10), partition=1)
    with client.consumer("g3", topic, start="latest", auto_commit_interval_ms=50) as consumer:
        assert consumer.poll(timeout=0) == []
        wait_until(lambda: len(client.committed_offsets("g3")) == 4)  # it has begun in each: that is committed
        client.publish(topic, b"new", 1)
        assert [message.body for message in consumer.poll(20)] == [b"new"]
    with client.consumer("g3b", topic, start=7) as consumer:
        assert [message.body for message in take(consumer, 4)] == [b"7", b"8", b"9", b"new"]


def test_a_poll_returns_at_most_so_many_and_counts_the_last_ones_as_handled(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, numbered(25), partition=2)
    with client.consumer("g4", topic, max_poll_records=10) as consumer:
        assert [message.body for message in consumer.poll(20)] == numbered(10)
        assert len(consumer.poll(20)) == 10
    assert [row["offset"] for row in client.committed_offsets("g4") if row["partition"] == 2] == [10]


def test_a_commit_by_hand_is_durable_when_it_returns(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, numbered(10), partition=3)
    with client.consumer("g5", topic, auto_commit=False) as consumer:
        messages = take(consumer, 5)
        assert client.committed_offsets("g5") == []
        consumer.commit(messages[1])
        assert [(row["partition"], row["offset"]) for row in client.committed_offsets("g5")] == [(3, 2)]
        consumer.commit()
        assert {row["partition"]: row["offset"] for row in client.committed_offsets("g5")}[3] == 5
        take(consumer, 2)
    assert {row["partition"]: row["offset"] for row in client.committed_offsets("g5")}[3] == 5


def test_what_is_handled_is_committed_every_so_often(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, numbered(10), partition=0)
    with client.consumer("g6", topic, auto_commit_interval_ms=50) as consumer:
        take(consumer, 10)
        wait_until(lambda: {"partition": 0, "offset": 9}.items() <= (client.committed_offsets("g6") or [{}])[0].items())


def test_a_handler_that_raises_gets_its_message_again(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, numbered(5), partition=0)
    handled: list[bytes] = []

    def handle(message: Message) -> None:
        if message.body == b"2" and len(handled) == 2:
            handled.append(b"failed")
            raise ZeroDivisionError
        handled.append(message.body)
        if message.body == b"4":
            consumer.stop()

    with client.consumer("g7", topic) as consumer:
        with pytest.raises(ZeroDivisionError):
            consumer.run(handle)
        consumer.run(handle)
    assert handled == [b"0", b"1", b"failed", b"2", b"3", b"4"]
    assert {row["partition"]: row["offset"] for row in client.committed_offsets("g7")}[0] == 5


def test_a_seek_goes_back_and_a_partition_that_is_not_held_is_refused(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, numbered(5), partition=0)
    with client.consumer("g8", topic) as consumer:
        take(consumer, 4)
        consumer.seek(topic, 0, 1)
        assert [message.body for message in take(consumer, 4)] == [b"1", b"2", b"3", b"4"]
        with pytest.raises(StaleGeneration):
            consumer.seek(topic, 9, 0)


def test_several_topics_are_consumed_by_one_group(client: BrokerClient, topic: str) -> None:
    client.create_topic(f"{topic}-2")
    client.publish(topic, b"one", 0)
    client.publish(f"{topic}-2", b"two")
    with client.consumer("g9", [topic, f"{topic}-2"]) as consumer:
        assert {message.body for message in take(consumer, 2)} == {b"one", b"two"}
        assert len(consumer.assignment) == 5


def test_more_partitions_than_fetches_on_their_way_are_all_consumed(client: BrokerClient) -> None:
    client.create_topic("wide", partitions=100)
    client.publish_many("wide", numbered(1_000))
    with client.consumer("g10", "wide") as consumer:
        assert Counter(message.body for message in take(consumer, 1_000)) == Counter(numbered(1_000))
        client.publish(topic="wide", data=b"live", partition=99)
        assert take(consumer, 1)[0].body == b"live"


@pytest.mark.parametrize(("group", "wanted", "error"), [("g", "nowhere", UnknownTopic), ("no/name", "t", BadName)])
def test_what_can_never_be_joined_is_an_error_at_once(
    shared: BrokerProcess, group: str, wanted: str, error: type[Exception]
) -> None:
    with Consumer(group, wanted, port=shared.port) as consumer, pytest.raises(error):
        consumer.poll(timeout=20)


def test_a_consumer_without_a_broker_says_so_at_once() -> None:
    with pytest.raises(BrokerUnavailable, match="nothing listens"):
        Consumer("g", "t", port=1).poll()


def test_stop_ends_an_iteration_that_waits(client: BrokerClient, topic: str) -> None:
    worker = Worker(client.consumer("g11", topic))
    for partition in range(PARTITIONS):
        client.publish(topic, b"", partition)
    wait_until(lambda: len(worker.handled) == PARTITIONS)  # so it has begun in each, and waits for more
    worker.end()
    assert {row["partition"]: row["offset"] for row in client.committed_offsets("g11")} == dict.fromkeys(range(4), 1)


# Several


def test_consumers_share_the_partitions_and_each_message_is_handled_once(client: BrokerClient, topic: str) -> None:
    options: dict[str, Any] = {"session_timeout": 1.5}
    with ExitStack() as stack:
        workers = [Worker(client.consumer("g12", topic, **options)) for _ in range(3)]
        for worker in workers:
            stack.callback(worker.end)
        client.publish_many(topic, numbered(4_000))
        wait_until(lambda: all(worker.consumer.assignment for worker in workers))
        client.publish_many(topic, numbered(4_000))
        wait_until(lambda: sum(len(worker.handled) for worker in workers) >= 8_000)
    handled = [place for worker in workers for place in worker.handled]
    assert Counter(handled) == Counter((partition, offset) for partition in range(4) for offset in range(2_000))


def test_a_partition_moves_only_after_its_message_in_hand_is_handled(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, numbered(8))
    options: dict[str, Any] = {"session_timeout": 1.0}
    with client.consumer("g13", topic, **options) as one:
        found = take(one, 1)
        with client.consumer("g13", topic, **options) as two:
            wait_until(lambda: len(one.assignment) == 2)  # it knows what to give up; the one in hand may be part of it
            assert two.assignment == [] or (topic, found[0].partition) in one.assignment
            while len(found) < 8:
                found += one.poll(0.1) + two.poll(0.1)
            assert len(two.assignment) == 2
    assert Counter(message.body for message in found) == Counter(numbered(8))


def test_a_long_handler_does_not_cost_the_membership(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, numbered(3), partition=0)

    def is_heard() -> bool:
        (member,) = client.describe_group("g14")["members"]
        silent_for: float = member["silent_for"]
        return silent_for < 1.0

    with client.consumer("g14", topic, session_timeout=1.0) as consumer:
        for number, message in enumerate(consumer):
            assert message.offset == number
            if number == 0:
                holds_for(2.5, is_heard)  # two and a half session timeouts
                consumer.commit()
            if number == 2:
                break


def test_a_group_in_use_cannot_be_deleted(client: BrokerClient, topic: str) -> None:
    with client.consumer("g15", topic) as consumer:
        wait_until(lambda: consumer.assignment)
        with pytest.raises(GroupInUse):
            client.delete_group("g15")


# Trouble


def test_a_consumer_survives_kill_and_restart_of_the_broker(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    with BrokerClient(port=broker.port) as client:
        client.create_topic("t", partitions=3)
        client.publish_many("t", numbered(300))
        with client.consumer("g", "t", session_timeout=2.0) as consumer:
            before = [message.body for message in take(consumer, 150)]
            consumer.commit()
            broker.restart()
            client.publish_many("t", numbered(300)[:50])
            after = [message.body for message in take(consumer, 200)]
    assert Counter(before + after) == Counter(numbered(300) + numbered(50))


def test_a_consumer_that_cannot_reach_the_broker_hands_out_nothing_after_a_session_timeout(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    broker = start_broker()
    with BrokerClient(port=broker.port) as client:
        client.create_topic("t")
        client.publish_many("t", numbered(10))
        with client.consumer("g", "t", session_timeout=1.0, auto_commit=False) as consumer:
            take(consumer, 1)
            broker.kill()
            wait_until(lambda: not consumer._member.link.up)
            assert consumer.poll(timeout=0.2) == []
            broker.start()
            assert [message.offset for message in take(consumer, 2)] == [0, 1]  # nothing was committed


def test_added_partitions_are_consumed_too(client: BrokerClient, topic: str) -> None:
    with client.consumer("g17", topic, session_timeout=1.0) as consumer:
        wait_until(lambda: len(consumer.assignment) == 4)
        client.add_partitions(topic, 6)
        client.publish(topic, b"new", 5)
        assert (message := take(consumer, 1)[0]).body == b"new"
        assert message.partition == 5


def test_a_topic_that_vanishes_does_not_hurt_the_others(client: BrokerClient, topic: str) -> None:
    client.create_topic(f"{topic}-gone")
    with client.consumer("g16", [topic, f"{topic}-gone"], session_timeout=1.0) as consumer:
        wait_until(lambda: len(consumer.assignment) == 5)
        client.delete_topic(f"{topic}-gone")
        wait_until(lambda: len(consumer.assignment) == 4)
        client.publish(topic, b"still here")
        assert take(consumer, 1)[0].body == b"still here"
