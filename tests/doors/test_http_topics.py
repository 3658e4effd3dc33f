"""Topics and messages over HTTP: every route, what it answers and each of its refusals, over real sockets."""

from __future__ import annotations

import errno
import json
from base64 import b64encode

import pytest
import trio

from qb.core.wire.frames import MessageType, data_frames
from qb.storage.log.segment import Segment

FIRST = "/topics/t/partitions/0"


async def make(peer, name="t", partitions=1, **more):
    return await peer.ok("POST", "/topics", {"name": name, "partitions": partitions, **more}, 201)


async def test_a_topic_is_made_listed_described_and_deleted(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        made = await peer.ok("POST", "/topics", {"name": "orders"}, 201)
        assert (made["name"], made["partitions"], made["messages"]) == ("orders", 1, 0)
        assert (made["retention_seconds"], made["retention_bytes"]) == (None, None)
        assert await peer.ok("GET", "/topics") == {"topics": [made]}
        described = await peer.ok("GET", "/topics/orders")
        assert described["topic"] == made
        assert [each["partition"] for each in described["partitions"]] == [0]
        assert described["partitions"][0]["status"] == "ok"
        assert await peer.ok("DELETE", "/topics/orders") == {"deleted": True}
        assert await peer.ok("GET", "/topics") == {"topics": []}


async def test_a_topic_has_what_it_was_asked_to_have(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        wanted = {"partitions": 2, "retention_seconds": 60, "retention_bytes": 4096, "replication_factor": 1}
        made = await make(peer, **wanted)
        assert {name: made[name] for name in wanted} == wanted
        (other,) = await (await connect()).call("list_topics")
        assert (other["partitions"], other["retention_bytes"]) == (2, 4096)
        assert other["retention_hours"] * 3600 == pytest.approx(60)


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ({}, (400, "BAD_REQUEST")),
        ({"name": ""}, (400, "BAD_REQUEST")),
        ({"name": "a/b"}, (400, "BAD_NAME")),
        ({"name": "a", "partitions": 0}, (400, "BAD_REQUEST")),
        ({"name": "a", "partitions": "4"}, (400, "BAD_REQUEST")),
        ({"name": "a", "partitions": 100_000}, (400, "BAD_REQUEST")),
        ({"name": "a", "retention_seconds": -1}, (400, "BAD_REQUEST")),
        ({"name": "a", "replication_factor": 3}, (400, "BAD_REQUEST")),
        ({"name": "a", "colour": "red"}, (400, "BAD_REQUEST")),
        ({"name": "taken"}, (409, "TOPIC_EXISTS")),
    ],
)
async def test_a_topic_that_cannot_be_is_refused(a_broker, body, refusal):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer, "taken")
        assert await peer.refused("POST", "/topics", body) == refusal
        assert [topic["name"] for topic in (await peer.ok("GET", "/topics"))["topics"]] == ["taken"]


async def test_a_missing_name_is_said_to_be_missing(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        assert (await peer.ask("POST", "/topics", {"partitions": 1})).json["error"] == "Missing topic name"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/topics/t", None),
        ("DELETE", "/topics/t", None),
        ("POST", "/topics/t/messages", {"value": "x"}),
        ("GET", f"{FIRST}/messages", None),
        ("GET", f"{FIRST}/offsets", None),
        ("GET", "/topics/t/tail", None),
    ],
)
async def test_an_unknown_topic_is_not_found(a_broker, method, path, body):
    async with a_broker() as connect:
        peer = await connect.http()
        given = {} if body is None else {"data": body}
        assert await peer.refused(method, path, **given) == (404, "UNKNOWN_TOPIC")


