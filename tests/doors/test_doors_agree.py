"""A message published through any door is read identically through all of them, pulled or pushed."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from datetime import datetime
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import pytest

from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.publish_frames import form_of
from qb.core.rights.needs import Thing
from qb.core.rights.principals import Verb
from qb.core.wire.compression.compressed_frames import compress
from qb.core.wire.frames import Frame, data_frames, encode_frame, encode_properties
from qb.core.wire.frames import MessageType as T
from qb.core.wire.message_rules import LATEST_MS
from qb.core.wire.runs.publish_table import LEAST
from qb.doors.binary.frame_requests import NEEDS
from qb.doors.binary.methods import METHODS
from qb.doors.http.http_app import ROWS as ROUTES
from qb.doors.http.requests.request_bodies import RAW
from qb.doors.json_lines.json_methods import ROWS as LINES
from tests.support.publish_runs import run_of


class Message(NamedTuple):
    """What a publisher gives."""

    body: bytes
    key: str | None = None
    properties: Mapping[str, str] = MappingProxyType({})
    partition: int | None = None


class Read(NamedTuple):
    """What a reader sees."""

    partition: int
    offset: int
    timestamp_ms: int
    key: str | None
    body: bytes
    properties: dict[str, str]


PARTITIONS = 2
MESSAGES = [
    Message(b"plain"),
    Message(b""),
    Message("Tränen, 涙, 😢".encode(), key="ключ"),
    Message(b'{"json": "in a string\\n"}\r\n', key=""),
    Message(b"\x00\x01\xfe\xff", key="bytes"),
    Message(b"nul \x00 and \xe2\x80\xa8", properties={"colour": "blue", "empty": "", "odd": "a=b\n"}),
    Message(b"there", key="k", partition=1, properties={"trace-id": "7"}),
    Message(Random(4).randbytes(100_000), partition=0),
    Message("x".encode("utf-16"), key="utf-16"),
]


def ms_of(iso: str) -> int:
    assert iso.endswith("Z")
    return round(datetime.fromisoformat(iso).timestamp() * 1000)


def own(properties: dict[str, str]) -> dict[str, str]:
    """Return the publisher's own properties; the rest says where the message is, which each door does its way."""
    return {k: v for k, v in properties.items() if k not in ("topic", "partition", "key", "subscription_id")}


def from_frame(frame: Frame, partition: int) -> Read:
    where = frame.sequence_number, frame.timestamp
    return Read(partition, *where, frame.properties.get("key"), frame.body, own(frame.properties))


def from_json(record: dict, partition: int) -> Read:
    value, encoding = record["value"], record.get("encoding")
    body = b64decode(value) if encoding == "base64" else value.encode()
    when = ms_of(record["timestamp"])
    return Read(partition, record["offset"], when, record["key"], body, record.get("properties", {}))


# Publishing through a door: returns (partition, offset) of each message.


async def publish_frames(connect):
    peer = await connect()
    positions = []
    for number, message in enumerate(MESSAGES):
        properties = {"topic": "a", **message.properties}
        if message.key is not None:
            properties["key"] = message.key
        if message.partition is not None:
            properties["partition"] = str(message.partition)
        stamp = 1_767_268_800_001 + number
        await peer.stream.send_all(encode_frame(T.PUBLISH, number, stamp, properties, message.body))
        answer = (await peer.receive()).properties
        positions.append((int(answer["partition"]), int(answer["offset"])))
    return positions


async def publish_lines(connect):
    peer = await connect.lines()
    positions = []
    for message in MESSAGES:
        fields = {"key": message.key, "properties": dict(message.properties), "partition": message.partition}
        try:
            fields["value"] = message.body.decode()
        except UnicodeDecodeError:
            fields |= {"value": b64encode(message.body).decode(), "encoding": "base64"}
        answer = await peer.data("produce", topic="a", **fields)
        positions.append((answer["partition"], answer["offset"]))
    return positions


# Reading through a door: returns every message, sorted.


