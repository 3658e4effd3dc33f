"""Offsets that are no numbers are refused in words, by every request that takes one, and never as a fault of ours."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from qb.core.wire.frames import MessageType
from tests.support.http_peers import READS_EVENTS

STRANGE = ["²", "--5", "-", "٣", "9" * 5_000, "-" + "9" * 5_000, "@²", "@--5", "@" + "9" * 5_000, "5_0", ""]
STRANGE += ["1e3", "5.0"]  # whole numbers to those who read numbers generously


@pytest.mark.parametrize("offset", STRANGE)
async def test_the_binary_door_refuses_a_strange_offset(a_broker, offset):
    async with a_broker() as connect:
        peer = await connect()
        await peer.call("create_topic", topic="a")
        await peer.call("create_subscription", subscription_id="s", topic="a")
        answers = [
            await peer.ask(MessageType.CREATE_SUBSCRIPTION, 1, subscription_id="n", topic="a", start_offset=offset),
            await peer.ask(MessageType.FETCH, 2, topic="a", offset=offset),
            await peer.ask(MessageType.FETCH, 3, topic="a", offset="0", partition=offset),
            await peer.ask(MessageType.PUBLISH, 4, topic="a", partition=offset),
            await peer.ask(MessageType.SUBSCRIBE, 5, subscription_id="s", window=offset),
        ]
        codes = [answer.properties["code"] for answer in answers]
        codes += [
            await peer.call("create_subscription", subscription_id="n", topic="a", start_offset=offset),
            await peer.call("seek", subscription_id="s", to=offset),
            await peer.call("reset_group", group="g", topic="a", to=offset),
        ]
        assert codes == ["BAD_REQUEST"] * len(codes)
        hello = await (await connect()).ask(MessageType.HELLO, 1, protocol="1", producer_id=offset)
        assert hello.properties["code"] == "BAD_REQUEST"


@pytest.mark.parametrize("offset", STRANGE)
async def test_the_json_door_refuses_a_strange_offset(a_broker, offset):
    async with a_broker() as connect:
        peer = await connect.lines()
        await peer.data("createTopic", topic="a")
        errors = [
            await peer.error("createSubscription", subscription="n", topic="a", startOffset=offset),
            await peer.error("fetch", topic="a", partition=0, offset=offset),
            await peer.error("commit", groupId="g", topic="a", partition=0, offset=offset),
        ]
        assert "internal error" not in errors


async def test_a_number_of_thousands_of_digits_is_refused_by_the_json_door(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await peer.data("createTopic", topic="a")
        digits = b"9" * 5_000
        for line in (
            b'{"type":"fetch","topic":"a","partition":0,"offset":' + digits + b"}\n",
            b'{"type":"createSubscription","subscription":"n","topic":"a","startOffset":' + digits + b"}\n",
        ):
            await peer.send_bytes(line)
            answer = await peer.receive()
            assert answer["ok"] is False
            assert "must be" in answer["error"]


@pytest.mark.parametrize("offset", STRANGE)
async def test_the_http_door_refuses_a_strange_offset(a_broker, offset):
    async with a_broker() as connect:
        peer = await connect.http()
        await peer.ok("POST", "/topics", {"name": "a"}, 201)
        await peer.ok("POST", "/subscriptions", {"subscription_id": "s", "topic": "a"}, 201)
        written = quote(offset)
        asked = [
            await peer.refused("GET", f"/topics/a/partitions/0/messages?offset={written}"),
            await peer.refused("GET", f"/topics/a/partitions/0/messages?max_records={written}"),
            await peer.refused("GET", f"/topics/a/tail?offset={written}"),
            await peer.refused("GET", f"/topics/a/tail?partition={written}"),
            await peer.refused("GET", f"/subscriptions/s/explain?offset={written}"),
            await peer.refused("GET", f"/subscriptions/s/stream?window={written}", headers=READS_EVENTS),
            await peer.refused("POST", "/subscriptions/s/seek", {"to": offset}),
            await peer.refused(
                "POST", "/subscriptions", {"subscription_id": "n", "topic": "a", "start_offset": offset}
            ),
        ]
        assert asked == [(400, "BAD_REQUEST")] * len(asked)
        if offset:
            unknown = await peer.refused("GET", f"/topics/a/partitions/{written}/offsets")
            assert unknown == (404, "UNKNOWN_PARTITION")


@pytest.mark.parametrize("number", ["9" * 5_000, "-5", "1e9", "0." + "5" * 100_000, "9" * 500_000])
async def test_a_strange_number_in_json_is_refused_by_the_http_door(a_broker, number):
    async with a_broker() as connect:
        peer = await connect.http()
        await peer.ok("POST", "/topics", {"name": "a"}, 201)
        await peer.ok("POST", "/subscriptions", {"subscription_id": "s", "topic": "a"}, 201)
        for path, body in (
            ("/subscriptions/s/seek", '{"to":%s}'),
            ("/subscriptions/s/acks", '{"acks":[{"partition":0,"offset":%s}]}'),
            ("/consumers/g/offsets", '{"topic_name":"a","partition":%s,"offset":0}'),
            ("/topics/a/messages", '{"value":"","partition":%s}'),
        ):
            json = {"content-type": "application/json"}
            assert (await peer.refused("POST", path, body=(body % number).encode(), headers=json))[0] == 400
