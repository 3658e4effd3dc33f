"""What programs give to a client and get from it: JSON, properties, times, and typed facts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from qb import AsyncBrokerClient, BrokerClient, Consumer, GroupInfo, ServerInfo, SubscriptionInfo, TopicInfo
from qb.testing.made_messages import MessageMaker
from qb.testing.running_broker import RunningBroker

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
    async with AsyncBrokerClient(qb_broker.address) as client:
        await client.publish_json("orders", [1], properties={"a": "b"})
    first, second, third, fourth, fifth = qb_client.fetch("orders", 0, 0)
    assert (first.json(Order), first.key, first.time) == (Order(7, "tea"), "k", MOMENT)
    assert first.properties == {"content-type": "json", "colour": "red"}, "a keyword wins"
    assert (second.properties, second.time) == ({"content-type": "text"}, MOMENT)
    assert third.properties == {"content-type": "text"}
    assert fourth.time == MOMENT
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
def test_every_fact_that_a_broker_sends_about_a_topic_has_a_typed_attribute(qb_client: BrokerClient) -> None:
    qb_client.create_topic("orders")
    assert {*qb_client.describe_topic("orders")} <= {*TopicInfo.__annotations__}
    assert {*qb_client.server_info()} <= {*ServerInfo.__annotations__}