async def pull_frames(connect, partitions=PARTITIONS):
    peer, found = await connect(), []
    for partition in range(partitions):
        answer = await peer.ask(T.FETCH, 1, topic="a", partition=str(partition), offset="0")
        found += [from_frame(frame, partition) for frame in data_frames(answer.body)]
    return sorted(found)


async def pull_lines(connect):
    peer, found = await connect.lines(), []
    for partition in range(PARTITIONS):
        answer = await peer.data("fetch", topic="a", partition=partition, offset=0)
        found += [from_json(record, partition) for record in answer["records"]]
    return sorted(found)


async def push_basic(connect):
    peer = await connect()
    await peer.ask(T.CREATE_SUBSCRIPTION, 1, subscription_id="basic", topic="a")
    await peer.ask(T.SUBSCRIBE, 2, subscription_id="basic")
    frames = [await peer.receive() for _ in MESSAGES]
    return sorted(from_frame(frame, int(frame.properties["partition"])) for frame in frames)


async def push_fast(connect):
    peer, found = await connect(), []
    await peer.ask(T.HELLO, 1, protocol="1")
    await peer.ask(T.CREATE_SUBSCRIPTION, 2, subscription_id="fast", topic="a")
    await peer.ask(T.SUBSCRIBE, 3, subscription_id="fast")
    while len(found) < len(MESSAGES):
        deliver = await peer.receive()
        partition = int(deliver.properties["partition"])
        found += [from_frame(frame, partition) for frame in data_frames(deliver.body)]
    return sorted(found)


async def push_lines(connect):
    peer = await connect.lines()
    await peer.data("createSubscription", subscription="lines", topic="a")
    await peer.data("subscribe", subscription="lines")
    pushed = [await peer.message() for _ in MESSAGES]
    return sorted(from_json(message, message["partition"]) for message in pushed)


READERS = [pull_frames, pull_lines, push_basic, push_fast, push_lines]


@pytest.mark.parametrize("publish", [publish_frames, publish_lines])
async def test_what_goes_in_by_one_door_comes_out_the_same_by_all(a_broker, publish):
    async with a_broker() as connect:
        await (await connect.lines()).data("createTopic", topic="a", partitions=PARTITIONS)
        positions = await publish(connect)
        seen = {reader.__name__: await reader(connect) for reader in READERS}
    expected = sorted(
        (partition, offset, message.key, message.body, message.properties)
        for (partition, offset), message in zip(positions, MESSAGES, strict=True)
    )
    for reader, found in seen.items():
        assert [(one.partition, one.offset, one.key, one.body, one.properties) for one in found] == expected, reader
        assert found == seen["pull_frames"], f"{reader}: the time too"


async def test_both_doors_choose_the_same_partition_for_a_key(a_broker):
    async with a_broker() as connect:
        lines, frames = await connect.lines(), await connect()
        await lines.data("createTopic", topic="a", partitions=7)
        for key in ("", "a", "user-42", "ключ", "😢"):
            by_lines = (await lines.data("produce", topic="a", value="x", key=key))["partition"]
            by_frames = (await frames.publish("a", key=key)).properties["partition"]
            assert str(by_lines) == by_frames


@pytest.mark.parametrize("time_ms", [LATEST_MS + 1, 2**53 + 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 99, 199])
async def test_no_frame_takes_a_time_beyond_the_year_9999_wherever_it_stands_in_a_run(a_broker, time_ms, position):
    words = f"timestamp {time_ms} is not from 0 to {LATEST_MS}: give milliseconds since 1970, up to the year 9999"
    times = [1_767_268_800_000] * 200
    times[position] = time_ms
    async with a_broker() as connect:
        peer = await connect()
        await peer.call("create_topic", topic="a")
        stage = (await peer.call("begin_transaction", transaction="x"))["stage"]
        staged = b"".join(encode_frame(T.DATA, 0, each, {"topic": "a"}, b"x") for each in times)
        refused = await peer.ask(T.STAGE, 1, staged, stage=stage, topic="a", partition="0", first="0")
        assert words in refused.properties["error"]
        sent = [encode_frame(T.PUBLISH, number, each, {"topic": "a"}, b"x") for number, each in enumerate(times)]
        await peer.stream.send_all(b"".join(sent))
        answers = [await peer.receive() for _ in times]
        assert [answer.properties.get("error") for answer in answers if answer.sequence_number == position] == [words]
        assert sum(answer.properties["status"] == "success" for answer in answers) == 199
        with pytest.raises(QBError, match=words):
            form_of("a", None, None, {}, time_ms)


