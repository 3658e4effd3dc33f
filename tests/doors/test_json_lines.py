"""The JSON-lines door, over real sockets: every type of request, every error, and peers of every kind."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import tracemalloc
from base64 import b64encode

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qb.core.broker.topic_registry import TopicRegistry
from qb.core.wire.errors import BadRequest
from qb.doors.json_lines.json_answers import iso_time
from qb.doors.json_lines.json_methods import ROWS
from qb.doors.json_lines.json_requests import LONG, MOST_STRINGS, type_of
from qb.doors.json_lines.line_splitter import LineSplitter
from tests.support.brokers import ROOT, BrokerProcess, free_port
from tests.support.line_peers import a_topic, converse
from tests.support.waiting import until

TIMESTAMP = re.compile(r'"timestamp":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"')


def timeless(text):
    """Return JSON with every well-formed timestamp as `"timestamp":"T"`."""
    return TIMESTAMP.sub('"timestamp":"T"', text)


# The documents


README_SESSION = [
    '{"ok":true,"data":{"topic":"events","partitions":2}}',
    '{"ok":true,"data":{"offset":0,"timestamp":"T","value":"boot","key":null,"partition":0}}',
    '{"ok":true,"data":{"offset":0,"timestamp":"T","value":"user:42","key":"user-42","partition":1}}',
    '{"ok":true,"data":{"offset":1,"timestamp":"T","value":"click","key":null,"partition":0}}',
    '{"ok":true,"data":{"records":[{"offset":0,"timestamp":"T","value":"boot","key":null},'
    '{"offset":1,"timestamp":"T","value":"click","key":null}]}}',
    '{"ok":true,"data":{"groupId":"g1"}}',
    '{"ok":true,"data":{"beginOffset":0,"endOffset":2,"size":2,"committedOffset":1,"lag":1}}',
    '{"ok":true,"data":{"topics":["events"]}}',
]


@pytest.mark.process
def test_the_readmes_session_pasted_into_nc_is_answered_exactly_so(start_broker):
    broker = start_broker(json_port=(port := free_port()))
    assert f"\nJSON lines on 127.0.0.1:{port}\n" in broker.banner
    (pasted,) = re.findall(r"^```json\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(pasted.splitlines()) == 8
    answers = converse(port, pasted.encode()).decode().splitlines()
    assert [timeless(answer) for answer in answers] == README_SESSION
    records = json.loads(answers[4])["data"]["records"]
    produced = [json.loads(answer)["data"] for answer in (answers[1], answers[3])]
    assert [{**record, "partition": 0} for record in records] == produced, "fetch shows what produce said"


async def test_the_documents_session_is_answered_exactly_so(a_broker):
    document = (ROOT / "docs/JSON_LINES.md").read_text()
    (session,) = re.findall(r"^```\n(> .*?)^```", document, re.DOTALL | re.MULTILINE)
    async with a_broker() as connect:
        peer = await connect.lines()
        for line in session.splitlines():
            if line.startswith("> "):
                await peer.send_bytes(line[2:].encode() + b"\n")
            else:
                assert timeless((await peer.receive_bytes()).decode()) == timeless(line.removeprefix("< "))


def test_the_documents_table_lists_every_type_with_its_fields_and_what_is_said_when_one_is_missing():
    document = (ROOT / "docs/JSON_LINES.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| .* \| (.*?) ?\|$", document, re.MULTILINE)
    listed = {}
    for name, fields, said in rows:
        names = [field.strip("[]").partition(" =")[0] for field in fields.split(", ") if field]
        listed[name] = ([*names, "type"], said.strip("`"))
    assert listed == {name: (list(row.fields.__struct_encode_fields__), row.missing) for name, row in ROWS.items()}


# Every type


async def test_create_topic_again_is_answered_the_same_and_with_other_partitions_is_an_error(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        for _ in range(2):
            assert await peer.data("createTopic", topic="a", partitions=3) == {"topic": "a", "partitions": 3}
        await peer.data("produce", topic="a", value="kept", partition=2)
        assert await peer.error("createTopic", topic="a", partitions=2) == "topic 'a' exists already with partitions 3"
        assert await peer.error("createTopic", topic="a") == "topic 'a' exists already with partitions 3"
        assert (await peer.data("metrics", topic="a", partition=2))["size"] == 1
        assert await peer.data("createTopic", topic="b") == {"topic": "b", "partitions": 1}
        assert "partitions must be from 1" in await peer.error("createTopic", topic="c", partitions=0)
        assert "is not a topic name" in await peer.error("createTopic", topic="../etc")
        assert await peer.data("listTopics") == {"topics": ["a", "b"]}


async def test_produce_goes_to_the_partition_asked_for_or_by_key_or_in_turn(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer, partitions=4)

        async def lands(**fields):
            return (await peer.data("produce", topic="a", value="x", **fields))["partition"]

        assert [await lands() for _ in range(5)] == [0, 1, 2, 3, 0]
        assert await lands(partition=3, key="k") == 3
        assert len({await lands(key="k") for _ in range(3)}) == 1
        assert await lands(key=None, partition=None, properties=None, encoding=None) == 1


async def test_the_time_in_the_answer_is_the_one_that_is_stored(a_broker, monkeypatch):
    monkeypatch.setattr("qb.doors.json_lines.produce_runs.now_ms", lambda: 1_767_268_800_001)
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer)
        assert (await peer.data("produce", topic="a", value="x"))["timestamp"] == "2026-01-01T12:00:00.001Z"
        (record,) = (await peer.data("fetch", topic="a", partition=0, offset=0))["records"]
        assert record["timestamp"] == "2026-01-01T12:00:00.001Z"


async def test_a_body_that_is_not_utf8_goes_in_and_comes_out_as_base64(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer)
        raw = b64encode(b"\x00\xff\xfe").decode()
        produced = await peer.data("produce", topic="a", value=raw, encoding="base64", key="k")
        assert (produced["value"], produced["encoding"], produced["key"]) == (raw, "base64", "k")
        text = await peer.data("produce", topic="a", value=b64encode("tä".encode()).decode(), encoding="base64")
        assert text["value"] == "tä"
        assert "encoding" not in text
        records = (await peer.data("fetch", topic="a", partition=0, offset=0))["records"]
        assert [{**record, "partition": 0} for record in records] == [produced, text]
        assert await peer.error("produce", topic="a", value="***", encoding="base64") == (
            "value must be base64, as encoding says"
        )
        assert "base64" in await peer.error("produce", topic="a", value="ä", encoding="base64")
        assert await peer.error("produce", topic="a", value="x", encoding="zip") == 'encoding must be "base64"'


async def test_properties_are_shown_only_if_a_message_has_some(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer)
        first = await peer.data("produce", topic="a", value="x", key="k", properties={"colour": "blue"})
        assert first["properties"] == {"colour": "blue"}
        second = await peer.data("produce", topic="a", value="x", partition=0, properties={})
        assert list(second) == ["offset", "timestamp", "value", "key", "partition"]
        records = (await peer.data("fetch", topic="a", partition=0, offset=0))["records"]
        assert [{**record, "partition": 0} for record in records] == [first, second]
        assert "'key' is reserved" in await peer.error("produce", topic="a", value="x", properties={"key": "k"})
        assert "must not hold NUL" in await peer.error("produce", topic="a", value="x", key="a\0b")
        assert await peer.error("produce", topic="a", value="x", properties={"n": 1}) == (
            "properties must be an object of strings"
        )


async def test_fetch_returns_at_most_max_and_nothing_past_the_end(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer, 150)

        async def values(offset, **fields):
            records = (await peer.data("fetch", topic="a", partition=0, offset=offset, **fields))["records"]
            assert [record["offset"] for record in records] == list(range(offset, offset + len(records)))
            return len(records)

        assert await values(0) == 100
        assert await values(100) == 50
        assert await values(10, max=10_000) == 140
        assert await values(149, max=1) == 1
        assert await values(150) == 0
        assert await values(10**12) == 0
        for bad in (0, -1, 10_001):
            refusal = await peer.error("fetch", topic="a", partition=0, offset=0, max=bad)
            assert refusal == "max must be a whole number from 1 to 10000"


async def test_fetch_waits_as_long_as_it_asks(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer)
        began = trio.current_time()
        assert await peer.data("fetch", topic="a", partition=0, offset=0, maxWaitMs=300) == {"records": []}
        assert trio.current_time() - began >= 0.3


async def test_fetch_waits_for_the_first_record(a_broker):
    async with a_broker() as connect:
        peer, publisher = await connect.lines(), await connect.lines()
        await a_topic(peer)
        await peer.send(type="fetch", topic="a", partition=0, offset=0, maxWaitMs=60_000)
        await publisher.data("produce", topic="a", value="at last")
        assert [record["value"] for record in (await peer.receive())["data"]["records"]] == ["at last"]
        assert "from 0 to 60000" in await peer.error("fetch", topic="a", partition=0, offset=0, maxWaitMs=60_001)


async def test_metrics_count_what_is_kept_and_what_a_group_has_left(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer, 5)
        uncommitted = {"beginOffset": 0, "endOffset": 5, "size": 5, "committedOffset": None, "lag": 5}
        assert await peer.data("metrics", topic="a", partition=0) == uncommitted
        assert await peer.data("metrics", topic="a", partition=0, groupId="g") == uncommitted
        assert await peer.data("commit", groupId="g", topic="a", partition=0, offset=3) == {"groupId": "g"}
        some = {**uncommitted, "committedOffset": 3, "lag": 2}
        assert await peer.data("metrics", topic="a", partition=0, groupId="g") == some
        assert await peer.data("metrics", topic="a", partition=0) == uncommitted
        assert "has no offset 6" in await peer.error("commit", groupId="g", topic="a", partition=0, offset=6)
        assert await peer.data("metrics", topic="a", partition=0, groupId="g") == some


async def test_members_share_the_partitions_and_learn_changes_by_heartbeat(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer, partitions=5)
        assert await peer.data("joinGroup", groupId="g", topic="a", consumerId="m1") == {"partitions": [0, 1, 2, 3, 4]}
        assert await peer.data("joinGroup", groupId="g", topic="a", consumerId="m2") == {"partitions": [1, 3]}
        beat = await peer.data("heartbeat", groupId="g", consumerId="m1")
        assert beat == {"groupId": "g", "partitions": [0, 2, 4]}
        assert await peer.data("joinGroup", groupId="g", topic="a", consumerId="m1") == {"partitions": [0, 2, 4]}
        assert await peer.data("leaveGroup", groupId="g", consumerId="m1") == {"groupId": "g"}
        beat = await peer.data("heartbeat", groupId="g", consumerId="m2")
        assert beat["partitions"] == [0, 1, 2, 3, 4]
        assert "is not a member" in await peer.error("heartbeat", groupId="g", consumerId="m1")
        assert "is not a member" in await peer.error("leaveGroup", groupId="g", consumerId="m1")
        await peer.data("leaveGroup", groupId="g", consumerId="m2")
        assert await peer.error("heartbeat", groupId="g", consumerId="m2") == "Group not found"
        assert await peer.error("leaveGroup", groupId="g", consumerId="m2") == "Group not found"


async def test_a_lost_connection_does_not_end_membership_but_silence_does(a_broker):
    async with a_broker() as connect:
        lost, peer = await connect.lines(), await connect.lines()
        await a_topic(lost, partitions=2)
        await lost.data("joinGroup", groupId="g", topic="a", consumerId="m", sessionTimeoutMs=1_000)
        await trio.aclose_forcefully(lost.stream)
        await until(lambda: connect.broker.connections == 1)
        heard_at = trio.current_time()
        assert (await peer.data("heartbeat", groupId="g", consumerId="m"))["partitions"] == [0, 1]
        await until(lambda: not connect.broker.groups._groups.get("g"))
        assert trio.current_time() - heard_at >= 1.0
        assert await peer.error("heartbeat", groupId="g", consumerId="m") == "Group not found"


# Every error


MISSING = {
    "auth": "Missing token",
    "createTopic": "Missing topic",
    "produce": "Missing topic or value",
    "fetch": "Missing topic/partition/offset",
    "commit": "Missing groupId/topic/partition/offset",
    "metrics": "Missing topic/partition",
    "joinGroup": "Missing groupId/topic/consumerId",
    "leaveGroup": "Missing groupId/consumerId",
    "heartbeat": "Missing groupId/consumerId",
    "createSubscription": "Missing subscription/topic",
    "subscribe": "Missing subscription",
    "unsubscribe": "Missing subscription",
    "ack": "Missing subscription/partition/offset",
    "nack": "Missing subscription/partition/offset",
}


async def test_a_required_field_that_is_absent_or_null_is_named_in_the_words_of_the_table(a_broker):
    assert {*MISSING, "listTopics"} == set(ROWS)
    async with a_broker() as connect:
        peer = await connect.lines()
        for name, text in MISSING.items():
            required = re.findall(r"[a-z]\w+", text.removeprefix("Missing").replace(" or ", " "))
            whole = {field: 0 if field in ("partition", "offset") else "x" for field in required}
            for field in required:
                without = {known: value for known, value in whole.items() if known != field}
                assert await peer.error(name, **without) == text
                assert await peer.error(name, **{**whole, field: None}) == text


WRONG = [
    ("createTopic", {"topic": 1}, "topic must be a string"),
    ("createTopic", {"topic": True}, "topic must be a string"),
    ("createTopic", {"topic": ["a"]}, "topic must be a string"),
    ("createTopic", {"topic": "x", "partitions": True}, "partitions must be a whole number"),
    ("createTopic", {"topic": "x", "partitions": 1.5}, "partitions must be a whole number"),
    ("createTopic", {"topic": "x", "partitions": "2"}, "partitions must be a whole number"),
    ("createTopic", {"topic": "x", "partitions": None}, "partitions must be a whole number"),
    ("createTopic", {"topic": "x", "partitions": 10**30}, "partitions must be a whole number"),
    ("produce", {"topic": "a", "value": 5}, "value must be a string"),
    ("produce", {"topic": "a", "value": {"a": 1}}, "value must be a string"),
    ("produce", {"topic": "a", "value": "x", "key": 7}, "key must be a string"),
    ("produce", {"topic": "a", "value": "x", "partition": "0"}, "partition must be a whole number"),
    ("produce", {"topic": "a", "value": "x", "properties": []}, "properties must be an object of strings"),
    ("fetch", {"topic": "a", "partition": False, "offset": 0}, "partition must be a whole number"),
    ("subscribe", {"subscription": "s", "autoAck": 1}, "autoAck must be true or false"),
    (
        "createSubscription",
        {"subscription": "s", "topic": "a", "startOffset": []},
        "startOffset must be an offset, earliest, latest or a time",
    ),
    (
        "metrics",
        {"topic": "a", "partiton": 0},
        "Unknown field: partiton; there are: topic, partition, groupId, type",
    ),
    ("nonsense", {}, "Unknown type: nonsense"),
    ("", {}, "Unknown type: "),
    ("x" * 1_000, {}, "Unknown type: " + "x" * 80),
    ("produce", {"topic": "no", "value": "x"}, "TopicNotFound: no"),
    ("fetch", {"topic": "no", "partition": 0, "offset": -1}, "TopicNotFound: no"),
    ("commit", {"groupId": "g", "topic": "no", "partition": 0, "offset": 0}, "TopicNotFound: no"),
    ("metrics", {"topic": "no", "partition": 0}, "TopicNotFound: no"),
    ("joinGroup", {"groupId": "g", "topic": "no", "consumerId": "c"}, "TopicNotFound: no"),
    ("createSubscription", {"subscription": "s", "topic": "no"}, "TopicNotFound: no"),
    ("produce", {"topic": "a", "value": "x", "partition": 2}, "PartitionNotFound: a/2"),
    ("produce", {"topic": "a", "value": "x", "partition": -1}, "PartitionNotFound: a/-1"),
    ("fetch", {"topic": "a", "partition": 2, "offset": 0}, "PartitionNotFound: a/2"),
    ("commit", {"groupId": "g", "topic": "a", "partition": 2, "offset": 0}, "PartitionNotFound: a/2"),
    ("metrics", {"topic": "a", "partition": 2**40}, f"PartitionNotFound: a/{2**40}"),
    ("fetch", {"topic": "a", "partition": 0, "offset": -1}, "InvalidOffset: -1"),
    ("commit", {"groupId": "g", "topic": "a", "partition": 0, "offset": -7}, "InvalidOffset: -7"),
    ("createSubscription", {"subscription": "s", "topic": "a", "startOffset": -1}, "InvalidOffset: -1"),
    ("ack", {"subscription": "s", "partition": 0, "offset": -1}, "InvalidOffset: -1"),
    ("nack", {"subscription": "s", "partition": 0, "offset": -1}, "InvalidOffset: -1"),
    (
        "ack",
        {"subscription": "s", "partition": 0, "offset": 0},
        "this connection has not joined subscription 's'",
    ),
    ("unsubscribe", {"subscription": "s"}, "this connection has not joined subscription 's'"),
]


async def test_whatever_is_wrong_with_a_request_is_said_and_the_connection_lives(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer, partitions=2)
        for name, fields, text in WRONG:
            assert await peer.error(name, **fields) == text
        assert "there is no subscription 's'" in await peer.error("subscribe", subscription="s")
        assert "session_timeout" in await peer.error(
            "joinGroup", groupId="g", topic="a", consumerId="c", sessionTimeoutMs=1
        )
        for group in ("", "a/b", "x" * 201):
            assert "is not a group name" in await peer.error("metrics", topic="a", partition=0, groupId=group)
            assert "is not a group name" in await peer.error("commit", groupId=group, topic="a", partition=0, offset=0)
        assert await peer.data("listTopics") == {"topics": ["a"]}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"hello", "Invalid JSON: invalid character (byte 0)"),
        (b'{"type":"listTopics"} {}', "Invalid JSON: trailing characters (byte 2"),
        (b'{"type":"listTopics"', "Invalid JSON: it ends too early (byte 20)"),
        (b'{"type":"listTopics","x":NaN}', "Invalid JSON: invalid character (byte 25)"),
        (b'{"type":"a\xff"}', "Invalid JSON: not UTF-8 (byte 10)"),
        (b'{"other":"\xc3"}', "Invalid JSON: not UTF-8 (byte 10)"),
        (b'{"type":"produce","topic":"a","value":"\\ud800"}', "Invalid JSON: it ends too early (byte 47)"),
        (b'{"x":' + b"[" * 100_000, "Invalid JSON: too deeply nested"),
        (b"[]", "a request must be an object"),
        (b'"listTopics"', "a request must be an object"),
        (b"7", "a request must be an object"),
        (b"null", "a request must be an object"),
        (b"{}", "Missing type"),
        (b'{"type":null}', "Missing type"),
        (b'{"type":7}', "type must be a string"),
        (b'{"type":["listTopics"]}', "type must be a string"),
    ],
)
async def test_a_line_that_is_no_request_is_answered_with_what_is_wrong_and_where(a_broker, line, text):
    async with a_broker() as connect:
        peer = await connect.lines()
        await peer.send_bytes(line + b"\n")
        assert (await peer.receive())["error"].startswith(text)
        assert await peer.data("listTopics") == {"topics": []}


@pytest.mark.parametrize("line", [b"POST /x HTTP/1.1", b"Host: 127.0.0.1:4040"])
async def test_what_a_web_page_makes_a_browser_post_is_not_carried_out(a_broker, line):
    async with a_broker() as connect:
        browser, other = await connect.lines(), await connect.lines()
        await browser.send_bytes(line + b'\r\n\r\n{"type":"createTopic","topic":"evil"}\n')
        assert await browser.receive() == {"ok": False, "error": "this door speaks JSON lines, not HTTP"}
        assert await browser.receive_bytes() is None
        assert await other.data("listTopics") == {"topics": []}


async def test_a_fault_of_ours_is_logged_answered_without_details_and_ends_that_session_alone(
    a_broker, monkeypatch, caplog
):
    async def broken(self):
        raise RuntimeError("secret")

    async with a_broker() as connect:
        peer, other = await connect.lines(), await connect.lines()
        await a_topic(other)
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(TopicRegistry, "list_all", broken)
            assert await peer.ask("listTopics") == {"ok": False, "error": "internal error"}
            assert await peer.receive_bytes() is None
        assert "secret" in caplog.text
        assert await other.data("listTopics") == {"topics": ["a"]}


# Lines


@settings(deadline=None)
@given(st.binary(max_size=60), st.lists(st.integers(1, 9)), st.integers(0, 12))
def test_lines_do_not_depend_on_how_tcp_cuts_the_bytes(data, steps, limit):
    cut, at, found = LineSplitter(limit), 0, []
    for step in [*steps, len(data)]:
        found += cut.feed(data[at : at + step])
        at += step
        assert len(cut._unfinished) <= limit, "memory is bounded"
    found += cut.finish()
    expected = data.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert found == [line if len(line) <= limit else None for line in expected]


async def test_blank_lines_are_ignored_and_crlf_is_accepted(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await peer.send_bytes(b'\n\r\n  \t \n{"type":"listTopics"}\r\n\n{"type":"nope"}\n')
        assert await peer.receive() == {"ok": True, "data": {"topics": []}}
        assert await peer.receive() == {"ok": False, "error": "Unknown type: nope"}


async def test_a_line_that_is_too_long_is_discarded_and_answered_and_the_connection_lives(a_broker):
    async with a_broker(max_message_size=1_000) as connect:
        peer = await connect.lines()
        await a_topic(peer)
        too_long = {"ok": False, "error": "Line too long: more than 66536 bytes"}
        for length in (66_537, 3_000_000):
            await peer.send_bytes(b"x" * length + b"\n")
            assert await peer.receive() == too_long
        await peer.send_bytes(b" " * 66_536 + b"\n")  # not too long, and blank
        assert "over this broker's limit of 1000" in await peer.error("produce", topic="a", value="x" * 1_001)
        assert (await peer.data("produce", topic="a", value="x" * 1_000))["offset"] == 0
        await peer.send_bytes(b"x" * 100_000)
        await peer.stream.send_eof()
        assert await peer.receive() == too_long
        assert await peer.receive_bytes() is None


async def test_pipelined_lines_are_carried_out_and_answered_in_order(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer)
        lines = [{"type": "produce", "topic": "a", "value": str(number)} for number in range(200)]
        lines[50:50] = [{"type": "nope"}]
        lines[150:150] = [{"type": "metrics", "topic": "a", "partition": 0}]
        await peer.send_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        answers = [await peer.receive() for _ in lines]
        assert answers.pop(150)["data"]["endOffset"] == 149, "what was sent before is done, and nothing after"
        assert answers.pop(50) == {"ok": False, "error": "Unknown type: nope"}
        assert [(answer["data"]["offset"], answer["data"]["value"]) for answer in answers] == [
            (number, str(number)) for number in range(200)
        ]


async def test_produces_that_arrive_together_share_a_sync_and_each_is_refused_on_its_own(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer, topic="t")
        before = sum(connect.broker.engine.measures.sync_seconds.counts)
        bad = [{"partition": 9}, {"topic": "nowhere"}, {"properties": {"topic": "x"}}, {"encoding": "base64"}, {"x": 1}]
        sent = [{"type": "produce", "topic": "t", "value": f"<{number}>"} for number in range(200)]
        for number, wrong in enumerate(bad):
            sent[number * 30 + 10] |= wrong
        with trio.fail_after(30):
            await peer.send_bytes(b"".join(json.dumps(each).encode() + b"\n" for each in sent))
            answers = [await peer.receive() for _ in sent]
        refused = [number for number, answer in enumerate(answers) if not answer["ok"]]
        assert refused == [number * 30 + 10 for number in range(len(bad))]
        stored = [answer["data"] for answer in answers if answer["ok"]]
        assert [each["offset"] for each in stored] == list(range(len(sent) - len(bad)))
        assert [each["value"] for each in stored] == [f"<{n}>" for n in range(200) if n not in refused]
        assert sum(connect.broker.engine.measures.sync_seconds.counts) - before < 100


async def test_a_peer_that_does_not_read_its_answers_is_not_read_either(a_broker):
    async with a_broker() as connect:
        peer, other = await connect.lines(), await connect.lines()
        await a_topic(peer)
        await peer.data("produce", topic="a", value="x" * 1_000_000)
        await peer.send_bytes(b'{"type":"fetch","topic":"a","partition":0,"offset":0}\n' * 100)
        await a_topic(other, 100, topic="b")  # time enough to carry out all of them
        await other.data("produce", topic="a", value="late")
        seen = [len((await peer.receive())["data"]["records"]) for _ in range(100)]
        assert seen[0] == 1
        assert seen.count(2) > 80, "nearly all were carried out after it began to read"


@pytest.mark.process
def test_everything_piped_in_is_answered_before_the_connection_closes(start_broker):
    start_broker(json_port=(port := free_port()))
    lines = [b'{"type":"createTopic","topic":"a"}']
    lines += [b'{"type":"produce","topic":"a","value":"%d"}' % number for number in range(300)]
    lines += [b'{"type":"fetch","topic":"a","partition":0,"offset":0,"max":300}'] * 50
    answers = [json.loads(line) for line in converse(port, b"\n".join(lines)).splitlines()]  # the last without its end
    assert len(answers) == len(lines)
    assert all(answer["ok"] for answer in answers)
    assert [len(answer["data"]["records"]) for answer in answers[-50:]] == [300] * 50


async def test_when_the_broker_stops_a_waiting_fetch_is_answered_and_the_connection_closed(a_broker):
    heard = []

    async def listen_on(peer):
        while (line := await peer.receive_bytes()) is not None:
            heard.append(json.loads(line))

    with trio.fail_after(8):  # less than the grace at shutdown
        async with trio.open_nursery() as nursery, a_broker() as connect:
            peer = await connect.lines()
            await a_topic(peer)
            fetch = b'{"type":"fetch","topic":"a","partition":0,"offset":0,"maxWaitMs":60000}\n'
            await peer.send_bytes(b'{"type":"listTopics"}\n' + fetch)
            assert (await peer.receive())["data"] == {"topics": ["a"]}
            nursery.start_soon(listen_on, peer)
    assert heard == [{"ok": True, "data": {"records": []}}]


async def test_the_limit_on_connections_counts_all_doors_together(a_broker):
    async with a_broker(max_connections=2) as connect:
        frames, lines = await connect(), await connect.lines()
        await lines.data("createTopic", topic="a")
        assert (await frames.publish("a")).properties["offset"] == "0"
        refused = await connect.lines()
        refusal = "this broker allows 2 connections and has them (QB_MAX_CONNECTIONS)"
        assert await refused.receive() == {"ok": False, "error": refusal}
        assert await refused.receive_bytes() is None
        await lines.stream.send_eof()
        assert await lines.receive_bytes() is None
        again = await connect.lines()
        assert await again.data("listTopics") == {"topics": ["a"]}


def test_a_time_is_shown_in_utc_to_the_millisecond_and_never_fails():
    assert iso_time(0) == "1970-01-01T00:00:00.000Z"
    assert iso_time(1_767_268_800_001) == "2026-01-01T12:00:00.001Z"
    assert iso_time(2**64 - 1) == "9999-12-31T23:59:59.999Z"


# Whatever bytes may come


VALID = [
    b'{"type":"createTopic","topic":"events","partitions":2}',
    b'{"type":"produce","topic":"events","value":"user:42","key":"user-42","properties":{"a":"b"}}',
    b'{"type":"produce","topic":"events","value":"/w==","encoding":"base64","partition":0}',
    b'{"type":"fetch","topic":"events","partition":0,"offset":0,"max":10,"maxWaitMs":0}',
    b'{"type":"commit","groupId":"g1","topic":"events","partition":0,"offset":0}',
    b'{"type":"metrics","topic":"events","partition":0,"groupId":"g1"}',
    b'{"type":"listTopics"}',
    b'{"type":"joinGroup","groupId":"g1","topic":"events","consumerId":"c"}',
    b'{"type":"heartbeat","groupId":"g1","consumerId":"c"}',
    b'{"type":"leaveGroup","groupId":"g1","consumerId":"c"}',
    b'{"type":"createSubscription","subscription":"s","topic":"events","startOffset":"latest"}',
    b'{"type":"unsubscribe","subscription":"s"}',
    b'{"type":"ack","subscription":"s","partition":0,"offset":0}',
    b'{"type":"nack","subscription":"s","partition":0,"offset":0,"reason":"r","delayMs":1}',
]


@st.composite
def mutated(draw):
    """Return a valid request with a part of it cut out or replaced."""
    line = draw(st.sampled_from(VALID))
    start = draw(st.integers(0, len(line)))
    end = draw(st.integers(start, min(start + 12, len(line))))
    other = draw(
        st.one_of(st.binary(max_size=4), st.sampled_from([b"null", b"-1", b"1e9", b'"', b"{}", b"[[", b"\\u"]))
    )
    return line[:start] + other + line[end:]


any_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def odd_values(draw):
    """Return a request of a known type whose fields hold anything."""
    request = json.loads(draw(st.sampled_from(VALID)))
    for field in draw(st.lists(st.sampled_from([*request, "max", "window"]), max_size=3)):
        if field != "maxWaitMs":
            request[field] = draw(any_values)
    return json.dumps(request, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")


lines_of_any_kind = st.one_of(
    st.binary(max_size=40), st.text(max_size=40).map(str.encode), mutated(), odd_values(), st.sampled_from(VALID)
).filter(lambda line: not re.search(rb"http/1|host:", line, re.IGNORECASE))  # HTTP ends the session by design


@pytest.fixture(scope="module")
def fuzzed_port(tmp_path_factory):
    """The JSON port of one broker for all examples."""
    port = free_port()
    broker = BrokerProcess(tmp_path_factory.mktemp("fuzzed"), json_port=port, fsync_on_write=False, max_partitions=8)
    yield port
    assert broker.stop() == 0
    assert "Traceback" not in broker.log


@pytest.mark.process
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sent=st.lists(lines_of_any_kind, max_size=8), cuts=st.lists(st.integers(1, 200), max_size=4))
def test_whatever_is_sent_each_line_gets_one_answer_and_the_session_lives(fuzzed_port, sent, cuts):
    data = b"\n".join([*sent, b'{"type":"metrics","topic":"the last one","partition":0}', b""])
    expected = sum(1 for line in data.split(b"\n") if line.strip(b" \t\r\v\f"))
    with socket.create_connection(("127.0.0.1", fuzzed_port), timeout=20) as peer, peer.makefile("rb") as answers:
        at = 0
        for cut in cuts:
            peer.sendall(data[at : at + cut])
            at += cut
        peer.sendall(data[at:])
        found = [json.loads(answers.readline()) for _ in range(expected)]
        assert all(("data" in answer) if answer["ok"] else isinstance(answer["error"], str) for answer in found)
        assert "internal error" not in [answer.get("error") for answer in found]
        assert "'the last one' is not a topic name" in found[-1]["error"]
        peer.shutdown(socket.SHUT_WR)
        assert answers.read() == b"", "not one line more than was asked for"


@pytest.mark.process
@pytest.mark.parametrize("line", VALID)
def test_a_request_cut_anywhere_by_a_vanishing_peer_disturbs_no_other(fuzzed_port, line):
    for end in range(0, len(line) + 1, 3):
        answers = converse(fuzzed_port, line[:end]).splitlines()
        assert len(answers) == (1 if end else 0)
        if 0 < end < len(line):
            assert json.loads(answers[0])["ok"] is False
    assert json.loads(converse(fuzzed_port, b'{"type":"listTopics"}\n'))["ok"] is True


# The port


@pytest.mark.process
def test_port_0_switches_the_door_off(start_broker):
    assert "JSON" not in start_broker(json_port=0).banner


@pytest.mark.process
def test_a_port_in_use_is_a_clear_error_that_says_what_to_set(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--port", "0", "--json-port", port, "--data-dir", str(tmp_path / "data")]
        ended = subprocess.run(
            [sys.executable, str(ROOT / "server.py"), *flags], capture_output=True, text=True, timeout=30
        )
    assert ended.returncode == 1
    assert ended.stderr == (
        f"qb-server: cannot listen on 127.0.0.1:{port}: something else is using it; "
        "QB_JSON_PORT chooses another port for JSON lines, 0 none\n"
    )


# Long lines


async def test_a_long_line_is_taken_only_for_a_message(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer)
        assert (await peer.data("produce", topic="a", value="x" * 2**21))["offset"] == 0
        assert await peer.error("createTopic", topic="x" * 2**20) == (
            "Line too long: a createTopic has at most 1048576 bytes"
        )
        many = {str(number): "" for number in range(100_001)}
        assert "holds at most 100000 strings" in await peer.error("produce", topic="a", value="", properties=many)
        await peer.send_bytes(b'{"type":"produce","topic":"a","value":"' + b"x" * 2**20 + b'\xff"}\n')
        assert (await peer.receive())["error"] == f"Invalid JSON: not UTF-8 (byte {39 + 2**20})"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (b'"type":"produce","topic":"a","value":[', "value must be a string"),
        (b'"type":"produce","topic":"a","more":[', "Unknown field: more"),
        (b'"type":"listTopics","of":[', "Unknown field: of"),
        (b'"of":[', "Unknown field: of"),
    ],
)
def test_what_is_no_message_is_not_skipped_in_a_long_line(fields, error):
    endless = b"{" + fields + b"1," * LONG  # if it were skipped, the error would be that it ends too early
    with pytest.raises(BadRequest, match=f"{error}.*; a line of more than {LONG} bytes is a produce"):
        type_of(endless)
    with pytest.raises(BadRequest, match="a request must be an object"):
        type_of(b"[" + b"1," * LONG)


def test_the_strings_of_a_long_line_are_counted_before_it_is_decoded():
    with pytest.raises(BadRequest, match=f"holds at most {MOST_STRINGS} strings"):
        type_of(b'{"type":"produce","properties":{' + b'"a":"",' * (LONG // 7 + MOST_STRINGS))


def test_a_flood_of_line_ends_takes_no_more_memory_than_its_bytes():
    lines = LineSplitter(100)
    tracemalloc.start()
    try:
        count = sum(1 for _ in lines.feed(b"\n" * 500_000))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert count == 500_000
