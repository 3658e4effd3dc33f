"""Listings of many subscriptions and groups cost as much as these are, and give way. Work is counted, never timed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import trio

from qb.core.pacing import MOST_AT_ONCE, counted
from qb.core.subscriptions.subscription import Subscription
from tests.support.push_peers import a_topic

PATHS = ("/summary", "/subscriptions?detail=true", "/subscriptions", "/consumers", "/metrics")


@pytest.fixture
def described(monkeypatch) -> Counter[str]:
    """Counts the subscriptions whose partitions are looked at one by one."""
    counts: Counter[str] = Counter()
    partitions = Subscription.partitions

    def counting(self: Subscription, ends: Any) -> Any:
        counts["described"] += 1
        return partitions(self, ends)

    monkeypatch.setattr(Subscription, "partitions", counting)
    return counts


async def test_no_listing_looks_at_the_partitions_of_each_subscription(a_broker, described) -> None:
    with trio.fail_after(120):
        async with a_broker() as connect:
            peer, web = await a_topic(connect, partitions="100"), await connect.http()
            for number in range(60):
                await peer.call("create_subscription", subscription_id=f"s{number}", topic="a")
                await peer.call("commit_offsets", group=f"g{number}", offsets=[["a", 0, 0]])
            await peer.publish("a", b"x", partition="7")
            described.clear()
            with counted() as step:
                answers = {path: await web.ask("GET", path) for path in PATHS}
            assert {answer.status for answer in answers.values()} == {200}
            assert described["described"] == 0
            assert 0 < step.most <= MOST_AT_ONCE
            assert b'qb_subscription_lag_messages{subscription="s59",topic="a"} 1.0' in answers["/metrics"].body
            summary = await web.ok("GET", "/summary")
            assert {each["numbers"]["lag"] for each in summary["subscriptions"]} == {1}
            assert max(len(answer.body) for path, answer in answers.items() if path != "/metrics") < 60 * 1_000


async def test_an_overview_of_a_group_agrees_with_its_description(a_broker) -> None:
    with trio.fail_after(60):
        async with a_broker() as connect:
            peer = await a_topic(connect, partitions="3")
            await a_topic(connect, topic="b", partitions="2")
            for partition, count in enumerate((3, 0, 2)):
                for _ in range(count):
                    await peer.publish("a", b"x", partition=str(partition))
            await peer.publish("b", b"x", partition="1")
            await peer.call("join_group", group="members", member="m", topics=["a", "b"])
            await peer.call("commit_offsets", group="members", offsets=[["a", 0, 2]])
            await peer.call("commit_offsets", group="offsets", offsets=[["a", 2, 1], ["a", 1, 0]])
            await connect.broker.groups.declare("declared", "b")
            for overview in await connect.broker.groups.overviews():
                whole = await connect.broker.groups.describe(overview.group)
                assert overview.lag == sum(each.lag for each in whole.partitions), overview.group
                assert overview.members == len(whole.members)
                assert overview.partitions == whole.partitions
            lags = {each.group: each.lag_by_topic for each in await connect.broker.groups.overviews()}
            assert lags == {"members": {"a": 3, "b": 1}, "offsets": {"a": 1}, "declared": {"b": 1}}


async def test_the_summary_lists_a_bounded_number_and_says_how_many_it_leaves_out(a_broker, monkeypatch) -> None:
    monkeypatch.setattr("qb.doors.http.routes.summary_routes.LISTED", 2)
    with trio.fail_after(60):
        async with a_broker() as connect:
            peer, web = await a_topic(connect), await connect.http()
            for number in range(5):
                await peer.call("create_subscription", subscription_id=f"s{number}", topic="a")
            summary = await web.ok("GET", "/summary")
            assert [each["numbers"]["subscription_id"] for each in summary["subscriptions"]] == ["s0", "s1"]
            assert summary["omitted"] == {"topics": 0, "subscriptions": 3, "groups": 0}
