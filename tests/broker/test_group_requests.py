"""Consumer groups through the binary door: what the methods answer, and on whose clock members go."""

from __future__ import annotations

import trio

from qb.core.wire.frames import MessageType as T
from tests.support.waiting import until_true


async def a_topic(connect, partitions=4):
    peer = await connect()
    await peer.ask(T.CREATE_TOPIC, 1, topic="a", partitions=str(partitions))
    return peer


def held(standing):
    return [partition for _, partition in standing["partitions"]]


async def test_members_share_the_partitions_and_commit_what_they_hold(a_broker):
    async with a_broker() as connect:
        peer = await a_topic(connect)
        await peer.publish("a", b"x", partition="0")
        first = await peer.call("join_group", group="g", member="m1", topics=["a"])
        first = await peer.call("sync_group", group="g", member="m1", generation=first["generation"])
        assert held(first) == [0, 1, 2, 3]
        second = await peer.call("join_group", group="g", member="m2", topics=["a"])
        second = await peer.call("sync_group", group="g", member="m2", generation=second["generation"])
        assert held(second) == [], "what moves is still held by the first"
        news = await peer.call("heartbeat_group", group="g", member="m1", generation=first["generation"])
        assert news["rebalance"] is True
        commit = {"group": "g", "offsets": [["a", 0, 1]]}
        fenced = {"member": "m1", "generation": first["generation"]}
        assert await peer.call("commit_offsets", **commit, **fenced) == {"committed": 1}
        news = await peer.call("sync_group", group="g", member="m1", generation=news["generation"])
        assert held(news) == [0, 2]
        assert await peer.call("commit_offsets", **commit, **fenced) == "STALE_GENERATION"
        second = await peer.call("heartbeat_group", group="g", member="m2", generation=second["generation"])
        assert held(second) == [1, 3]
        assert await peer.call("delete_group", group="g") == "GROUP_IN_USE"
        described = await peer.call("describe_group", group="g")
        assert [member["member"] for member in described["members"]] == ["m1", "m2"]
        assert await peer.call("leave_group", group="g", member="m2") == {}
        assert await peer.call("leave_group", group="g", member="m2") == "UNKNOWN_MEMBER"


async def test_a_silent_member_is_out_by_the_brokers_own_timer(a_broker):
    async with a_broker() as connect:
        peer = await a_topic(connect)
        joined_at = trio.current_time()
        await peer.call("join_group", group="g", member="m1", topics=["a"], session_timeout=1)

        async def is_gone():
            return await peer.call("describe_group", group="g") == "UNKNOWN_GROUP"

        await until_true(is_gone)
        assert trio.current_time() - joined_at >= 1.0


async def test_commits_are_checked_durable_and_gone_with_their_topic(a_broker):
    async with a_broker() as connect:
        peer = await a_topic(connect, 1)
        await peer.publish("a")
        assert await peer.call("commit_offsets", group="g", offsets=[["a", 0, 2]]) == "OFFSET_OUT_OF_RANGE"
        assert await peer.call("commit_offsets", group="g", offsets=[["a", 1, 0]]) == "UNKNOWN_PARTITION"
        assert await peer.call("commit_offsets", group="g", offsets=[["b", 0, 0]]) == "UNKNOWN_TOPIC"
        assert await peer.call("commit_offsets", group="g", offsets=[["a", 0, 1]]) == {"committed": 1}
    async with a_broker() as connect:
        peer = await connect()
        kept = await peer.call("committed_offsets", group="g")
        assert [(entry["topic"], entry["partition"], entry["offset"]) for entry in kept] == [("a", 0, 1)]
        reset = await peer.call("reset_group", group="g", topic="a", to="earliest")
        assert [entry["offset"] for entry in reset] == [0]
        assert [group["group"] for group in await peer.call("list_groups")] == ["g"]
        await peer.call("delete_topic", topic="a")
        assert await peer.call("committed_offsets", group="g") == []
