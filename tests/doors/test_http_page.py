"""What the broker serves for the live page: its files, and the summary that it asks for every second."""

from __future__ import annotations

import re

from qb.doors.http.routes.page_routes import FILES
from tests.support.brokers import ROOT

BROWSER = {"accept": "text/html,application/xhtml+xml"}


async def test_a_browser_gets_the_page_and_every_file_that_it_names(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        wanted = ["/"]
        for path in wanted:
            answer = await peer.ask("GET", path, headers=BROWSER)
            assert answer.status == 200, path
            text = answer.body.decode()
            found = re.findall(r'(?:href|src)="(/page/[^"]+)"', text)
            found += [f"/page/{name}" for name in re.findall(r'^import .* from "\./(.+)";$', text, re.MULTILINE)]
            wanted += [each for each in found if each not in wanted]
        assert set(wanted) == {"/", *(f"/page/{name}" for name in FILES if name != "docs.css")}  # which /docs names
        script = await peer.ask("GET", "/page/page.js")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        assert await peer.refused("GET", "/page/../server.py") == (404, "NO_SUCH_ROUTE")
        assert await peer.refused("POST", "/page/page.js") == (405, "METHOD_NOT_ALLOWED")


def test_the_page_asks_no_other_host_and_never_takes_data_for_markup() -> None:
    files = list((ROOT / "doors/http/page").iterdir())
    assert {path.name for path in files} == {"index.html", *FILES}
    for path in files:
        text = path.read_text()
        hosts = set(re.findall(r"(?:https?:)?//([\w-]+(?:\.[\w-]+)+)", text))
        assert hosts <= {"www.w3.org"}, path  # only the name of SVG's namespace
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), path


async def test_the_summary_has_topics_subscriptions_groups_and_latency(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await peer.ok("POST", "/topics", {"name": "orders", "partitions": 2}, status=201)
        await peer.ok("POST", "/subscriptions", {"subscription_id": "billing", "topic": "orders"}, status=201)
        await peer.ok("POST", "/consumers/shipping/groups", {"topic_name": "orders"}, status=201)
        before = await peer.ok("GET", "/summary")
        await peer.ok("POST", "/topics/orders/messages", {"value": "tea", "partition": 1})
        after = await peer.ok("GET", "/summary")
    assert before["status"] == {"status": "ready"}
    assert [each["topic"]["name"] for each in after["topics"]] == ["orders"]
    assert [each["topics"][0]["published_messages"] for each in (before, after)] == [0, 1]
    assert [each["subscriptions"][0]["numbers"]["lag"] for each in (before, after)] == [0, 1]
    assert [sum(one["lag"] for one in each["groups"][0]["partitions"]) for each in (before, after)] == [0, 1]
    assert [sum(each["fsync"]["counts"]) for each in (before, after)] == [0, 1]
    assert after["connections"] == {"http": 1}


async def test_the_summary_of_an_empty_broker_is_empty(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        summary = await peer.ok("GET", "/summary")
        assert (summary["topics"], summary["subscriptions"], summary["groups"]) == ([], [], [])
        assert await peer.refused("GET", "/summary?topic=x") == (400, "BAD_REQUEST")