async def test_the_last_time_that_there_is_is_shown_the_same_by_all_doors(a_broker):
    async with a_broker() as connect:
        lines, frames = await connect.lines(), await connect()
        await lines.data("createTopic", topic="a")
        await frames.stream.send_all(encode_frame(T.PUBLISH, 1, LATEST_MS, {"topic": "a"}, b"x"))
        assert (await frames.receive()).properties["status"] == "success"
        (record,) = (await lines.data("fetch", topic="a", partition=0, offset=0))["records"]
        assert record["timestamp"] == "9999-12-31T23:59:59.999Z"
        assert [one.timestamp_ms for one in await pull_frames(connect, 1)] == [LATEST_MS]


async def test_groups_are_the_same_through_both_doors(a_broker):
    async with a_broker() as connect:
        lines, frames = await connect.lines(), await connect()
        await lines.data("createTopic", topic="a", partitions=2)
        await lines.data("produce", topic="a", value="x", partition=0)
        await lines.data("commit", groupId="g", topic="a", partition=0, offset=1)
        (committed,) = await frames.call("committed_offsets", group="g")
        assert (committed["topic"], committed["partition"], committed["offset"]) == ("a", 0, 1)
        await frames.call("commit_offsets", group="g", offsets=[["a", 0, 0]])
        assert (await lines.data("metrics", topic="a", partition=0, groupId="g"))["committedOffset"] == 0
        await lines.data("joinGroup", groupId="g", topic="a", consumerId="m")
        (member,) = (await frames.call("describe_group", group="g"))["members"]
        assert (member["member"], member["partitions"]) == ("m", [["a", 0], ["a", 1]])


@pytest.mark.parametrize(
    ("body", "properties", "words"),
    [
        ("x" * 1_001, {}, "a body of 1001 bytes is over this broker's limit of 1000"),
        ("x", {"note": "x" * 65_530}, "properties of 65544 bytes are over this broker's limit of 65536"),
    ],
    ids=["body", "properties"],
)
async def test_every_door_says_which_part_of_a_message_is_too_large_and_what_its_limit_is(
    a_broker, body, properties, words
):
    async with a_broker(max_message_size=1_000) as connect:
        frames, lines, http = await connect(), await connect.lines(), await connect.http()
        await lines.data("createTopic", topic="a")
        assert (await frames.publish("a", body.encode(), **properties)).properties["error"] == words
        assert await lines.error("produce", topic="a", value=body, properties=properties) == words
        answer = await http.ask("POST", "/topics/a/messages", {"value": body, "headers": properties})
        assert (answer.status, answer.json["error"]) == (413, words)


# Rules of a message that hold for every way in. Each returns the text of the refusal, or None.


async def refused_frame(connect, topic, properties, body=b"x"):
    answer = (await (await connect()).publish(topic, body, **properties)).properties
    return answer.get("error")


async def refused_stage(connect, topic, properties, body=b"x"):
    peer = await connect()
    stage = (await peer.call("begin_transaction", transaction="x"))["stage"]
    message = encode_frame(T.DATA, 0, 5, {"topic": topic, **properties}, body)
    answer = await peer.ask(T.STAGE, 1, message, stage=stage, topic=topic, partition="0", first="0")
    return answer.properties.get("error")


async def refused_line(connect, topic, properties, body=b"x"):
    peer = await connect.lines()
    answer = await peer.ask("produce", topic=topic, value=body.decode(), properties=properties)
    return answer.get("error")


