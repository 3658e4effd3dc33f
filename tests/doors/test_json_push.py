"""Push over JSON lines, through real sockets: ack, nack, autoAck, and subscribers that leave, vanish or do not read."""

from __future__ import annotations

import pytest
import trio

from tests.support.line_peers import a_topic, subscribed


async def test_messages_are_pushed_as_lines_and_an_ack_is_for_good(a_broker):
    async with a_broker() as connect:
        publisher = await connect.lines()
        await a_topic(publisher, 2)
        peer = await subscribed(connect)
        assert [(await peer.message())["value"] for _ in range(2)] == ["0", "1"]
        produced = await publisher.data("produce", topic="a", value="x", key="k", properties={"colour": "blue"})
        pushed = await peer.message()
        assert pushed == {"subscription": "s", "topic": "a", "attempt": 1, **produced}
        for offset in range(3):
            place = {"subscription": "s", "partition": 0, "offset": offset}
            assert await peer.data("ack", **place) == {**place, "held": True}
        assert (await peer.data("ack", subscription="s", partition=0, offset=1))["held"] is False
        assert (await peer.data("ack", subscription="s", partition=0, offset=99))["held"] is False
        assert "no partition 5" in await peer.error("ack", subscription="s", partition=5, offset=0)
        assert "joined subscription 's' already" in await peer.error("subscribe", subscription="s")
        frames = await connect()
        assert (await frames.call("describe_subscription", subscription_id="s"))["lag"] == 0


async def test_a_nacked_message_comes_again_with_its_attempt(a_broker):
    async with a_broker() as connect:
        publisher = await connect.lines()
        await a_topic(publisher, 1)
        peer = await subscribed(connect)
        first = await peer.message()
        place = {"subscription": "s", "partition": 0, "offset": 0}
        assert "delay must be between" in await peer.error("nack", **place, delayMs=-1)
        assert await peer.data("nack", **place, reason="not today", delayMs=10) == {**place, "held": True}
        assert await peer.message() == {**first, "attempt": 2}
        assert (await peer.data("ack", **place))["held"] is True
        assert (await peer.data("nack", **place))["held"] is False


async def test_with_auto_ack_a_message_is_done_when_it_was_handed_over(a_broker):
    async with a_broker() as connect:
        publisher = await connect.lines()
        await a_topic(publisher, 3)
        peer = await subscribed(connect, autoAck=True)
        assert [(await peer.message())["value"] for _ in range(3)] == ["0", "1", "2"]
        await trio.aclose_forcefully(peer.stream)
        again = await subscribed(connect, autoAck=True)
        await publisher.data("produce", topic="a", value="3")
        assert (await again.message())["value"] == "3"


async def test_no_more_than_the_window_is_unacked_at_a_time(a_broker):
    async with a_broker() as connect:
        publisher = await connect.lines()
        await a_topic(publisher, 3)
        peer = await subscribed(connect, window=1)
        for number in range(3):
            assert (await peer.message())["value"] == str(number)
            assert await peer.data("listTopics") == {"topics": ["a"]}, "an answer, and no message before it"
            await peer.data("ack", subscription="s", partition=0, offset=number)
        assert "window must be between" in await (await connect.lines()).error("subscribe", subscription="s", window=0)


async def test_a_subscription_starts_where_its_start_says(a_broker):
    async with a_broker() as connect:
        peer = await connect.lines()
        await a_topic(peer, 3)
        for start, first in ((1, "1"), ("earliest", "0"), ("latest", "new"), ("1999-12-31T00:00:00Z", "0")):
            name = f"from-{first}-{len(str(start))}"
            await peer.data("createSubscription", subscription=name, topic="a", startOffset=start)
            subscriber = await connect.lines()
            await subscriber.data("subscribe", subscription=name)
            if start == "latest":
                await peer.data("produce", topic="a", value="new")
            assert (await subscriber.message())["value"] == first
        assert "is no place in a topic" in await peer.error(
            "createSubscription", subscription="x", topic="a", startOffset="whenever"
        )


