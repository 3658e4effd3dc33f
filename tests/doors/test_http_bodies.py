"""Bodies of messages over HTTP: within bounds that hold whatever is in them, and stored while they arrive."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from qb.core import pacing
from qb.doors.http.requests import line_body
from qb.doors.http.requests.body_room import BodyRoom
from qb.doors.http.requests.http_errors import HttpError
from qb.doors.http.requests.line_body import LineBody
from qb.doors.http.requests.request_bodies import BodyLimit, BodyParts

NDJSON = {"content-type": "application/x-ndjson"}
RAW = {"content-type": "application/octet-stream"}
MiB = 1 << 20


# Cutting


def cut(parts: Sequence[bytes], limit: int = 100) -> list[list[tuple[int, bytes]]]:
    """Return the portions of lines in a body that arrives in these parts."""

    async def run() -> list[Any]:
        rest = iter(parts)

        async def receive() -> tuple[bytes, bool]:
            part = next(rest, None)
            return part or b"", part is not None

        body = LineBody(BodyParts(receive, Mock()), BodyLimit(limit), BodyRoom(MiB))
        found = []
        while True:
            async with body.portion() as portion:
                if portion is None:
                    return found
                found.append(list(zip(portion.numbers, portion.texts, strict=True)))

    return trio.run(run)


@given(text=st.text("ab\n \r", max_size=60).map(str.encode), cuts=st.lists(st.integers(0, 60)))
def test_lines_do_not_depend_on_how_the_body_is_cut(text, cuts):
    borders = sorted({0, len(text), *(place for place in cuts if place < len(text))})
    parts = [text[start:end] for start, end in pairwise(borders)]
    found = [line for portion in cut(parts) for line in portion]
    assert found == [(number, line) for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]


def test_a_portion_has_a_bounded_number_of_lines_and_bytes(monkeypatch):
    monkeypatch.setattr(line_body, "PORTION_LINES", 3)
    assert [len(portion) for portion in cut([b"x\n" * 10])] == [3, 3, 3, 1]
    monkeypatch.setattr(line_body, "PORTION_BYTES", 6)
    assert [len(portion) for portion in cut([b"xxxx\n"] * 4)] == [2, 2]


@pytest.mark.parametrize("parts", [[b"x" * 101], [b"x" * 60] * 2, [b"\n", b"x" * 101 + b"\n"]])
def test_a_line_over_the_limit_is_refused_before_its_end_comes(parts):
    with pytest.raises(HttpError, match=r"line .* 100 bytes"):
        cut(parts)


def test_blank_lines_are_counted_too_and_100_000_are_allowed(monkeypatch):
    assert cut([b"\n" * 99_999 + b"x\n"])[-1] == [(100_000, b"x")]
    with pytest.raises(HttpError, match="more than 100000 lines"):
        cut([b"\n" * 100_001])


async def test_bodies_get_in_one_after_another_and_a_cancelled_one_makes_way(autojump_clock):
    room, inside = BodyRoom(10), []

    async def stay(name, size, until):
        async with room.of(size):
            inside.append(name)
            await until.wait()
            inside.remove(name)

    first, rest = trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stay, "larger than the limit", 11, first)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(1):
            await stay("cancelled", 8, rest)
        for name, size in (("a", 6), ("b", 6), ("c", 1)):
            nursery.start_soon(stay, name, size, rest)
            await trio.testing.wait_all_tasks_blocked()
        assert inside == ["larger than the limit"]
        first.set()
        await trio.testing.wait_all_tasks_blocked()
        assert inside == ["a"]  # c could get in, but b came first
        rest.set()
    async with room.of(10):
        pass


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
            while connect.broker.topics.log("t", 0).end_offset < 2:
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
        assert connect.broker.topics.log("t", 0).end_offset == 2


async def test_a_bad_line_of_the_first_portion_stores_nothing(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        answer = await peer.ask("POST", "/topics/t/messages", body=b'{"value":"x"}\n{"value":7}', headers=NDJSON)
        assert (answer.status, "stored" in answer.json) == (400, False)
        assert connect.broker.topics.log("t", 0).end_offset == 0


async def test_a_line_longer_than_a_json_text_may_be_is_advised_to_come_raw(a_broker):
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


# Unfinished requests share the budget of all peers


HEAD = "POST /topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: {}\r\ncontent-length: {}\r\n\r\n"


async def begin(connect, kind: str, size: int, sent: bytes):
    """Send the beginning of a request."""
    peer = await connect.http()
    await peer.stream.send_all(HEAD.format(kind, size).encode() + sent)
    await trio.testing.wait_all_tasks_blocked(0.01)  # until it is read
    return peer


@pytest.mark.parametrize("kind", ["application/json", "application/x-ndjson", "application/octet-stream"])
async def test_the_request_that_has_waited_longest_makes_way_when_the_budget_is_spent(a_broker, kind):
    async with a_broker(max_unfinished_bytes=MiB) as connect:
        await make(await connect.http())
        first = await begin(connect, kind, 2 * MiB, b"x" * (MiB // 2))
        second = await begin(connect, kind, 2 * MiB, b"x" * (MiB * 3 // 4))
        with trio.fail_after(10):
            answer = await first.stream.receive_some()
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"QB_MAX_UNFINISHED_BYTES" in answer
            assert await first.stream.receive_some() == b""
            await second.stream.send_all(b"x" * (2 * MiB - MiB * 3 // 4))
            assert (await second.stream.receive_some()).startswith(b"HTTP/1.1 ")


async def test_a_finished_request_is_not_counted_any_more(a_broker):
    async with a_broker(max_unfinished_bytes=MiB) as connect:
        peer = await connect.http()
        await make(peer)
        for _ in range(3):
            await peer.ok("POST", "/topics/t/messages", {"value": "x" * (MiB // 2)})
            await peer.ask("GET", "/nowhere")
        other = await begin(connect, "application/json", MiB, b"x" * (MiB // 2))
        await peer.ok("GET", "/health")
        other.vanish()


async def test_a_long_stream_of_lines_counts_only_with_what_is_not_a_line_yet(a_broker):
    async with a_broker(max_unfinished_bytes=2 * MiB) as connect:
        peer = await connect.http()
        await make(peer)
        body = b'{"value":"%s"}\n' % (b"x" * 1_000) * 8_000
        answer = await peer.ask("POST", "/topics/t/messages", body=body, headers=NDJSON)
        assert answer.status == 200
        assert len(answer.json["messages"]) == 8_000


async def test_a_request_that_is_not_finished_in_time_is_refused(a_broker):
    async with a_broker(frame_deadline=0.2) as connect:
        await make(await connect.http())
        peer = await begin(connect, "application/json", 100, b"x")
        with trio.fail_after(10):
            answer = await peer.stream.receive_some()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"QB_FRAME_DEADLINE" in answer


async def test_health_is_answered_while_others_hold_all_that_may_be_held(a_broker):
    async with a_broker(max_unfinished_bytes=MiB, max_connections=20) as connect:
        await make(await connect.http())
        for _ in range(30):
            await begin(connect, "application/json", 2 * MiB, b"x" * 60_000)
        peer = await connect.http()
        assert await peer.ok("GET", "/health") == {"status": "healthy"}
