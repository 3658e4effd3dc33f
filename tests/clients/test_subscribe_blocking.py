"""Subscriptions in BrokerClient, against a real broker process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from qb import (
    BadRequest,
    BrokerClient,
    Message,
    NotJoined,
    SubscriptionBusy,
    SubscriptionExists,
    SubscriptionRemoved,
    UnknownSubscription,
    UnknownTopic,
)
from qb.clients.blocking.connection.reading_duty import Duty
from tests.support.brokers import ROOT
from tests.support.collecting import PATIENCE, Collector, lag, numbered
from tests.support.peers import die_with
from tests.support.stores import edit_metadata
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(40)]

AT_ONCE = {"initial": 0.0, "cap": 0.0}


@pytest.fixture
def connect(broker: Any) -> Iterator[Callable[[], BrokerClient]]:
    """Makes clients of the broker."""
    clients: list[BrokerClient] = []

    def connect() -> BrokerClient:
        clients.append(BrokerClient(port=broker.port))
        return clients[-1]

    yield connect
    for client in clients:
        client.disconnect()


@pytest.fixture
def client(connect: Callable[[], BrokerClient]) -> BrokerClient:
    """A client, and a topic `a`."""
    client = connect()
    client.create_topic("a")
    return client


def ready(client: BrokerClient, count: int = 0, **options: Any) -> None:
    """Publish so many messages to `a`, and make subscription `s` on it."""
    if count:
        client.publish_many("a", numbered(0, count))
    client.create_subscription("s", "a", **options)


# Delivery


def test_the_backlog_comes_first_then_live_in_order(client: BrokerClient) -> None:
    ready(client, 3000)
    collect = Collector()
    with client.subscribe_to_subscription("s", collect):
        client.publish_many("a", numbered(3000, 4000))
        assert collect.wait_for(4000) == numbered(0, 4000)
        assert {seen.attempt for seen in collect.seen} == {1}
    assert lag(client) == 0, "leaving sends what is done"


def test_a_handler_gets_the_whole_message(client: BrokerClient) -> None:
    collect = Collector()
    client.create_and_subscribe("s", "a", collect)
    receipt = client.publish("a", "grün".encode(), key="k", timestamp_ms=1_700_000_000_000, colour="red")
    collect.wait_for(1)
    [message] = collect.messages
    assert (message.text(), message.key, message.properties) == ("grün", "k", {"colour": "red"})
    assert (message.topic, message.partition, message.offset) == ("a", receipt.partition, receipt.offset)
    assert (message.timestamp, message.attempt, message.subscription_id) == (1_700_000_000_000, 1, "s")
    with pytest.raises(RuntimeError, match="manual"):
        message.ack()


def test_two_clients_get_messages_in_turn(client: BrokerClient, connect: Callable[[], BrokerClient]) -> None:
    ready(client)
    first, second = Collector(), Collector()
    client.subscribe_to_subscription("s", first)
    connect().subscribe_to_subscription("s", second)
    for body in numbered(0, 20):
        client.publish("a", body)
    assert first.wait_for(10) == numbered(0, 20)[::2]
    assert second.wait_for(10) == numbered(0, 20)[1::2]


def test_all_partitions_are_delivered(client: BrokerClient) -> None:
    client.create_topic("wide", partitions=3)
    client.publish_many("wide", numbered(0, 300))
    collect = Collector()
    client.create_and_subscribe("w", "wide", collect)
    assert sorted(collect.wait_for(300)) == sorted(numbered(0, 300))
    assert {seen.partition for seen in collect.seen} == {0, 1, 2}


def test_a_batch_handler_gets_all_messages_in_lists(client: BrokerClient) -> None:
    ready(client, 2000)
    collect = Collector()
    sizes: list[int] = []

    def handler(messages: list[Message]) -> None:
        sizes.append(len(messages))
        collect.batch(messages)

    with client.subscribe_to_subscription("s", batch_handler=handler):
        assert collect.wait_for(2000) == numbered(0, 2000)
    assert max(sizes) > 1
    assert lag(client) == 0


def test_a_batch_that_fails_comes_again_message_by_message(client: BrokerClient) -> None:
    ready(client, 10, backoff=AT_ONCE)
    sizes: list[int] = []
    collect = Collector()

    def handler(messages: list[Message]) -> None:
        sizes.append(len(messages))
        if len(messages) > 1:
            raise ValueError("too many")
        collect.batch(messages)

    with client.subscribe_to_subscription("s", batch_handler=handler):
        assert sorted(collect.wait_for(10)) == numbered(0, 10)
    assert sizes.count(1) == 10
    assert {seen.attempt for seen in collect.seen} == {2}


def test_a_client_joins_several_subscriptions_and_runs_one_handler_at_a_time(client: BrokerClient) -> None:
    running, most, total = 0, 0, 0
    done = threading.Event()

    def handler(message: Message) -> None:
        nonlocal running, most, total
        running += 1
        most = max(most, running)
        client.ping()  # a round trip: lets another handler start, if one can
        running -= 1
        total += 1
        if total == 300:
            done.set()

    client.publish_many("a", numbered(0, 100))
    for name in ("x", "y", "z"):
        client.create_and_subscribe(name, "a", handler)
    assert done.wait(PATIENCE)
    assert most == 1


def test_concurrency_runs_so_many_handlers_at_once(client: BrokerClient) -> None:
    ready(client, 8)
    together = threading.Barrier(4)
    collect = Collector(lambda message: together.wait(PATIENCE))
    with client.subscribe_to_subscription("s", collect, concurrency=4):
        assert sorted(collect.wait_for(8)) == numbered(0, 8)
    assert lag(client) == 0


def test_suspects_run_alone_and_then_all_hands_are_busy_again(client: BrokerClient, broker: Any) -> None:
    ready(client, 6)
    die_with(broker.port, "s", 6)
    client.publish_many("a", numbered(6, 10))
    together = threading.Barrier(4)
    running, most = 0, 0

    def handler(message: Message) -> None:
        nonlocal running, most
        if message.attempt == 1:
            together.wait(PATIENCE)
            return
        running += 1
        most = max(most, running)
        lag(client)  # a round trip: the others have the chance to do it wrong
        running -= 1

    collect = Collector(handler)
    with client.subscribe_to_subscription("s", collect, concurrency=4):
        assert sorted(collect.wait_for(10)) == numbered(0, 10)
        wait_until(lambda: lag(client) == 0)
    assert most == 1


def test_key_shared_runs_each_key_in_order_whatever_the_concurrency_and_failures(client: BrokerClient) -> None:
    ready(client, mode="key_shared", backoff=AT_ONCE, max_deliveries=0)
    keys = [f"k{number % 5}" for number in range(200)]
    for number, key in enumerate(keys):
        client.publish("a", b"%d" % number, key=key)
    running: set[str] = set()
    overlaps: list[str] = []
    handled: dict[str, list[int]] = {}

    def handler(message: Message) -> None:
        key = message.key or ""
        overlaps.extend({key} & running)
        running.add(key)
        try:
            if message.attempt == 1 and message.offset % 7 == 3:
                raise ValueError("not yet")
            handled.setdefault(key, []).append(message.offset)
        finally:
            running.discard(key)

    with client.subscribe_to_subscription("s", handler, concurrency=8):
        wait_until(lambda: lag(client) == 0)
    assert not overlaps
    assert handled == {key: [number for number in range(200) if keys[number] == key] for key in set(keys)}


def test_by_hand_the_next_of_a_key_comes_when_the_one_before_is_settled(client: BrokerClient) -> None:
    ready(client, mode="key_shared")
    for number in range(3):
        client.publish("a", b"%d" % number, key="k")
    collect = Collector()
    client.subscribe_to_subscription("s", collect, ack="manual", concurrency=2)
    for number in range(3):
        collect.wait_for(number + 1)
        assert len(collect.seen) == number + 1
        collect.messages[-1].ack()
    wait_until(lambda: lag(client) == 0)


def reader_of(client: BrokerClient) -> Duty:
    return client._link._connection.duty.state


def test_the_thread_that_handles_reads_the_next_message_itself(client: BrokerClient) -> None:
    ready(client, 300, max_in_flight=1)
    collect, readers = Collector(), set()

    def handle(message: Message) -> None:
        readers.add(reader_of(client))
        collect(message)

    with client.subscribe_to_subscription("s", handle):
        assert collect.wait_for(300) == numbered(0, 300)
    assert Duty.HANDLERS in readers


def test_while_a_handler_runs_calls_are_answered_and_others_get_their_messages(client: BrokerClient) -> None:
    ready(client, 100, max_in_flight=1)
    client.create_topic("b")
    client.create_subscription("others", "b")
    reached, may_return, collect = threading.Event(), threading.Event(), Collector()

    def handle(message: Message) -> None:
        if message.offset == 50:  # the thread of the handlers has read messages by then
            reached.set()
            assert may_return.wait(PATIENCE)

    with client.subscribe_to_subscription("s", handle):
        assert reached.wait(PATIENCE)
        assert client.publish("b", b"0").offset == 0
        client.publish_many("b", numbered(1, 10))
        with client.subscribe_to_subscription("others", collect, concurrency=2):
            assert sorted(collect.wait_for(10)) == numbered(0, 10)
            assert reader_of(client) is Duty.SPREAD
            may_return.set()
            wait_until(lambda: lag(client) == 0)


def test_calls_are_answered_while_the_thread_of_the_handlers_waits_for_messages(client: BrokerClient) -> None:
    ready(client, 100, max_in_flight=1)
    collect = Collector()
    with client.subscribe_to_subscription("s", collect):
        for number in range(100, 120):
            assert len(collect.wait_for(number)) == number
            assert client.publish("a", b"%d" % number).offset == number
        assert len(collect.wait_for(120)) == 120


def test_a_handler_may_publish_with_its_own_client(client: BrokerClient) -> None:
    client.create_topic("b")
    ready(client, 300)
    collect = Collector()
    client.create_and_subscribe("copies", "b", collect)
    client.subscribe_to_subscription("s", lambda message: client.publish("b", message.body) and None)
    assert collect.wait_for(300) == numbered(0, 300)


# Failures


def test_an_exception_brings_the_message_again_and_then_to_the_dead_letters(client: BrokerClient) -> None:
    ready(client, 3, max_deliveries=3, backoff=AT_ONCE)

    def fail(message: Message) -> None:
        if message.offset == 1:
            raise ValueError(f"no good, attempt {message.attempt}")

    collect = Collector(fail)
    client.subscribe_to_subscription("s", collect)
    wait_until(lambda: client.dead_letters("s"))
    assert sorted((seen.offset, seen.attempt) for seen in collect.seen) == [(0, 1), (1, 1), (1, 2), (1, 3), (2, 1)]
    [letter] = client.dead_letters("s")
    assert (letter["offset"], letter["attempts"], letter["reason"]) == (1, 3, "ValueError: no good, attempt 3")
    assert client.retry_dead_letters("s") == 1
    collect.wait_for(8)
    wait_until(lambda: client.dead_letters("s"))
    assert client.purge_dead_letters("s") == 1
    assert client.dead_letters("s") == []
    assert "dead-lettered" in client.explain("s", 1)


def test_a_handler_longer_than_the_deadline_is_not_redelivered(client: BrokerClient) -> None:
    ready(client, 2, ack_deadline=0.3)
    release = threading.Event()
    collect = Collector(lambda message: release.wait(1.2))
    with client.subscribe_to_subscription("s", collect):
        collect.wait_for(2)
        release.set()
    assert collect.bodies == numbered(0, 2)
    assert client.describe_subscription("s")["redelivered"] == 0
    assert lag(client) == 0


def test_acks_by_hand(client: BrokerClient) -> None:
    ready(client, 3, backoff=AT_ONCE, ack_deadline=0.3)
    collect = Collector()
    held = collect.messages
    client.subscribe_to_subscription("s", collect, ack="manual")
    collect.wait_for(3)
    held[1].ack()
    wait_until(lambda: lag(client) == 2)
    held[0].nack(delay=0.05, reason="later")
    collect.wait_until(lambda: len(collect.seen) == 4)
    assert (collect.seen[3].offset, collect.seen[3].attempt) == (0, 2)
    held[3].extend(30)
    held[3].ack()
    held[2].ack()
    wait_until(lambda: lag(client) == 0)
    assert len(collect.seen) == 4, "what is held is not redelivered, however long"


def test_system_exit_in_a_handler_fails_the_message_and_ends_the_subscriber(client: BrokerClient) -> None:
    ready(client, 2, backoff={"initial": 60, "cap": 60})

    def leave(message: Message) -> None:
        raise SystemExit(3)

    subscriber = client.subscribe_to_subscription("s", leave, window=1)
    with pytest.raises(SystemExit):
        subscriber.wait(PATIENCE)
    assert isinstance(subscriber.error, SystemExit)
    assert "SystemExit: 3" in client.explain("s", 0)
    collect = Collector()
    with client.subscribe_to_subscription("s", collect):
        assert collect.wait_for(1) == [b"1"]


# Coming and going


def test_unsubscribing_finishes_what_is_in_hand_and_hands_back_the_rest(
    client: BrokerClient, connect: Callable[[], BrokerClient]
) -> None:
    ready(client, 10)
    release = threading.Event()
    first = Collector(lambda message: release.wait(PATIENCE))
    client.subscribe_to_subscription("s", first)
    first.wait_for(1)
    leaving = threading.Thread(target=client.unsubscribe_from_subscription, args=("s",))
    leaving.start()
    release.set()
    leaving.join(PATIENCE)
    assert not leaving.is_alive()
    second = Collector()
    with connect().subscribe_to_subscription("s", second):
        assert first.bodies + second.wait_for(10 - len(first.seen)) == numbered(0, 10)
    assert client.describe_subscription("s")["dead_lettered"] == 0
    with pytest.raises(NotJoined):
        client.unsubscribe_from_subscription("s")


def test_a_handler_that_does_not_return_is_not_waited_for_longer_than_asked(
    client: BrokerClient, connect: Callable[[], BrokerClient]
) -> None:
    ready(client, 1)
    release = threading.Event()
    stuck = Collector(lambda message: release.wait(PATIENCE))
    subscriber = client.subscribe_to_subscription("s", stuck)
    stuck.wait_for(1)
    subscriber.unsubscribe(timeout=0.01)
    other = Collector()
    with connect().subscribe_to_subscription("s", other):
        assert other.wait_for(1) == [b"0"]
        release.set()


def test_a_handler_may_unsubscribe_itself_and_the_same_client_may_join_again(client: BrokerClient) -> None:
    ready(client, 5)
    joined: list[Any] = []
    started = threading.Event()

    def stop_after_two(message: Message) -> None:
        started.wait(PATIENCE)
        if message.offset == 1:
            joined[0].unsubscribe()

    collect = Collector(stop_after_two)
    joined.append(client.subscribe_to_subscription("s", collect))
    started.set()
    assert joined[0].wait(PATIENCE)
    assert collect.bodies == numbered(0, 2)
    with client.subscribe_to_subscription("s", collect):
        assert collect.wait_for(5) == numbered(0, 5)


def test_a_handler_may_disconnect_its_client(client: BrokerClient, connect: Callable[[], BrokerClient]) -> None:
    ready(client, 1)
    collect = Collector(lambda message: client.disconnect())
    subscriber = client.subscribe_to_subscription("s", collect)
    assert subscriber.wait(PATIENCE)
    assert lag(connect()) == 0


def test_disconnecting_leaves_in_good_order(client: BrokerClient, connect: Callable[[], BrokerClient]) -> None:
    ready(client, 500)
    collect = Collector()
    subscriber = client.subscribe_to_subscription("s", collect)
    collect.wait_for(1)
    client.disconnect()
    assert subscriber.wait(0)
    rest = Collector()
    with connect().subscribe_to_subscription("s", rest):
        assert collect.bodies + rest.wait_for(500 - len(collect.seen)) == numbered(0, 500)


def test_a_deleted_subscription_ends_its_subscribers_with_a_typed_error(client: BrokerClient) -> None:
    ready(client)
    subscriber = client.subscribe_to_subscription("s", print)
    assert not subscriber.wait(0)
    client.delete_subscription("s")
    with pytest.raises(SubscriptionRemoved, match="'s'"):
        subscriber.wait(PATIENCE)
    assert isinstance(subscriber.error, SubscriptionRemoved)
    subscriber.unsubscribe()


def test_refusals_are_typed(client: BrokerClient, connect: Callable[[], BrokerClient]) -> None:
    with pytest.raises(UnknownTopic):
        client.create_subscription("s", "nowhere")
    with pytest.raises(UnknownSubscription):
        client.subscribe_to_subscription("s", print)
    ready(client, mode="exclusive")
    with pytest.raises(SubscriptionExists):
        client.create_subscription("s", "a")
    with pytest.raises(BadRequest, match="ack_deadline"):
        client.create_subscription("t", "a", ack_deadline=-1)
    with pytest.raises(BadRequest, match="colour"):
        client.create_subscription("t", "a", colour="red")
    subscriber = client.subscribe_to_subscription("s", print)
    with pytest.raises(BadRequest, match="already"):
        client.subscribe_to_subscription("s", print)
    with pytest.raises(SubscriptionBusy):
        connect().subscribe_to_subscription("s", print)
    subscriber.unsubscribe()
    connect().subscribe_to_subscription("s", print).unsubscribe()


def test_a_subscription_of_its_own_starts_where_asked_and_is_deleted_when_it_ends(client: BrokerClient) -> None:
    client.publish_many("a", numbered(0, 10))
    collect = Collector()
    with client.subscribe("a", 7, collect):
        assert collect.wait_for(3) == numbered(7, 10)
        assert len(client.list_subscriptions("a")) == 1
    assert client.list_subscriptions() == []


def test_partitions_and_positions(client: BrokerClient) -> None:
    client.publish_many("a", numbered(0, 5))
    client.create_subscription("late", "a", "latest")
    client.create_subscription("early", "a", datetime.fromtimestamp(0))
    assert (lag(client, "late"), lag(client, "early")) == (0, 5)
    client.seek("late", 3)
    assert lag(client, "late") == 2
    client.seek("late", datetime.now().astimezone(), partition=0)
    assert lag(client, "late") == 0
    assert client.fork("early", "copy")["topic"] == "a"
    assert [each["subscription_id"] for each in client.list_subscriptions("a")] == ["copy", "early", "late"]
    assert client.pause("early")["paused"] is True
    assert "paused" in client.explain("early", 0)
    assert client.resume("early")["paused"] is False
    assert client.dead_letters("early") == []


# Bad luck


def test_a_subscriber_goes_on_by_itself_when_the_broker_is_killed(
    broker: Any, client: BrokerClient, connect: Callable[[], BrokerClient]
) -> None:
    ready(client, 2000)
    middle, go_on = threading.Event(), threading.Event()

    def stop_in_the_middle(message: Message) -> None:
        if message.offset == 1000 and message.attempt == 1 and not middle.is_set():
            middle.set()
            go_on.wait(PATIENCE)

    collect = Collector(stop_in_the_middle)
    subscriber = client.subscribe_to_subscription("s", collect)
    assert middle.wait(PATIENCE)
    broker.restart()
    go_on.set()
    connect().publish_many("a", numbered(2000, 3000))
    collect.wait_until(lambda: set(numbered(0, 3000)) <= set(collect.bodies))
    wait_until(lambda: lag(client) == 0)
    assert subscriber.error is None


def test_a_subscriber_waits_for_a_broker_that_is_down_for_long(broker: Any, client: BrokerClient) -> None:
    ready(client, 1)
    collect = Collector()
    client.subscribe_to_subscription("s", collect)
    collect.wait_for(1)
    wait_until(lambda: lag(client) == 0)
    for number in range(1, 4):
        broker.kill()
        broker.start()
        with BrokerClient(port=broker.port) as publisher:
            publisher.publish("a", b"%d" % number)
        collect.wait_until(lambda: b"%d" % number in collect.bodies)  # noqa: B023


def test_a_subscription_deleted_while_the_client_was_away_ends_the_subscriber(
    broker: Any, client: BrokerClient
) -> None:
    ready(client)
    subscriber = client.subscribe_to_subscription("s", print)
    broker.kill()
    edit_metadata(broker.data_dir, {"subscription/s": None})
    broker.start()
    with pytest.raises(SubscriptionRemoved):
        subscriber.wait(PATIENCE)


WORKER = """
import sys, threading
from qb import BrokerClient
def handler(message):
    print(message.offset, flush=True)
    if message.offset == 2:
        threading.Event().wait()