async def test_a_peer_that_unsubscribes_gets_nothing_more_and_the_others_get_what_it_had(a_broker):
    async with a_broker() as connect:
        publisher = await connect.lines()
        await a_topic(publisher, 2)
        leaver = await subscribed(connect)
        assert [(await leaver.message())["offset"] for _ in range(2)] == [0, 1]
        assert await leaver.data("unsubscribe", subscription="s") == {"subscription": "s"}
        heir = await subscribed(connect)
        assert [((await heir.message())["offset"]) for _ in range(2)] == [0, 1]
        await publisher.data("produce", topic="a", value="2")
        assert (await heir.message())["value"] == "2"
        assert await leaver.data("listTopics") == {"topics": ["a"]}


async def vanish(peer):
    await trio.aclose_forcefully(peer.stream)


async def send_no_more(peer):
    await peer.stream.send_eof()
    assert await peer.receive_bytes() is None


@pytest.mark.parametrize("go", [vanish, send_no_more])
async def test_what_a_peer_held_that_has_gone_is_pushed_to_the_next(a_broker, go):
    async with a_broker() as connect:
        publisher = await connect.lines()
        await a_topic(publisher, 4)
        lost = await subscribed(connect)
        assert [(await lost.message())["offset"] for _ in range(4)] == [0, 1, 2, 3]
        await lost.data("ack", subscription="s", partition=0, offset=1)
        await go(lost)
        heir = await subscribed(connect)
        again = [await heir.message() for _ in range(3)]
        assert [(message["offset"], message["attempt"]) for message in again] == [(0, 2), (2, 2), (3, 2)]


async def test_a_deleted_subscription_notifies_and_can_be_joined_anew(a_broker):
    async with a_broker() as connect:
        publisher = await connect.lines()
        await a_topic(publisher)
        peer, frames = await subscribed(connect), await connect()
        await frames.call("delete_subscription", subscription_id="s")
        removed = {"subscription": "s", "reason": "the subscription was deleted"}
        assert await peer.receive() == {"ok": True, "removed": removed}
        assert "has not joined" in await peer.error("ack", subscription="s", partition=0, offset=0)
        await peer.data("createSubscription", subscription="s", topic="a")
        await peer.data("subscribe", subscription="s")
        await publisher.data("produce", topic="a", value="x")
        assert (await peer.message())["value"] == "x"


async def test_a_subscriber_that_stops_reading_costs_a_bounded_amount_and_loses_nothing(a_broker):
    async with a_broker() as connect:
        publisher, frames = await connect.lines(), await connect()
        await a_topic(publisher)
        slow = await subscribed(connect, autoAck=True)
        for _ in range(40):
            await publisher.data("produce", topic="a", value="x" * 1_000_000)
        described = await frames.call("describe_subscription", subscription_id="s")
        assert described["lag"] > 20, "most of it waits in the log, not in memory"
        for number in range(40):
            message = await slow.message()
            assert (message["offset"], len(message["value"])) == (number, 1_000_000)


async def test_a_peer_that_does_not_read_for_two_heartbeats_is_dropped_but_a_silent_one_is_not(a_broker):
    async with a_broker(heartbeat_interval=0.2, shutdown_grace=0.1) as connect:
        silent, publisher = await connect.lines(), await connect.lines()
        await a_topic(publisher)
        deaf = await subscribed(connect)
        for _ in range(20):
            await publisher.data("produce", topic="a", value="x" * 1_000_000)
        heir = await connect.lines()
        await heir.data("subscribe", subscription="s")
        with trio.fail_after(20):
            while (await heir.message())["attempt"] == 1:
                pass  # until one comes that the deaf peer had held
        assert await silent.data("listTopics") == {"topics": ["a"]}
        await trio.aclose_forcefully(deaf.stream)
