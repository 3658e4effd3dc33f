"""What `qb_chaos` breaks is broken, and what a broker promises holds."""

from __future__ import annotations

import time
from queue import Queue

import pytest

from qb import BrokerClient, BrokerUnavailable, Message
from qb.testing.chaos import Chaos
from qb.testing.running_broker import RunningBroker

pytestmark = pytest.mark.process
PATIENCE = 45  # seconds, for what comes much sooner


@pytest.fixture
def orders(qb_client: BrokerClient) -> BrokerClient:
    qb_client.create_topic("orders")
    return qb_client


def bodies(broker: RunningBroker) -> list[bytes]:
    with BrokerClient(port=broker.port) as client:
        return [message.body for message in client.fetch("orders", 0, 0, max_messages=5000)]


def test_a_client_connects_again_when_its_connection_is_dropped(
    orders: BrokerClient, qb_broker: RunningBroker, qb_chaos: Chaos
) -> None:
    orders.publish("orders", b"one")
    qb_chaos.drop_connections()
    orders.publish("orders", b"two")
    assert bodies(qb_broker) == [b"one", b"two"]


def test_the_address_stays_when_the_broker_is_restarted_or_killed(
    orders: BrokerClient, qb_broker: RunningBroker, qb_chaos: Chaos
) -> None:
    port = qb_broker.port
    orders.publish("orders", b"one")
    qb_chaos.restart_broker()
    orders.publish("orders", b"two")
    qb_chaos.kill_broker()
    assert bodies(qb_broker) == [b"one", b"two"]
    assert qb_broker.port == port


def test_a_broker_that_is_killed_for_good_is_down_until_it_is_started(
    qb_broker: RunningBroker, qb_chaos: Chaos
) -> None:
    qb_chaos.kill_broker(restart=False)
    with pytest.raises(BrokerUnavailable), BrokerClient(port=qb_broker.port):
        pass
    qb_chaos.start_broker()
    with BrokerClient(port=qb_broker.port) as client:
        assert client.list_topics() == []


def test_acks_come_later_when_they_are_delayed(orders: BrokerClient, qb_chaos: Chaos) -> None:
    qb_chaos.delay_acks(0.3)
    started = time.monotonic()
    orders.publish("orders", b"one")
    assert time.monotonic() - started >= 0.3
    qb_chaos.delay_acks(0)


def test_a_handled_message_is_delivered_twice(orders: BrokerClient, qb_chaos: Chaos) -> None:
    orders.create_subscription("till", "orders")
    seen: Queue[Message] = Queue()
    qb_chaos.deliver_twice()
    with orders.subscribe_to_subscription("till", seen.put):
        orders.publish("orders", b"tea")
        first, second = (seen.get(timeout=PATIENCE) for _ in range(2))
    assert (first.offset, first.body) == (second.offset, second.body)
    assert second.attempt > first.attempt


def test_what_was_acked_survives_a_power_cut(orders: BrokerClient, qb_broker: RunningBroker, qb_chaos: Chaos) -> None:
    orders.create_topic("wide", partitions=3)
    sent = [b"%d" % number for number in range(1000)]
    orders.publish_many("orders", sent)
    orders.create_subscription("till", "orders")
    orders.delete_topic("wide")
    qb_chaos.cut_power()
    assert bodies(qb_broker) == sent
    with BrokerClient(port=qb_broker.port) as client:
        assert [each["topic"] for each in client.list_topics()] == ["orders"]
        assert [each["subscription_id"] for each in client.list_subscriptions()] == ["till"]
    orders.publish("orders", b"more")
    qb_chaos.cut_power()
    assert bodies(qb_broker) == [*sent, b"more"], "a second cut remembers what came after the first"


@pytest.mark.qb_settings(fsync_on_write=False)
def test_what_was_only_written_is_forgotten_in_a_power_cut(
    orders: BrokerClient, qb_broker: RunningBroker, qb_chaos: Chaos
) -> None:
    assert orders.publish("orders", b"tea").durability == "written"
    qb_chaos.kill_broker(restart=False)
    qb_chaos.start_broker()
    assert bodies(qb_broker) == [b"tea"], "the system still had it"
    orders.publish("orders", b"milk")
    qb_chaos.cut_power()
    assert b"milk" not in bodies(qb_broker)
