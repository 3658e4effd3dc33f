"""The largest request of every HTTP route that the limits allow: no step handles more items than there may be."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import trio

from qb.core.broker.outgoing_messages import OutgoingMessage
from qb.doors.http.http_app import ROWS, SMALL_BODY
from tests.support.bounded_steps import WIDE, bounded
from tests.support.http_peers import HttpPeer

STORED = 10_000  # messages
JSON = 4 << 20  # bytes of a body of messages


class Largest(NamedTuple):
    """The largest that a route takes: its query, and its body as JSON or as something else."""

    query: str = ""
    body: Any = None
    raw: bytes = b""
    kind: str = "application/json"


def many(item: str, size: int = SMALL_BODY) -> list[Any]:
    """Return as many items as fit into a body, with a little room for the rest."""
    return [json.loads(item)] * ((size - 200) // (len(item) + 1))


# What a request without a row here takes is its path alone.
LARGEST: dict[tuple[str, str], list[Largest]] = {
    ("POST", "/topics"): [Largest(body={"name": "created", "partitions": WIDE})],
    ("GET", "/subscriptions"): [Largest("?detail=true")],
    ("POST", "/topics/{topic}/messages"): [
        Largest(body={"messages": [{"value": ""}] * 10_000}),
        Largest(body={"messages": many('{"value":"","headers":{"a":"","b":""}}', JSON)[:10_000]}),
        Largest(body={"value": "", "headers": {f"{number:05}": "" for number in range(10_000)}}),
        Largest(body={"value": "ä" * (JSON // 2 - 100)}),
        Largest(raw=b'{"value":""}\n' * 100_000, kind="application/x-ndjson"),
        Largest(raw=b"\n" * 100_000, kind="application/x-ndjson"),
        Largest(raw=b"x" * (16 << 20), kind="application/octet-stream"),
    ],
    ("GET", "/topics/{topic}/partitions/{partition}/messages"): [Largest("?max_records=10000")],
    ("POST", "/consumers/{group}/groups"): [Largest(body={"topic_name": "wide"})],
    ("POST", "/consumers/{group}/offsets"): [Largest(body={"topic_name": "wide", "partition": 0, "offset": 0})],
    ("POST", "/subscriptions"): [Largest(body={"subscription_id": "new", "topic": "wide", "start_offset": "@0"})],
    ("POST", "/subscriptions/{subscription}/seek"): [Largest(body={"to": "@0"})],
    ("POST", "/subscriptions/{subscription}/pause"): [Largest(body={})],
    ("POST", "/subscriptions/{subscription}/resume"): [Largest(body={})],
    ("POST", "/login"): [Largest(body={"token": "x" * 1_000_000})],
    ("POST", "/logout"): [Largest(body={})],
    ("POST", "/subscriptions/{subscription}/fork"): [Largest(body={"new_id": "forked"})],
    ("GET", "/subscriptions/{subscription}/explain"): [Largest("?offset=0")],
    ("GET", "/subscriptions/{subscription}/dead-letters"): [Largest("?max=10000")],
    ("POST", "/subscriptions/{subscription}/dead-letters/retry"): [
        Largest(body={"numbers": many("1")}),
        Largest(body={"numbers": list(range(10_000))}),
    ],
    ("POST", "/subscriptions/{subscription}/dead-letters/purge"): [Largest(body={"numbers": many("1")})],
    ("POST", "/subscriptions/{subscription}/acks"): [
        Largest(body={"acks": many('{"partition":0,"offset":1}')}),
        Largest(body={"acks": [{"partition": number % WIDE, "offset": number} for number in range(10_000)]}),
        Largest(body={"nacks": [{"partition": 0, "offset": number, "reason": "x" * 50} for number in range(8_000)]}),
    ],
}


def test_every_route_with_a_body_has_its_largest_request_here():
    assert {(row.method, row.path) for row in ROWS if row.body} <= set(LARGEST)
    assert set(LARGEST) <= {(row.method, row.path) for row in ROWS}


async def ask(peer: HttpPeer, method: str, path: str, largest: Largest) -> None:
    raw = largest.raw
    headers = {"content-type": largest.kind} if method == "POST" else {}
    if largest.body is not None:
        raw = json.dumps(largest.body, separators=(",", ":"), ensure_ascii=False).encode()
    with bounded(f"{method} {path}"[-60:]), trio.fail_after(60):
        answer = await peer.ask(method, path + largest.query, body=raw, headers=headers)
    assert answer.status != 500, answer.body


async def stream(peer: HttpPeer, path: str, count: int) -> None:
    """Read so many events of a stream."""
    with bounded(path), trio.fail_after(60):
        await peer.open_stream(path)
        for _ in range(count):
            await peer.block()
    peer.vanish()


@pytest.mark.timeout(180)
async def test_the_largest_request_of_every_route_is_handled_in_steps_that_are_bounded(a_broker):
    async with a_broker() as connect:
        peer, joined = await connect.http(), await connect.http()
        await peer.ok("POST", "/topics", {"name": "wide", "partitions": WIDE}, 201)
        for number in range(10):
            options = {"max_in_flight": 100_000}
            body = {"subscription_id": f"s{number}", "topic": "wide", "options": options}
            await peer.ok("POST", "/subscriptions", body, 201)
        await connect.broker.appends.publish_many("wide", [OutgoingMessage(b"", 0)] * STORED, 0)
        await joined.open_stream("/subscriptions/s0/stream?window=1000")
        for row in sorted(ROWS, key=lambda row: row.method == "DELETE"):
            path = row.path.format(topic="wide", partition="0", subscription="s0", group="g")
            if path.endswith("/stream"):
                await stream(await connect.http(), "/subscriptions/s1/stream?window=100000&auto_ack=true", STORED)
            elif path.endswith("/tail"):
                await stream(await connect.http(), f"{path}?offset=earliest", STORED)
            else:
                for largest in LARGEST.get((row.method, row.path), [Largest()]):
                    await ask(await connect.http(), row.method, path, largest)
