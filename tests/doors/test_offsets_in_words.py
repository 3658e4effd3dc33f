"""Offsets that are no numbers are refused in words, by every request that takes one, and never as a fault of ours."""

from __future__ import annotations

import pytest

from qb.core.wire.frames import MessageType

STRANGE = ["²", "--5", "-", "٣", "9" * 5_000, "-" + "9" * 5_000, "@²", "@--5", "@" + "9" * 5_000, "5_0", ""]


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
