"""Consumer groups over HTTP: every route, what it answers and each of its refusals, over real sockets."""

from __future__ import annotations

import pytest


async def make_topic(peer, messages=3):
    await peer.ok("POST", "/topics", {"name": "t", "partitions": 2}, 201)
    for number in range(messages):
        await peer.ok("POST", "/topics/t/messages", {"value": str(number), "partition": 0})


async def test_a_group_is_made_once_and_is_the_same_again(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make_topic(peer)
        made = await peer.ok("POST", "/consumers/g/groups", {"topic_name": "t"}, 201)
        assert (made["group_id"], made["topic_name"], made["partitions"]) == ("g", "t", 2)
        assert await peer.ok("POST", "/consumers/g/groups", {"topic_name": "t"}, 201) == made
        assert await peer.ok("GET", "/consumers/g/offsets") == {"offsets": []}
        (listed,) = (await peer.ok("GET", "/consumers"))["groups"]
        assert (listed["group"], listed["topics"], listed["members"]) == ("g", ["t"], 0)
        lags = {each["partition"]: each["lag"] for each in (await peer.ok("GET", "/consumers/g"))["partitions"]}
        assert lags == {0: 3, 1: 0}


async def test_a_group_without_offsets_survives_a_restart_and_goes_with_its_topic(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make_topic(peer)
        made = await peer.ok("POST", "/consumers/g/groups", {"topic_name": "t"}, 201)
    async with a_broker() as connect:
        peer = await connect.http()
        assert await peer.ok("GET", "/consumers/g/offsets?topic=t") == {"offsets": []}
        assert await peer.ok("POST", "/consumers/g/groups", {"topic_name": "t"}, 201) == made
        await peer.ok("DELETE", "/topics/t")
        assert await peer.refused("GET", "/consumers/g/offsets") == (404, "UNKNOWN_GROUP")


@pytest.mark.parametrize(
    ("group", "body", "refusal"),
    [
        ("g", {}, (400, "BAD_REQUEST")),
        ("g", {"topic_name": 7}, (400, "BAD_REQUEST")),
        ("g", {"topic_name": "t", "x": 1}, (400, "BAD_REQUEST")),
        ("a%20b", {"topic_name": "t"}, (400, "BAD_NAME")),
        ("g", {"topic_name": "nowhere"}, (404, "UNKNOWN_TOPIC")),
    ],
)
async def test_a_group_that_cannot_be_is_refused(a_broker, group, body, refusal):
    async with a_broker() as connect:
        peer = await connect.http()
        await make_topic(peer)
        assert await peer.refused("POST", f"/consumers/{group}/groups", body) == refusal
        assert (await peer.ok("GET", "/consumers"))["groups"] == []


async def test_an_offset_is_committed_and_read_back_by_every_door(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make_topic(peer)
        commit = {"topic_name": "t", "partition": 0, "offset": 2}
        assert await peer.ok("POST", "/consumers/g/offsets", commit) == {"committed": True}
        (found,) = (await peer.ok("GET", "/consumers/g/offsets?topic=t"))["offsets"]
        assert (found["topic"], found["partition"], found["offset"]) == ("t", 0, 2)
        assert found["updated_at"].endswith("Z")
        (other,) = await (await connect()).call("committed_offsets", group="g")
        assert other["offset"] == 2
        metrics = await (await connect.lines()).data("metrics", topic="t", partition=0, groupId="g")
        assert metrics["lag"] == 1


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ({"topic_name": "t", "partition": 0}, (400, "BAD_REQUEST")),
        ({"topic_name": "t", "partition": 0, "offset": -1}, (400, "BAD_REQUEST")),
        ({"topic_name": "t", "partition": 0, "offset": "1"}, (400, "BAD_REQUEST")),
        ({"topic_name": "nowhere", "partition": 0, "offset": 0}, (404, "UNKNOWN_TOPIC")),
        ({"topic_name": "t", "partition": 2, "offset": 0}, (404, "UNKNOWN_PARTITION")),
        ({"topic_name": "t", "partition": 0, "offset": 4}, (416, "OFFSET_OUT_OF_RANGE")),
    ],
)
async def test_an_offset_that_cannot_be_committed_is_refused(a_broker, body, refusal):
    async with a_broker() as connect:
        peer = await connect.http()
        await make_topic(peer)
        assert await peer.refused("POST", "/consumers/g/offsets", body) == refusal
        assert await peer.refused("GET", "/consumers/g/offsets") == (404, "UNKNOWN_GROUP")


async def test_an_offset_out_of_range_is_answered_with_the_range(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make_topic(peer)
        answer = await peer.ask("POST", "/consumers/g/offsets", {"topic_name": "t", "partition": 0, "offset": 9})
        assert (answer.json["first_offset"], answer.json["end_offset"]) == (0, 3)


async def test_offsets_of_an_unknown_group_or_topic_are_not_found(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make_topic(peer)
        assert await peer.refused("GET", "/consumers/g/offsets") == (404, "UNKNOWN_GROUP")
        assert await peer.refused("GET", "/consumers/g") == (404, "UNKNOWN_GROUP")
        assert await peer.refused("DELETE", "/consumers/g") == (404, "UNKNOWN_GROUP")
        await peer.ok("POST", "/consumers/g/groups", {"topic_name": "t"}, 201)
        assert await peer.refused("GET", "/consumers/g/offsets?topic=nowhere") == (404, "UNKNOWN_TOPIC")


async def test_a_group_is_deleted_with_its_offsets_unless_it_has_members(a_broker):
    async with a_broker() as connect:
        peer, frames = await connect.http(), await connect()
        await make_topic(peer)
        await peer.ok("POST", "/consumers/g/groups", {"topic_name": "t"}, 201)
        await peer.ok("POST", "/consumers/g/offsets", {"topic_name": "t", "partition": 0, "offset": 1})
        await frames.call("join_group", group="g", member="m", topics=["t"])
        assert await peer.refused("DELETE", "/consumers/g") == (409, "GROUP_IN_USE")
        await frames.call("leave_group", group="g", member="m")
        assert await peer.ok("DELETE", "/consumers/g") == {"deleted": True}
        assert (await peer.ok("GET", "/consumers"))["groups"] == []
