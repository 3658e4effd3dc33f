"""What programs give to a client and get from it: JSON, properties, times, and typed facts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from qb import (
    AsyncBrokerClient,
    BrokerClient,
    Consumer,
    DeadLetter,
    GroupInfo,
    Message,
    ServerInfo,
    SubscriptionInfo,
    TopicInfo,
)
from qb.testing.made_messages import MessageMaker
from qb.testing.running_broker import RunningBroker
from tests.support.waiting import wait_until

MOMENT = datetime(2026, 11, 18, 12, 30, tzinfo=UTC)


@dataclass
class Order:
    id: int
    item: str


def test_a_body_is_read_as_json_and_as_a_type(qb_message: MessageMaker) -> None:
    message = qb_message({"id": 7, "item": "tea"})
    assert message.json() == {"id": 7, "item": "tea"}
    assert message.json(Order) == Order(7, "tea")
    with pytest.raises(ValueError, match=r"Expected `str`, got `int` - at `\$\.item`"):
        qb_message({"id": 7, "item": 8}).json(Order)
    with pytest.raises(ValueError, match="truncated"):
        qb_message("tea").json()


@pytest.mark.process
async def test_json_properties_and_times_arrive_as_they_were_given(
    qb_client: BrokerClient, qb_broker: RunningBroker
) -> None:
    qb_client.create_topic("orders")
    about = {"timestamp_ms": MOMENT, "properties": {"content-type": "json", "colour": "green"}, "colour": "red"}
    qb_client.publish_json("orders", Order(7, "tea"), key="k", **about)
    qb_client.publish("orders", b"tea", properties={"content-type": "text"}, timestamp_ms=MOMENT)
    qb_client.publish_text("orders", "tea", properties={"content-type": "text"})
    qb_client.publish_many("orders", [b"a"], timestamp_ms=MOMENT)
    with qb_client.transaction("one") as transaction:
        transaction.publish_json("orders", Order(8, "cake"), timestamp_ms=MOMENT, properties={"a-b": "c"}, colour="red")
        transaction.publish_many("orders", [b"a"], timestamp_ms=MOMENT)
    async with AsyncBrokerClient(qb_broker.address) as client:
        await client.publish_json("orders", [1], properties={"a": "b"})
    first, second, third, many, staged, fourth, fifth = qb_client.fetch("orders", 0, 0)
    assert (staged.json(Order), staged.time, staged.properties) == (
        Order(8, "cake"),
        MOMENT,
        {"a-b": "c", "colour": "red"},
    )
    assert (first.json(Order), first.key, first.time) == (Order(7, "tea"), "k", MOMENT)
    assert first.properties == {"content-type": "json", "colour": "red"}, "a keyword wins"
    assert (second.properties, second.time) == ({"content-type": "text"}, MOMENT)
    assert third.properties == {"content-type": "text"}
    assert many.time == fourth.time == MOMENT
    assert (fifth.json(), fifth.properties) == ([1], {"a": "b"})


@pytest.mark.process
def test_results_have_attributes_keys_and_a_helpful_repr(qb_client: BrokerClient, qb_broker: RunningBroker) -> None:
    topic = qb_client.create_topic("orders", partitions=2)
    assert isinstance(topic, TopicInfo)
    assert (topic.topic, topic["topic"], topic.partitions) == ("orders", "orders", 2)
    assert repr(topic).startswith("TopicInfo(topic='orders', partitions=2, ")
    assert json.loads(json.dumps(topic)) == topic
    with pytest.raises(AttributeError, match=r"TopicInfo has no 'partition'; it has topic, partitions"):
        topic.partition  # noqa: B018
    assert qb_client.describe_topic("orders").logs[1]["partition"] == 1
    subscription = qb_client.create_subscription("till", "orders")
    assert isinstance(subscription, SubscriptionInfo)
    assert qb_client.describe_subscription("till").lag == 0
    assert [type(each) for each in qb_client.list_subscriptions()] == [SubscriptionInfo]
    assert isinstance(qb_client.server_info(), ServerInfo)
    assert qb_client.server_info().durability == "fsynced"
    with Consumer("billing", "orders", host=qb_broker.address) as consumer:
        qb_client.publish("orders", b"tea")
        assert consumer.poll(timeout=30)
        (group,) = qb_client.list_groups()
    assert (type(group), group.group) == (GroupInfo, "billing")


@pytest.mark.process
def test_every_fact_that_a_broker_sends_has_a_typed_attribute(qb_client: BrokerClient) -> None:
    qb_client.create_topic("orders")
    qb_client.publish("orders", b"tea " * 500, key="k")
    stage = qb_client.begin_transaction("night-run")
    with qb_client.transaction("day-run") as transaction:
        transaction.publish("orders", b"milk")
    qb_client.commit_offsets("billing", [("orders", 0, 1)])
    listed = qb_client.list_transactions()
    (topic, committed, group) = (
        qb_client.describe_topic("orders"),
        qb_client.committed_offsets("billing")[0],
        qb_client.describe_group("billing"),
    )
    for fact in (
        topic, topic.logs[0], qb_client.server_info(), committed, group, group.partitions[0], listed, listed.stages[0],
        qb_client.show_transaction("day-run"), a_dead_letter(qb_client),
    ):  # fmt: skip
        assert {*fact} <= {*type(fact).__annotations__}, type(fact)
        assert json.loads(json.dumps(fact)) == fact
        assert len(repr(fact)) < 1_500
    assert (committed.offset, committed["partition"]) == (1, 0)
    assert (listed.stages[0].transaction, listed.committed) == ("night-run", 1)
    assert repr(stage) == f"<Stage {listed.stages[0].stage}, 0 messages>"
    assert qb_client.show_transaction("day-run").state == "committed"


def a_dead_letter(client: BrokerClient) -> DeadLetter:
    """Return the dead letter of a handler that always fails."""

    def fail(message: Message) -> None:
        raise ValueError("no tea today")

    with client.create_and_subscribe("till", "orders", fail, max_deliveries=1):
        wait_until(lambda: len(client.dead_letters("till")) == 2)
    letter = client.dead_letters("till")[0]
    assert (letter.offset, letter["offset"], letter.key, letter.malformed) == (0, 0, "k", None)
    assert "no tea today" in letter.reason
    assert letter.time.tzinfo is UTC
    assert "…" in repr(letter), "a long body is cut"
    return letter


@pytest.mark.process
async def test_what_a_program_holds_says_what_it_is(qb_client: BrokerClient, qb_broker: RunningBroker) -> None:
    qb_client.create_topic("orders")
    where = f"127.0.0.1:{qb_broker.port}"
    assert repr(qb_client) == f"<BrokerClient {where}, connected>"
    assert repr(BrokerClient(port=1)) == "<BrokerClient 127.0.0.1:1, not connected>"
    with qb_client.create_and_subscribe("till", "orders", print) as subscriber:
        assert repr(subscriber) == "<Subscriber of 'till', joined>"
    assert repr(subscriber) == "<Subscriber of 'till', left>"
    with qb_client.producer("orders") as producer:
        assert repr(producer) == "<Producer of topic orders, 0 bytes buffered>"
    assert repr(producer) == "<Producer of topic orders, closed>"
    assert repr(Consumer("billing", "orders", host=qb_broker.address)) == f"<Consumer 'billing' of orders, {where}>"
    transaction = qb_client.transaction("day-run", 7)
    assert repr(transaction) == "<Transaction day-run number 7, not open>"
    with transaction:
        transaction.publish("orders", b"tea" * 1_000)
        assert repr(transaction) == "<Transaction day-run number 7, open>"
    assert repr(transaction) == "<Transaction day-run number 7, committed>"
    receipt = qb_client.publish("orders", b"tea" * 1_000)
    assert repr(receipt).startswith("Receipt(topic='orders', partition=0, offset=1, ")
    fetched = qb_client.fetch("orders", 0, 0)
    assert repr(fetched) == "<2 messages, the next one is 2>"
    assert repr(fetched[0]) == "<Message orders/0@0, 3000 bytes, attempt 1>"
    async with AsyncBrokerClient(qb_broker.address) as client:
        assert repr(client) == f"<AsyncBrokerClient {where}, connected>"
        assert repr(client.messages("till")) == "<MessageIterator of 'till'>"


def test_no_repr_shows_a_token() -> None:
    for made in (BrokerClient(token="qb_secret"), AsyncBrokerClient(token="qb_secret")):
        assert "qb_secret" not in repr(made)
        assert "qb_secret" not in repr(made._conversation) + repr(vars(made))
