"""What a page of another site, shown by a browser that reaches the broker, can do with the HTTP door: nothing."""

from __future__ import annotations

import pytest

from qb.doors.http.http_app import ROWS
from qb.doors.http.requests.browser_rules import accepts_events, host_name
from qb.doors.http.requests.http_errors import raw_response
from tests.support.http_peers import READS_EVENTS


@pytest.mark.parametrize(
    "host",
    ["localhost:8080", "LocalHost.", "app.localhost", "127.0.0.1:1", "[::1]:8080", "192.0.2.7", "qb.test", "extra:80"],
)
async def test_a_host_that_is_the_brokers_is_served(a_broker, host):
    async with a_broker(http={"host": "qb.test", "hosts": ("Extra", "more.test")}) as connect:
        peer = await connect.http()
        await peer.ok("POST", "/topics", {"name": "t"}, 201, headers={"host": host})


@pytest.mark.parametrize("host", ["evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "x", ""])
async def test_a_foreign_host_is_refused_even_if_the_origin_agrees(a_broker, host):
    async with a_broker() as connect:
        peer = await connect.http()
        answer = await peer.ask("POST", "/topics", {"name": "t"}, headers={"host": host, "origin": f"http://{host}"})
        assert (answer.status, answer.json["code"]) == (421, "UNKNOWN_HOST")
        assert "QB_HTTP_HOSTS" in answer.json["error"]
        assert connect.broker.engine.topics() == {}


@pytest.mark.parametrize(
    ("header", "name"), [("A.b:80", "a.b"), ("[FE80::1%eth0]:9", "fe80::1%eth0"), ("a.", "a"), (" a ", "a")]
)
def test_a_host_is_compared_without_port_case_and_final_dot(header, name):
    assert host_name(header) == name


REFUSED = "text/event-stream;q=0"


@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        "image/avif,image/webp,*/*;q=0.8",
        "text/html,*/*;q=0.8",
        None,
        REFUSED,
        "*/*, Text/Event-Stream ; charset=utf-8 ; Q=0.000",
        "text/event-streams",
    ],
)
async def test_a_get_joins_a_subscription_only_if_it_says_that_it_reads_events(a_broker, accept):
    async with a_broker() as connect:
        peer = await connect.http()
        await make_subscription(peer)
        headers = {} if accept is None else {"accept": accept}
        answer = await peer.ask("GET", "/subscriptions/s/stream?auto_ack=true", headers=headers)
        assert (answer.status, answer.json["code"]) == (406, "NOT_ACCEPTABLE")
        assert "Accept: text/event-stream" in answer.json["error"]
        assert (await peer.ok("GET", "/subscriptions/s"))["lag"] == 2


@pytest.mark.parametrize(
    "accept", ["text/event-stream", "TEXT/EVENT-STREAM;q=0.001", f"{REFUSED}, text/event-stream;charset=utf-8"]
)
def test_events_may_be_named_with_a_weight_or_parameters(accept):
    assert accepts_events(accept)


@pytest.mark.parametrize("site", ["same-site", "cross-site"])
async def test_a_page_of_another_origin_cannot_join(a_broker, site):
    async with a_broker() as connect:
        peer = await connect.http()
        await make_subscription(peer)
        headers = {**READS_EVENTS, "sec-fetch-site": site}
        assert (await peer.refused("GET", "/subscriptions/s/stream", headers=headers)) == (403, "FOREIGN_ORIGIN")


@pytest.mark.parametrize("site", ["same-origin", "none"])
async def test_our_own_page_can_join(a_broker, site):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make_subscription(peer)
        await reader.open_stream("/subscriptions/s/stream", sec_fetch_site=site)
        assert (await reader.event()).data["value"] == "a"


async def test_no_other_get_changes_anything(a_broker):
    async with a_broker(auto_create_topics=True) as connect:
        peer = await connect.http()
        await make_subscription(peer)
        before = await state(peer)
        for known in ("s", "t", "g", "unknown"):
            for row in ROWS:
                if row.method == "GET" and not row.streams:
                    path = row.path.replace("{partition}", "0")
                    for name in ("{topic}", "{subscription}", "{group}"):
                        path = path.replace(name, known)
                    query = "?offset=0" if row.path.endswith("explain") else ""
                    assert (await peer.ask("GET", path + query)).status in (200, 404), row
        assert await state(peer) == before


async def make_subscription(peer):
    await peer.ok("POST", "/topics", {"name": "t", "partitions": 1}, 201)
    await peer.ok("POST", "/subscriptions", {"subscription_id": "s", "topic": "t"}, 201)
    await peer.ok("POST", "/topics/t/messages", {"messages": [{"value": "a"}, {"value": "b"}]})


async def state(peer):
    """Return everything that the broker keeps, as it shows it."""
    return [await peer.ok("GET", path) for path in ("/topics", "/subscriptions?detail=true", "/consumers")]


@pytest.mark.parametrize("path", ["/", "/docs", "/page/page.js", "/openapi.json", "/topics", "/nowhere", "/metrics"])
async def test_every_answer_forbids_a_browser_to_guess_frame_or_load_from_elsewhere(a_broker, path):
    async with a_broker() as connect:
        peer = await connect.http()
        answer = await peer.ask("GET", path, headers={"accept": "text/html"})
        check_headers(answer.headers)
        assert b"<style" not in answer.body
        assert b" style=" not in answer.body
        assert b"<script>" not in answer.body


async def test_a_stream_has_the_same_headers(a_broker):
    async with a_broker() as connect:
        peer, reader = await connect.http(), await connect.http()
        await make_subscription(peer)
        await reader.send("GET", "/topics/t/tail")
        check_headers((await reader._start()).headers)


def test_so_does_the_answer_to_a_peer_that_is_not_served():
    head = raw_response(503, {}).partition(b"\r\n\r\n")[0].decode()
    check_headers(dict(line.split(": ", 1) for line in head.split("\r\n")[1:]))


def check_headers(headers):
    assert headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "default-src 'none'" in headers["content-security-policy"]