BrokerClient(port=int(sys.argv[1])).subscribe_to_subscription("s", handler).wait()
"""


def test_when_a_subscriber_process_is_killed_others_take_over(broker: Any, client: BrokerClient) -> None:
    ready(client, 10, backoff=AT_ONCE)
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(broker.port)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdout is not None
    assert [worker.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
    wait_until(lambda: lag(client) == 8)
    worker.kill()
    worker.wait()
    worker.stdout.close()
    collect = Collector()
    client.subscribe_to_subscription("s", collect)
    assert sorted(collect.wait_for(8)) == numbered(2, 10)
    assert {seen.attempt for seen in collect.seen} == {2}


def test_a_process_that_ends_without_a_word_does_not_hang(broker: Any, client: BrokerClient) -> None:
    ready(client, 1)
    script = WORKER.replace(".wait()\n", "\n").replace("threading.Event()", "None")
    done = subprocess.run(
        [sys.executable, "-c", script, str(broker.port)], cwd=ROOT, timeout=PATIENCE, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


class _AsyncObject:
    async def __call__(self, message: Message) -> None: ...


async def _async_handler(message: Message) -> None: ...


async def _async_generator(message: Message) -> Any:
    yield message


@pytest.mark.parametrize("handler", [_async_handler, partial(_async_handler), _AsyncObject(), _async_generator])
def test_an_async_handler_is_refused_when_it_is_given_and_nothing_is_delivered(
    client: BrokerClient, handler: Any
) -> None:
    ready(client, 1)
    for join in (
        lambda: client.subscribe_to_subscription("s", handler),
        lambda: client.subscribe_to_subscription("s", batch_handler=handler),
        lambda: client.create_and_subscribe("new", "a", handler),
        lambda: client.subscribe("a", 0, handler),
    ):
        with pytest.raises(TypeError, match="AsyncBrokerClient"):
            join()
    assert [each["subscription_id"] for each in client.list_subscriptions()] == ["s"]
    assert lag(client, "s") == 1