async def refused_request(connect, topic, properties, body=b"x"):
    http = await connect.http()
    answer = await http.ask("POST", f"/topics/{topic}/messages", {"value": body.decode(), "headers": properties})
    return answer.json.get("error")


async def refused_batch(connect, topic, properties, body=b"x"):
    http = await connect.http()
    messages = [{"value": "fine"}, {"value": body.decode(), "headers": properties}]
    answer = await http.ask("POST", f"/topics/{topic}/messages", {"messages": messages})
    return answer.json.get("error")


async def refused_ndjson(connect, topic, properties, body=b"x"):
    http = await connect.http()
    line = msgspec.json.encode({"value": body.decode(), "headers": properties})
    kind = {"content-type": "application/x-ndjson"}
    answer = await http.ask("POST", f"/topics/{topic}/messages", body=line, headers=kind)
    return answer.json.get("error")


FRAMES = [refused_frame, refused_stage]  # whose fields are properties
OTHERS = [refused_line, refused_request, refused_batch, refused_ndjson]
OWN_FIELDS = ("topic", "partition", "key", "client_id", "publisher_id")


@pytest.mark.parametrize("way_in", FRAMES + OTHERS)
async def test_no_way_in_takes_a_property_that_only_the_broker_writes(a_broker, way_in):
    async with a_broker() as connect:
        await (await connect.lines()).data("createTopic", topic="a")
        words = "property name 'subscription_id' is reserved: the broker gives it a meaning of its own"
        assert words in await way_in(connect, "a", {"subscription_id": "s"})
        assert connect.broker.topics.log("a", 0).next_offset == 0, "nor what came with it"
        assert await way_in(connect, "a", {"mine": "x"}) is None


@pytest.mark.parametrize("name", OWN_FIELDS)
@pytest.mark.parametrize("way_in", OTHERS)
async def test_no_way_in_takes_a_field_of_a_frame_as_a_property_of_a_user(a_broker, way_in, name):
    async with a_broker() as connect:
        await (await connect.lines()).data("createTopic", topic="a")
        words = f"property name {name!r} is reserved: the broker gives it a meaning of its own"
        assert words in await way_in(connect, "a", {name: "0"})
        assert connect.broker.topics.log("a", 0).next_offset == 0


@pytest.mark.parametrize("name", [*OWN_FIELDS, "subscription_id"])
def test_clients_refuse_a_reserved_property_with_the_words_of_the_broker(name):
    with pytest.raises(QBError, match=f"property name {name!r} is reserved: the broker gives it a meaning of its own"):
        form_of("a", None, None, {name: "0"}, 0)


async def test_a_frame_carries_the_fields_that_are_its_own(a_broker):
    async with a_broker() as connect:
        await (await connect.lines()).data("createTopic", topic="a")
        fields = {"partition": "0", "key": "k", "client_id": "c", "publisher_id": "p"}
        assert (await (await connect()).publish("a", b"x", **fields)).properties["status"] == "success"
        assert await refused_stage(connect, "a", fields) is None


async def refused_run(connect, topic, properties, body=b"x"):
    peer = await connect()
    await peer.ask(T.HELLO, 2**63, protocol="1", producer_id="new")
    answer = await peer.publish(topic, body, number=1, **properties)
    return answer.properties.get("error")


async def refused_table(connect, topic, properties, body=b"x"):
    peer = await connect()
    await peer.ask(T.HELLO, 2**63, protocol="1", features="publish_runs", producer_id="new")
    message = encode_properties({"topic": topic, **properties}), body, 0
    await peer.stream.send_all(run_of(1, [message] * LEAST))
    return (await peer.receive()).properties.get("error")


async def refused_compressed(connect, topic, properties, body=b"x"):
    peer = await connect()
    await peer.ask(T.HELLO, 2**63, protocol="1", compression="lz4", producer_id="new")
    publish = encode_frame(T.PUBLISH, 1, 0, {"topic": topic, **properties}, body * 5_000)
    packed = compress("lz4", (publish,), 1)
    await peer.stream.send_all(packed)
    return (await peer.receive()).properties.get("error")


