"""Topics: how many there may be, and descriptions of many of them."""

from __future__ import annotations

import pytest
import trio

from qb.core.pacing import MOST_AT_ONCE, counted
from qb.core.wire.errors import LimitReached
from qb.core.wire.frames import MessageType as T


async def test_one_topic_more_than_the_settings_allow_is_refused_by_every_way_to_make_one(a_broker):
    async with a_broker(max_topics=2, auto_create_topics=True) as connect:
        peer, lines, http = await connect(), await connect.lines(), await connect.http()
        await peer.call("create_topic", topic="a")
        await peer.publish("b")
        words = "the broker has 2 topics: the limit is 2 (QB_MAX_TOPICS)"
        made = await peer.ask(T.CREATE_TOPIC, 1, topic="c")
        assert (made.properties["code"], made.properties["error"]) == ("LIMIT_REACHED", words)
        published = await peer.publish("c")
        assert (published.properties["code"], published.properties["error"]) == ("LIMIT_REACHED", words)
        assert await lines.error("createTopic", topic="c") == words
        assert await lines.error("produce", topic="c", value="x") == words
        assert await http.refused("POST", "/topics/c/messages", {"value": "x"}) == (429, "LIMIT_REACHED")
        await peer.call("delete_topic", topic="a")
        assert (await peer.publish("c")).properties["status"] == "success"


async def test_more_partitions_in_all_than_the_settings_allow_are_refused(a_broker):
    async with a_broker(max_partitions_in_all=4) as connect:
        peer = await connect()
        await peer.call("create_topic", topic="a", partitions=3)
        words = (
            "all topics of the broker together have 3 partitions, and 2 more are too many: "
            "the limit is 4 (QB_MAX_PARTITIONS_IN_ALL)"
        )
        refused = await peer.ask(T.CREATE_TOPIC, 1, topic="b", partitions="2")
        assert (refused.properties["code"], refused.properties["error"]) == ("LIMIT_REACHED", words)
        assert await peer.call("add_partitions", topic="a", partitions=5) == "LIMIT_REACHED"
        assert (await peer.call("add_partitions", topic="a", partitions=4))["partitions"] == 4


async def test_topics_that_are_made_at_the_same_time_do_not_pass_the_limit_together(a_broker):
    async with a_broker(max_topics=3) as connect:
        await connect()  # it has started
        outcomes = []

        async def create(name):
            try:
                await connect.broker.topics.create(name)
                outcomes.append("made")
            except LimitReached:
                outcomes.append("refused")

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(create, f"t{number}")
        assert sorted(outcomes) == ["made"] * 3 + ["refused"] * 3


@pytest.mark.parametrize("topics", [["a", "a"], [f"t{number}" for number in range(10_001)]], ids=["twice", "many"])
async def test_a_description_names_each_topic_once_and_not_too_many(a_broker, topics):
    async with a_broker() as connect:
        peer = await connect()
        await peer.call("create_topic", topic="a")
        with counted() as work:
            assert await peer.call("describe_topics", topics=topics) == "BAD_REQUEST"
        assert work.most <= MOST_AT_ONCE


async def test_a_description_of_many_partitions_is_of_one_moment_and_gives_way_to_other_tasks(a_broker):
    async with a_broker() as connect:
        peer = await connect()
        await peer.call("create_topic", topic="a", partitions=1024)
        await peer.call("create_topic", topic="b", partitions=1024)
        described = []

        async def describe():
            described.extend(await connect.broker.topics.describe_many(["a", "b"]))

        with counted() as work:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(describe)
                nursery.start_soon(peer.publish, "b", b"x", 1)
        assert work.most <= 1_200, "in portions"
        a, b = described
        assert (len(a["logs"]), len(b["logs"])) == (1024, 1024)
        assert [log.next_offset for log in b["logs"]] == [0] * 1024, "as it was when it was asked for"
        assert (await peer.call("describe_topics", topics=["b"]))[0]["messages"] == 1
