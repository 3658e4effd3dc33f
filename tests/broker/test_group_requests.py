"""Consumer groups through the binary door: what the methods answer, and on whose clock members go."""

from __future__ import annotations

import trio

from qb.core.groups.group_coordinator import GroupCoordinator
from qb.core.pacing import MOST_AT_ONCE, counted
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


async def test_members_and_offsets_of_all_groups_together_have_limits(a_broker):
    async with a_broker(max_members_in_all=2, max_committed_offsets=3) as connect:
        peer = await a_topic(connect)
        for group in ("g", "h"):
            await peer.call("join_group", group=group, member="m", topics=["a"])
        assert await peer.call("join_group", group="i", member="m", topics=["a"]) == "LIMIT_REACHED"
        assert "generation" in await peer.call("join_group", group="h", member="m", topics=["a"]), (
            "it is one of the two"
        )
        await peer.call("leave_group", group="g", member="m")
        assert "generation" in await peer.call("join_group", group="i", member="m", topics=["a"])
        two = [["a", 0, 0], ["a", 1, 0]]
        assert await peer.call("commit_offsets", group="j", offsets=two) == {"committed": 2}
        assert await peer.call("commit_offsets", group="k", offsets=two) == "LIMIT_REACHED"
        assert await peer.call("commit_offsets", group="j", offsets=two) == {"committed": 2}, "these are there"
        await peer.call("delete_group", group="j")
        assert await peer.call("commit_offsets", group="k", offsets=two) == {"committed": 2}


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


async def test_there_is_a_limit_to_groups_however_they_come_to_be_and_those_within_it_go_on(a_broker):
    async with a_broker(max_groups=2, max_group_members=1) as connect:
        peer = await a_topic(connect)
        commit = {"offsets": [["a", 0, 0]]}
        await peer.call("join_group", group="g", member="m1", topics=["a"])
        await peer.call("commit_offsets", group="h", **commit)
        assert await peer.call("commit_offsets", group="i", **commit) == "LIMIT_REACHED"
        assert await peer.call("join_group", group="i", member="m1", topics=["a"]) == "LIMIT_REACHED"
        assert await peer.call("join_group", group="g", member="m2", topics=["a"]) == "LIMIT_REACHED"
        assert await peer.call("commit_offsets", group="g", **commit) == {"committed": 1}
        await peer.call("delete_group", group="h")
        assert await peer.call("commit_offsets", group="i", **commit) == {"committed": 1}


async def test_a_commit_of_too_many_offsets_is_refused_and_the_largest_is_counted(a_broker):
    async with a_broker() as connect:
        peer = await a_topic(connect)
        offsets = [["a", number % 4, 0] for number in range(10_000)]
        with counted() as step:
            assert await peer.call("commit_offsets", group="g", offsets=offsets) == {"committed": 10_000}
        assert 0 < step.most <= MOST_AT_ONCE
        assert await peer.call("commit_offsets", group="g", offsets=[*offsets, ["a", 0, 0]]) == "BAD_REQUEST"


async def test_a_heartbeat_does_not_look_at_the_other_members(a_broker, monkeypatch):
    looked = []
    next_deadline = GroupCoordinator.next_deadline
    monkeypatch.setattr(GroupCoordinator, "next_deadline", lambda self: looked.append(1) or next_deadline(self))
    async with a_broker() as connect:
        peer = await a_topic(connect)
        joined = await peer.call("join_group", group="g", member="m1", topics=["a"], session_timeout=60)
        before = len(looked)
        for _ in range(20):
            await peer.call("heartbeat_group", group="g", member="m1", generation=joined["generation"])
        assert len(looked) <= before + 1


async def test_a_group_whose_timeouts_fail_says_so_until_they_work_again(a_broker, monkeypatch):
    tick_group, broken = GroupCoordinator.tick_group, [True]

    def tick(self, group, now):
        if broken:
            raise RuntimeError("a bug")
        return tick_group(self, group, now)

    monkeypatch.setattr(GroupCoordinator, "tick_group", tick)
    async with a_broker() as connect:
        peer = await a_topic(connect)
        await peer.call("join_group", group="g", member="m1", topics=["a"])

        async def fault():
            return (await peer.call("describe_group", group="g"))["fault"]

        async def is_notified():
            return "internal error (RuntimeError)" in (await fault() or "")

        async def is_well():
            return await fault() is None

        await until_true(is_notified)
        broken.clear()
        await peer.call("join_group", group="h", member="m1", topics=["a"])  # all groups are looked at again
        await until_true(is_well)


async def test_there_is_a_limit_to_the_partitions_of_all_subscriptions_together(a_broker):
    async with a_broker(max_cursors=5) as connect:
        peer = await a_topic(connect, partitions=2)
        for name in ("s", "t"):
            assert (await peer.call("create_subscription", subscription_id=name, topic="a"))["subscription_id"] == name
        assert await peer.call("create_subscription", subscription_id="u", topic="a") == "LIMIT_REACHED"
        assert await peer.call("fork", subscription_id="s", new_id="u") == "LIMIT_REACHED"
        assert await peer.call("add_partitions", topic="a", partitions=3) == "LIMIT_REACHED"
        await peer.call("delete_subscription", subscription_id="t")
        assert (await peer.call("add_partitions", topic="a", partitions=3))["partitions"] == 3


async def test_there_is_a_limit_to_subscriptions_and_those_within_it_go_on(a_broker):
    async with a_broker(max_subscriptions=1) as connect:
        peer = await a_topic(connect)
        await peer.call("create_subscription", subscription_id="s", topic="a")
        assert await peer.call("create_subscription", subscription_id="t", topic="a") == "LIMIT_REACHED"
        assert await peer.call("fork", subscription_id="s", new_id="t") == "LIMIT_REACHED"
        assert (await peer.call("create_subscription", subscription_id="s", topic="a"))["subscription_id"] == "s"
        await peer.call("delete_subscription", subscription_id="s")
        assert (await peer.call("create_subscription", subscription_id="t", topic="a"))["subscription_id"] == "t"
