"""Bodies of messages over HTTP: within bounds that hold whatever is in them, and stored while they arrive."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from qb.core import pacing
from qb.doors.http import line_body
from qb.doors.http.http_errors import HttpError
from qb.doors.http.line_body import LineBody
from qb.doors.http.request_bodies import BodyLimit, BodyParts, Room

NDJSON = {"content-type": "application/x-ndjson"}
RAW = {"content-type": "application/octet-stream"}
MiB = 1 << 20


# Cutting


def cut(parts: Sequence[bytes], limit: int = 100) -> list[list[tuple[int, bytes]]]:
    """Return the portions of lines in a body that arrives in these parts."""

    async def run() -> list[Any]:
        events = iter([{"type": "http.request", "body": part, "more_body": True} for part in parts])

        async def receive() -> Any:
            return next(events, {"type": "http.request", "body": b"", "more_body": False})

        body = LineBody(BodyParts(receive), BodyLimit(limit), Room(trio.CapacityLimiter(1)))
        found = []
        while (portion := await body.next_portion()) is not None:
            found.append([tuple(line) for line in portion])
        return found

    return trio.run(run)


@given(text=st.text("ab\n \r", max_size=60).map(str.encode), cuts=st.lists(st.integers(0, 60)))
def test_lines_do_not_depend_on_how_the_body_is_cut(text, cuts):
    places = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    parts = [text[start:end] for start, end in pairwise(places)]
    found = [line for portion in cut(parts) for line in portion]
    assert found == [(number, line) for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]


def test_a_portion_has_a_bounded_number_of_lines_and_bytes(monkeypatch):
    monkeypatch.setattr(line_body, "PORTION_LINES", 3)
    assert [len(portion) for portion in cut([b"x\n" * 10])] == [3, 3, 3, 1]
    monkeypatch.setattr(line_body, "PORTION_BYTES", 5)
    assert [len(portion) for portion in cut([b"xxxx\n"] * 4)] == [2, 2]


@pytest.mark.parametrize("parts", [[b"x" * 101], [b"x" * 60] * 2, [b"\n", b"x" * 101 + b"\n"]])
def test_a_line_over_the_limit_is_refused_before_its_end_comes(parts):
    with pytest.raises(HttpError, match=r"line .* 100 bytes"):
        cut(parts)


def test_blank_lines_are_counted_too_and_100_000_are_allowed(monkeypatch):
    assert cut([b"\n" * 99_999 + b"x\n"])[-1] == [(100_000, b"x")]
    with pytest.raises(HttpError, match="more than 100000 lines"):
        cut([b"\n" * 100_001])


# Storing


async def make(peer, partitions=1):
    await peer.ok("POST", "/topics", {"name": "t", "partitions": partitions}, 201)


async def test_lines_are_stored_while_the_rest_is_still_to_come(a_broker, monkeypatch):
    monkeypatch.setattr(line_body, "PORTION_LINES", 2)
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        line = b'{"value":"x"}\n'
        head = "POST /topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-ndjson\r\n"
        await peer.stream.send_all(f"{head}content-length: {5 * len(line)}\r\n\r\n".encode() + line * 3)
        with trio.fail_after(10):
            while connect.broker.log("t", 0).end_offset < 2:
                await trio.testing.wait_all_tasks_blocked(0.001)
            await peer.stream.send_all(line * 2)
            answer = b""
            while b"]}" not in answer:
                answer += await peer.stream.receive_some()
        assert [each["offset"] for each in json.loads(answer.partition(b"\r\n\r\n")[2])["messages"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("bad", "status"), [(b'{"value":7}', 400), (b'{"value":"x","partition":9}', 404), (b'{"value":"x"', 400)]
)
async def test_a_bad_line_ends_the_request_and_the_answer_lists_what_the_portions_before_it_stored(
    a_broker, monkeypatch, bad, status
):
    monkeypatch.setattr(line_body, "PORTION_LINES", 2)
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        body = b'{"value":"x"}\n' * 3 + bad + b"\n" + b'{"value":"x"}\n' * 3
        answer = await peer.ask("POST", "/topics/t/messages", body=body, headers=NDJSON)
        assert answer.status == status
        assert answer.json["error"].startswith("line 4: ")
        assert [each["offset"] for each in answer.json["stored"]] == [0, 1]
        assert connect.broker.log("t", 0).end_offset == 2


async def test_a_bad_line_of_the_first_portion_stores_nothing(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        answer = await peer.ask("POST", "/topics/t/messages", body=b'{"value":"x"}\n{"value":7}', headers=NDJSON)
        assert (answer.status, "stored" in answer.json) == (400, False)
        assert connect.broker.log("t", 0).end_offset == 0


async def test_a_line_longer_than_a_json_text_may_be_is_told_to_come_raw(a_broker):
    async with a_broker(max_json_bytes=2_000) as connect:
        peer = await connect.http()
        await make(peer)
        body = b'{"value":"%s"}\n' % (b"x" * 2_000)
        answer = await peer.ask("POST", "/topics/t/messages", body=body, headers=NDJSON)
        assert (answer.status, answer.json["code"]) == (413, "BODY_TOO_LARGE")
        assert "application/octet-stream" in answer.json["error"]


async def test_a_refusal_ends_the_connection_though_the_peer_goes_on_sending(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        head = "POST /topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-ndjson\r\n"
        await peer.stream.send_all(f"{head}content-length: {1 << 40}\r\n\r\n".encode())
        with trio.fail_after(20):
            with pytest.raises(trio.BrokenResourceError):
                while True:
                    await peer.stream.send_all(b'{"value":"%s"}\n' % (b"x" * 100_000) * 10 + b"{}\n")
            while connect.broker.metrics.connections["http"]:
                await trio.testing.wait_all_tasks_blocked(0.001)


async def test_a_raw_body_is_one_message_as_it_is(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer, partitions=3)
        body = bytes(range(256))
        path = "/topics/t/messages?partition=2&key=k%20y&headers=%7B%22a%22%3A%22b%22%7D"
        receipt = await peer.ok("POST", path, body=body, headers=RAW)
        assert (receipt["partition"], receipt["offset"], receipt["acked"]) == (2, 0, True)
        (stored,) = (await peer.ok("GET", "/topics/t/partitions/2/messages"))["messages"]
        assert (stored["key"], stored["headers"], stored["encoding"]) == ("k y", {"a": "b"}, "base64")


@pytest.mark.parametrize(
    ("query", "status"),
    [("headers=7", 400), ("headers=%7B", 400), ("partition=9", 404), ("partition=x", 400), ("acks=some", 400)],
)
async def test_a_raw_message_that_cannot_be_stored_is_refused(a_broker, query, status):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        assert (await peer.refused("POST", f"/topics/t/messages?{query}", body=b"x", headers=RAW))[0] == status


async def test_a_raw_message_over_the_largest_is_refused(a_broker):
    async with a_broker(max_message_size=10) as connect:
        peer = await connect.http()
        await make(peer)
        await peer.ok("POST", "/topics/t/messages", body=b"x" * 10, headers=RAW)
        refused = await peer.refused("POST", "/topics/t/messages", body=b"x" * 11, headers=RAW)
        assert refused == (413, "BODY_TOO_LARGE")


async def test_key_and_headers_in_the_query_belong_to_raw_bodies(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        assert (await peer.refused("POST", "/topics/t/messages?key=k", {"value": "x"}))[0] == 400


# Hostile JSON: what one decoding costs is bounded by what is counted before


def header_names(size: int) -> bytes:
    return b'{"value":"","headers":{' + b",".join(b'"%05x":""' % number for number in range(size // 11)) + b"}}"


def empty_messages(size: int) -> bytes:
    return b'{"messages":[' + b",".join([b'{"value":""}'] * (size // 13)) + b"]}"


@pytest.mark.parametrize(
    "body", [header_names(4 * MiB - 50), empty_messages(4 * MiB - 50), b'{"value":"' + b'\\"' * MiB + b'"}']
)
async def test_json_of_a_hundred_thousand_names_is_refused_before_it_is_decoded(a_broker, body):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        answer = await peer.ask("POST", "/topics/t/messages", body=body, headers={"content-type": "application/json"})
        many = body.count(b'"') - body.count(b'\\"') > 100_000
        assert answer.status == (413 if many else 200)
        assert not many or "names and texts" in answer.json["error"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (empty_messages(13 * 10_000), 200),
        (empty_messages(13 * 10_001), 413),
        (header_names(11 * 10_000), 413),
        (header_names(11 * 10_001), 400),
    ],
)
async def test_no_step_handles_more_items_than_it_may_however_many_a_json_text_holds(a_broker, body, status):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer, partitions=2)
        with pacing.counted() as step:
            answer = await peer.ask(
                "POST", "/topics/t/messages", body=body, headers={"content-type": "application/json"}
            )
        assert answer.status == status, answer.body[:300]
        assert step.most <= pacing.MOST_AT_ONCE


@pytest.mark.parametrize(
    ("line", "count", "status"), [(b"\n", 100_000, 200), (b'{"value":""}\n', 20_000, 200), (b"\n", 200_000, 413)]
)
async def test_no_step_handles_more_items_than_it_may_however_many_lines_there_are(a_broker, line, count, status):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer, partitions=2)
        with pacing.counted() as step:
            answer = await peer.ask("POST", "/topics/t/messages", body=line * count, headers=NDJSON)
        assert answer.status == status
        assert 0 < step.most <= pacing.MOST_AT_ONCE