async def test_a_topic_in_use_is_deleted_unless_only_an_unused_one_is_to_be(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        await peer.ok("POST", "/subscriptions", {"subscription_id": "s", "topic": "t"}, 201)
        assert await peer.refused("DELETE", "/topics/t?if_unused=true") == (409, "TOPIC_IN_USE")
        await peer.ok("DELETE", "/topics/t")
        assert (await peer.ok("GET", "/subscriptions"))["subscriptions"] == []


# Publishing


async def test_one_message_is_answered_with_where_it_is_and_reads_back_the_same(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer, partitions=2)
        sent = {"value": "hello", "key": "k", "headers": {"trace": "7"}, "partition": 1}
        receipt = await peer.ok("POST", "/topics/t/messages", sent)
        assert (receipt["id"], receipt["acked"]) == ("t/1/0", True)
        (message,) = (await peer.ok("GET", "/topics/t/partitions/1/messages"))["messages"]
        assert message == {
            "id": "t/1/0",
            "topic": "t",
            "partition": 1,
            "offset": 0,
            "key": "k",
            "value": "hello",
            "headers": {"trace": "7"},
            "timestamp": receipt["timestamp"],
        }


async def test_a_body_that_is_not_utf_8_comes_and_goes_as_base64(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        value = b64encode(b"\xff\x00").decode()
        await peer.ok("POST", "/topics/t/messages", {"value": value, "encoding": "base64"})
        await peer.ok("POST", "/topics/t/messages", {"value": b64encode(b"text").decode(), "encoding": "base64"})
        binary, text = (await peer.ok("GET", f"{FIRST}/messages"))["messages"]
        assert (binary["value"], binary["encoding"]) == (value, "base64")
        assert text["value"] == "text"
        assert "encoding" not in text


async def test_a_list_of_messages_is_answered_with_a_list_in_its_order(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer, partitions=3)
        messages = [{"value": f"{number}", "key": f"k{number % 5}"} for number in range(50)]
        receipts = (await peer.ok("POST", "/topics/t/messages", {"messages": messages}))["messages"]
        assert all(receipt["acked"] for receipt in receipts)
        stored = {}
        for partition in range(3):
            for message in (await peer.ok("GET", f"/topics/t/partitions/{partition}/messages"))["messages"]:
                stored[message["id"]] = message["value"]
        assert [stored[receipt["id"]] for receipt in receipts] == [message["value"] for message in messages]


async def test_messages_of_one_batch_are_one_commit_a_partition(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer, partitions=2)
        commits = connect.broker.engine.measures.commit_messages
        await peer.ok("POST", "/topics/t/messages", {"messages": [{"value": "x"}] * 1_000})
        assert sum(commits.counts) == 2
        assert commits.total == 1_000


async def test_lines_of_json_are_messages(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        lines = b'{"value":"one","key":"a"}\r\n\n{"value":"two"}'
        headers = {"content-type": "application/x-ndjson"}
        answer = await peer.ok("POST", "/topics/t/messages", body=lines, headers=headers)
        assert [receipt["offset"] for receipt in answer["messages"]] == [0, 1]
        found = (await peer.ok("GET", f"{FIRST}/messages"))["messages"]
        assert [(message["value"], message["key"]) for message in found] == [("one", "a"), ("two", None)]


async def test_a_bad_line_is_named_and_nothing_is_kept(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        headers = {"content-type": "application/x-ndjson"}
        answer = await peer.ask("POST", "/topics/t/messages", body=b'{"value":"one"}\n{"value":2}\n', headers=headers)
        assert answer.status == 400
        assert answer.json["error"].startswith("line 2: ")
        assert (await peer.ok("GET", f"{FIRST}/offsets"))["high_watermark"] == 0


async def test_without_acks_the_answer_promises_nothing_and_the_message_is_stored_even_so(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        receipt = await peer.ok("POST", "/topics/t/messages", {"value": "x", "acks": "none"}, 202)
        assert (receipt["offset"], receipt["acked"]) == (0, False)
        (message,) = (await peer.ok("GET", f"{FIRST}/messages?max_wait_ms=5000"))["messages"]
        assert (message["value"], message["timestamp"]) == ("x", receipt["timestamp"])


@pytest.mark.parametrize("acks", ["leader", "all"])
async def test_with_acks_the_message_is_durable_when_it_is_answered(a_broker, acks):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        assert (await peer.ok("POST", "/topics/t/messages", {"value": "x", "acks": acks}))["acked"] is True
        assert connect.broker.topics.log("t", 0).end_offset == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"value": 7}, 400),
        ({"value": {"a": 1}}, 400),
        ({"value": None}, 400),
        ({"value": "x", "messages": []}, 400),
        ({"messages": [], "key": "k"}, 400),
        ({"messages": {}}, 400),
        ({"messages": [{"value": "x", "acks": "all"}]}, 400),
        ({"value": "x", "headers": {"a": 1}}, 400),
        ({"value": "x", "headers": {"topic": "other"}}, 400),
        ({"value": "x", "headers": {"a=b": "c"}}, 400),
        ({"value": "x", "key": "a\0b"}, 400),
        ({"value": "x", "acks": "some"}, 400),
        ({"value": "x", "encoding": "rot13"}, 400),
        ({"value": "not base64!", "encoding": "base64"}, 400),
        ({"value": "x", "partition": -1}, 400),
        ({"value": "x", "partition": "0"}, 400),
        ({"value": "x", "colour": 1}, 400),
        ({"value": "x", "partition": 1}, 404),
        ({"messages": [{"value": "x"}, {"value": "x", "partition": 9}]}, 404),
        ({"value": "x" * 2_000}, 413),
        ({"messages": [{"value": "ok"}, {"value": "x" * 2_000}]}, 413),
        ([], 400),
        ("x", 400),
    ],
)
async def test_a_message_that_cannot_be_stored_is_refused_and_nothing_is_kept(a_broker, body, status):
    async with a_broker(max_message_size=1_000) as connect:
        peer = await connect.http()
        await make(peer)
        assert (await peer.refused("POST", "/topics/t/messages", body))[0] == status
        assert (await peer.ok("GET", f"{FIRST}/offsets"))["high_watermark"] == 0


async def test_the_message_at_fault_is_named(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        messages = [{"value": "x"}, {"value": "x", "partition": 9}]
        answer = await peer.ask("POST", "/topics/t/messages", {"messages": messages})
        assert answer.json["error"].startswith("messages[1]: topic 't' has no partition 9")


async def test_an_empty_list_stores_nothing(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        assert await peer.ok("POST", "/topics/t/messages", {"messages": []}) == {"messages": []}


async def test_a_body_over_the_limit_is_refused_whether_it_says_so_or_not(a_broker):
    async with a_broker(max_json_bytes=1 << 20) as connect:
        peer = await connect.http()
        await make(peer)
        limit = 1 << 20
        too_long = b'{"value":"' + b"x" * limit + b'"}'
        headers = {"content-type": "application/json"}
        answer = await peer.ask("POST", "/topics/t/messages", body=too_long, headers=headers)
        assert (answer.status, answer.json["code"]) == (413, "BODY_TOO_LARGE")
        assert "application/octet-stream" in answer.json["error"]
        assert "application/x-ndjson" in answer.json["error"]
        chunked = await connect.http()
        head = "POST /topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        await chunked.stream.send_all(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        received = trio.Event()

        async def send():
            try:
                while not received.is_set():
                    await chunked.stream.send_all(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            assert (await chunked.stream.receive_some()).startswith(b"HTTP/1.1 413 ")
            received.set()
            nursery.cancel_scope.cancel()


async def test_a_large_batch_is_stored_whole(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer, partitions=2)
        lines = b"".join(b'{"value":"%d"}\n' % number for number in range(60_000))
        headers = {"content-type": "application/x-ndjson"}
        receipts = (await peer.ok("POST", "/topics/t/messages", body=lines, headers=headers))["messages"]
        assert len({receipt["id"] for receipt in receipts}) == 60_000
        assert (await peer.ok("GET", "/topics/t"))["topic"]["messages"] == 60_000


async def test_more_messages_than_a_request_may_have_are_refused(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        headers = {"content-type": "application/x-ndjson"}
        lines = b'{"value":""}\n' * 100_001
        assert (await peer.refused("POST", "/topics/t/messages", body=lines, headers=headers))[0] == 413


# Reading


async def test_messages_are_read_from_an_offset_a_word_or_a_time(a_broker):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        for number in range(3):
            await peer.ok("POST", "/topics/t/messages", {"value": str(number)})

        async def values(query):
            return [each["value"] for each in (await peer.ok("GET", f"{FIRST}/messages?{query}"))["messages"]]

        assert await values("") == ["0", "1", "2"]
        assert await values("offset=1") == ["1", "2"]
        assert await values("offset=1&max_records=1") == ["1"]
        assert await values("offset=earliest") == ["0", "1", "2"]
        assert await values("offset=latest") == []
        assert await values("offset=3") == []
        assert await values(f"offset={2**63 - 1}") == []
        assert await values("offset=2020-01-01T00:00:00Z") == ["0", "1", "2"]
        assert await values("offset=2999-01-01T00:00:00Z") == []


async def test_a_reader_waits_for_the_message_that_it_wants(a_broker):
    async with a_broker() as connect:
        reader, writer = await connect.http(), await connect.http()
        await make(reader)
        await reader.send("GET", f"{FIRST}/messages?max_wait_ms=60000")
        await writer.ok("POST", "/topics/t/messages", {"value": "at last"})
        answer = await reader.finish()
        assert answer.json["messages"][0]["value"] == "at last"


async def test_what_retention_has_dropped_is_out_of_range_and_the_first_offset_is_named(a_broker):
    async with a_broker({"segment_bytes": 1024}) as connect:
        peer = await connect.http()
        await make(peer)
        for _ in range(5):
            await peer.ok("POST", "/topics/t/messages", {"value": "x" * 500})
        connect.broker.topics.log("t", 0).drop_first(1)  # as retention does
        answer = await peer.ask("GET", f"{FIRST}/messages?offset=0")
        assert (answer.status, answer.json["code"]) == (416, "OFFSET_OUT_OF_RANGE")
        first = answer.json["first_offset"]
        assert first > 0
        assert (await peer.ok("GET", f"{FIRST}/messages?offset={first}"))["messages"][0]["offset"] == first
        assert (await peer.ok("GET", f"{FIRST}/offsets"))["low_watermark"] == first


@pytest.mark.parametrize("partition", ["1", "-1", "x", "0.5", "99999999999999999999", "%C3%A9"])
async def test_an_unknown_partition_is_not_found(a_broker, partition):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        for route in ("messages", "offsets"):
            path = f"/topics/t/partitions/{partition}/{route}"
            assert await peer.refused("GET", path) == (404, "UNKNOWN_PARTITION")
        assert (await peer.refused("GET", "/topics/t/tail?partition=7"))[0] == 404


@pytest.mark.parametrize(
    "query",
    [
        "offset=-1",
        "offset=yesterday",
        "max_records=0",
        "max_records=10001",
        "max_records=x",
        "max_wait_ms=60001",
        "ofset=1",
        "&".join(f"a{number}=1" for number in range(200)),
    ],
)
async def test_a_query_that_makes_no_sense_is_refused(a_broker, query):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        assert await peer.refused("GET", f"{FIRST}/messages?{query}") == (400, "BAD_REQUEST")


# Tail


async def test_a_tail_shows_what_comes_and_can_go_on_where_it_stopped(a_broker):
    async with a_broker() as connect:
        writer, reader = await connect.http(), await connect.http()
        await make(writer, partitions=2)
        await writer.ok("POST", "/topics/t/messages", {"value": "before", "partition": 1})
        joined = await reader.open_stream("/topics/t/tail")
        assert joined == {"topic": "t", "next_offsets": {"0": 0, "1": 1}}
        for value in ("one", "two"):
            await writer.ok("POST", "/topics/t/messages", {"value": value, "partition": 1})
        first, second = await reader.event(), await reader.event()
        assert [(each.id, each.data["value"]) for each in (first, second)] == [("1:1", "one"), ("1:2", "two")]
        again = await connect.http()
        await again.open_stream("/topics/t/tail?partition=1", last_event_id=first.id)
        assert (await again.event()).id == "1:2"


async def test_a_tail_from_the_earliest_shows_everything_of_every_partition(a_broker):
    async with a_broker() as connect:
        writer, reader = await connect.http(), await connect.http()
        await make(writer, partitions=2)
        messages = [{"value": str(number)} for number in range(250)]
        await writer.ok("POST", "/topics/t/messages", {"messages": messages})
        await reader.open_stream("/topics/t/tail?offset=earliest")
        seen = [await reader.event() for _ in messages]
        assert sorted(int(each.data["value"]) for each in seen) == list(range(250))
        for partition in ("0", "1"):
            ids = [each.id for each in seen if each.id.startswith(partition)]
            assert ids == [f"{partition}:{offset}" for offset in range(125)]


async def test_a_tail_ends_with_its_topic(a_broker):
    async with a_broker(shutdown_grace=0.1) as connect:
        writer, reader = await connect.http(), await connect.http()
        await make(writer)
        await reader.open_stream("/topics/t/tail")
        await writer.ok("DELETE", "/topics/t")
        assert (await reader.event()).name == "end"


# Other doors


async def test_what_goes_in_here_comes_out_of_the_other_doors_and_the_other_way_round(a_broker):
    bodies = [b"plain", b"", "Tränen, 涙".encode(), b"\xff\xfe\x00", b'{"a":1}\n']
    async with a_broker() as connect:
        http, frames, lines = await connect.http(), await connect(), await connect.lines()
        await make(http)
        for body in bodies:
            value = {"value": b64encode(body).decode(), "encoding": "base64"}
            await http.ok("POST", "/topics/t/messages", {**value, "key": "k", "headers": {"h": "v"}})
            await frames.publish("t", body, key="k", h="v")
            await lines.data("produce", topic="t", key="k", properties={"h": "v"}, **value)
        stored = list(data_frames((await frames.ask(MessageType.FETCH, topic="t", offset="0")).body))
        by_http = (await http.ok("GET", f"{FIRST}/messages"))["messages"]
        by_lines = (await lines.data("fetch", topic="t", partition=0, offset=0))["records"]
        assert [frame.body for frame in stored] == [body for body in bodies for _ in range(3)]
        for frame, shown, record in zip(stored, by_http, by_lines, strict=True):
            assert (frame.properties["key"], frame.properties["h"]) == ("k", "v")
            assert (shown["key"], shown["headers"]) == ("k", {"h": "v"})
            for field in ("offset", "timestamp", "value", "key"):
                assert shown[field] == record[field]
            assert shown.get("encoding") == record.get("encoding")
            assert json.dumps(shown)


# A disk that is full


def fill_disk(monkeypatch, *partitions):
    """Let writes to these partitions fail for want of room."""
    write = Segment.write

    def failing(segment, data, position, *, sync):
        if segment.directory.name in partitions:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(segment, data, position, sync=sync)

    monkeypatch.setattr(Segment, "write", failing)


async def test_a_full_disk_is_507_and_publishing_resumes_when_there_is_room(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer)
        with monkeypatch.context() as full:
            fill_disk(full, "0")
            assert await peer.refused("POST", "/topics/t/messages", {"value": "x"}) == (507, "DISK_FULL")
            batch = {"messages": [{"value": "x"}] * 3}
            assert await peer.refused("POST", "/topics/t/messages", batch) == (507, "DISK_FULL")
        assert (await peer.ok("POST", "/topics/t/messages", {"value": "x"}))["offset"] == 0


async def test_a_batch_that_was_stored_in_part_says_which_part(a_broker, monkeypatch):
    async with a_broker() as connect:
        peer = await connect.http()
        await make(peer, partitions=2)
        fill_disk(monkeypatch, "1")
        messages = [{"value": str(number), "partition": number % 2} for number in range(4)]
        answer = await peer.ask("POST", "/topics/t/messages", {"messages": messages})
        assert (answer.status, answer.json["code"]) == (507, "DISK_FULL")
        assert [receipt["id"] for receipt in answer.json["stored"]] == ["t/0/0", "t/0/1"]