async def refused_transaction(connect, topic, properties, body=b"x", fine=b""):
    peer = await connect()
    message = encode_frame(T.DATA, 0, 5, {"topic": topic, **properties}, body)
    part = encode_frame(T.STAGE, 0, 0, {"topic": topic, "partition": "0"}, message)
    answer = await peer.ask(T.TRANSACTION, 1, fine + part, transaction="x")
    return answer.properties.get("error")


async def refused_mixed_transaction(connect, topic, properties, body=b"x"):
    await (await connect.lines()).ask("createTopic", topic="fine")
    fine = encode_frame(
        T.STAGE, 0, 0, {"topic": "fine", "partition": "0"}, encode_frame(T.DATA, 0, 5, {"topic": "fine"})
    )
    return await refused_transaction(connect, topic, properties, body, fine)


async def refused_raw(connect, topic, properties, body=b"x"):
    http = await connect.http()
    answer = await http.ask("POST", f"/topics/{topic}/messages", body=body, headers={"content-type": RAW})
    return answer.json.get("error")


# Every row of every door with which a peer can have something stored in a topic that it names, and how it is tried.
WAYS_TO_APPEND = {
    "frame PUBLISH": [refused_frame, refused_run],
    "frame PUBLISH_RUN": [refused_table],
    "frame STAGE": [refused_stage],
    "frame TRANSACTION": [refused_transaction, refused_mixed_transaction],
    "frame COMPRESSED": [refused_compressed],
    "line produce": [refused_line],
    "POST /topics/{topic}/messages": [refused_request, refused_batch, refused_ndjson, refused_raw],
}


def test_every_way_to_append_is_tried():
    def appends(needs):
        names = [each for each in needs.names if each.thing is Thing.TOPIC and Verb.PUBLISH in each.verbs]
        return any(each.field == "topic" and len(each.verbs) == 1 for each in names)

    frames = {f"frame {T(each).name}" for each, needs in NEEDS.items() if appends(needs)}
    methods = {f"method {name}" for name, row in METHODS.items() if appends(row.needs)}
    lines = {f"line {name}" for name, row in LINES.items() if appends(row.needs)}
    routes = {f"{row.method} {row.path}" for row in ROUTES if appends(row.needs)}
    carriers = {"frame TRANSACTION", "frame COMPRESSED"}  # what they carry has needs of its own
    assert frames | methods | lines | routes | carriers == set(WAYS_TO_APPEND)


@pytest.mark.parametrize("auto_create_topics", [False, True])
@pytest.mark.parametrize("way_in", [way for ways in WAYS_TO_APPEND.values() for way in ways])
async def test_only_the_broker_writes_to_default_dead_letter_topics(a_broker, way_in, auto_create_topics):
    async with a_broker(auto_create_topics=auto_create_topics) as connect:
        words = "only the broker writes to 's.dead-letters', for dead letters; publish to another topic"
        assert words in await way_in(connect, "s.dead-letters", {})
        await (await connect.lines()).data("createTopic", topic="s.dead-letters")
        assert words in await way_in(connect, "s.dead-letters", {})
        assert connect.broker.topics.log("s.dead-letters", 0).next_offset == 0
        if "fine" in connect.broker.engine.topics():
            assert connect.broker.topics.log("fine", 0).next_offset == 0, "nor what came with it"


async def test_a_topic_made_without_options_is_the_same_through_all_doors(a_broker):
    async with a_broker() as connect:
        await (await connect()).call("create_topic", topic="frames")
        await (await connect.lines()).data("createTopic", topic="lines")
        await (await connect.http()).ok("POST", "/topics", {"name": "http"}, 201)
        made = [connect.broker.topics.get(name) for name in ("frames", "lines", "http")]
    assert [(each.partitions, each.retention_hours, each.retention_bytes) for each in made] == [(1, None, None)] * 3
