"""Lists over HTTP: in pages, in portions, and as cheap as what the page asks for every second must be."""

from __future__ import annotations

import pytest

from qb.core.pacing import MOST_AT_ONCE, counted
from qb.doors.http.reports import prometheus
from qb.doors.http.routes import summary_routes

WIDE = 1_024


async def wide(peer, subscriptions: int, partitions: int = WIDE) -> None:
    await peer.ok("POST", "/topics", {"name": "t", "partitions": partitions}, 201)
    for number in range(subscriptions):
        await peer.ok("POST", "/subscriptions", {"subscription_id": f"s{number:03}", "topic": "t"}, 201)


@pytest.mark.parametrize("path", ["/summary", "/metrics", "/subscriptions?detail=true", "/topics", "/ready"])
async def test_a_report_of_wide_subscriptions_is_made_in_bounded_steps(a_broker, path):
    async with a_broker() as connect:
        peer = await connect.http()
        await wide(peer, 30)
        with counted() as step:
            assert (await peer.ask("GET", path)).status == 200
        assert step.most <= MOST_AT_ONCE


async def test_the_summary_has_the_numbers_of_all_partitions_together(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await wide(peer, 3)
        await peer.ok("POST", "/topics/t/messages", {"messages": [{"value": "x"}] * 2_000})
        answer = await peer.ask("GET", "/summary")
        numbers = [each["numbers"] for each in answer.json["subscriptions"]]
        assert [(each["subscription_id"], each["lag"]) for each in numbers] == [
            (f"s{number:03}", 2_000) for number in range(3)
        ]
        assert answer.json["omitted"] == {"topics": 0, "subscriptions": 0, "groups": 0}
        assert len(answer.body) < 10_000


async def test_the_summary_lists_so_many_and_says_how_many_there_are(a_broker, monkeypatch):
    monkeypatch.setattr(summary_routes, "LISTED", 2)
    async with a_broker() as connect:
        peer = await connect.http()
        await wide(peer, 5, partitions=1)
        summary = await peer.ok("GET", "/summary")
        assert [each["numbers"]["subscription_id"] for each in summary["subscriptions"]] == ["s000", "s001"]
        assert summary["omitted"]["subscriptions"] == 3


@pytest.mark.parametrize(
    ("path", "listed", "name"),
    [
        ("/topics?", "topics", "name"),
        ("/subscriptions?", "subscriptions", "subscription_id"),
        ("/subscriptions?topic=t0&detail=true&", "subscriptions", "subscription_id"),
        ("/consumers?", "groups", "group"),
    ],
)
async def test_pages_lead_from_one_to_the_next_and_miss_nothing(a_broker, path, listed, name):
    async with a_broker() as connect:
        peer = await connect.http()
        for number in range(5):
            await peer.ok("POST", "/topics", {"name": f"t{number}", "partitions": 1}, 201)
            await peer.ok("POST", "/subscriptions", {"subscription_id": f"s{number}", "topic": "t0"}, 201)
            await peer.ok("POST", f"/consumers/g{number}/groups", {"topic_name": "t0"}, 201)
        whole = await peer.ok("GET", path)
        assert "next_after" not in whole
        found, after = [], ""
        while after is not None:
            page = await peer.ok("GET", f"{path}limit=2&after={after}")
            assert len(page[listed]) <= 2
            found += [each[name] for each in page[listed]]
            after = page.get("next_after")
        assert found == [each[name] for each in whole[listed]]
        assert len(found) == 5


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x"])
async def test_a_page_that_cannot_be_is_refused(a_broker, query):
    async with a_broker() as connect:
        peer = await connect.http()
        assert await peer.refused("GET", f"/topics?{query}") == (400, "BAD_REQUEST")


async def test_metrics_of_partitions_end_somewhere_and_say_how_many_are_missing(a_broker, monkeypatch):
    monkeypatch.setattr(prometheus, "PARTITIONS", 3)
    async with a_broker() as connect:
        peer = await connect.http()
        for name in ("a", "b"):
            await peer.ok("POST", "/topics", {"name": name, "partitions": 2}, 201)
        text = (await peer.ask("GET", "/metrics")).body.decode()
        assert [line.split()[0] for line in text.splitlines() if line.startswith("qb_log_bytes{")] == [
            'qb_log_bytes{partition="0",topic="a"}',
            'qb_log_bytes{partition="1",topic="a"}',
            'qb_log_bytes{partition="0",topic="b"}',
        ]
        assert "qb_log_partitions_omitted 1.0" in text
