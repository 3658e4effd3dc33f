"""Push deliveries through the binary door: both dialects, against the real broker in this process."""

from __future__ import annotations

import msgspec
import pytest
import trio

from qb.core.pacing import AT_ONCE, MOST_AT_ONCE, counted
from qb.core.wire.frames import MessageType as T
from tests.support.push_peers import Delivered, a_topic, all_saved, bodies, joined

# The basic dialect


async def test_a_basic_peer_creates_joins_and_gets_plain_data_frames(a_broker):
    async with a_broker() as connect:
        peer = await a_topic(connect, 3)
        made = await peer.ask(T.CREATE_SUBSCRIPTION, 2, subscription_id="s", topic="a")
        assert made.properties["status"] == "success"
        answer = await peer.ask(T.SUBSCRIBE, 3, subscription_id="s")
        assert (answer.type, answer.sequence_number) == (T.ACK, 3), "deliveries never overtake the SUBSCRIBE ACK"
        for number in range(3):
            frame = await peer.receive()
            assert (frame.type, frame.sequence_number, frame.body) == (T.DATA, number, b"%d" % number)
            assert list(frame.properties.items())[:3] == [("subscription_id", "s"), ("topic", "a"), ("partition", "0")]
        publisher = await connect()
        await publisher.publish("a", b"live", key="k", colour="blue")
        live = await peer.receive()
        assert (live.body, live.properties["key"], live.properties["colour"]) == (b"live", "k", "blue")
        assert (await peer.ask(T.UNSUBSCRIBE, 4, subscription_id="s")).properties["status"] == "success"
        assert (await peer.ask(T.UNSUBSCRIBE, 5, subscription_id="s")).properties["code"] == "NOT_JOINED"
        again = await connect()
        await again.ask(T.SUBSCRIBE, 1, subscription_id="s")
        await publisher.publish("a", b"next")
        assert (await again.receive()).body == b"next", "the cursor moved as frames were written"
        assert (await peer.ask(T.DELETE_SUBSCRIPTION, 6, subscription_id="s")).properties["status"] == "success"
        notice = await again.receive()
        assert (notice.type, notice.properties["subscription_id"]) == (T.UNSUBSCRIBE, "s")


async def test_a_basic_peer_that_stops_reading_costs_a_bounded_amount(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect)
        await publisher.ask(T.CREATE_SUBSCRIPTION, 2, subscription_id="s", topic="a")
        slow = await connect()
        await slow.ask(T.SUBSCRIBE, 3, subscription_id="s")
        for _ in range(40):
            await publisher.publish("a", b"x" * 1_000_000)
        described = await publisher.call("describe_subscription", subscription_id="s")
        assert described["lag"] > 20, "most of it waits in the log, not in memory"
        seen = 0
        while seen < 40:
            assert len((await slow.receive()).body) == 1_000_000
            seen += 1


# The fast dialect


async def test_the_backlog_comes_first_then_live_without_a_seam(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 50)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        subscriber = Delivered(await joined(connect))
        for number in range(50, 100):
            await publisher.publish("a", b"%d" % number)
        assert await subscriber.take(100) == bodies(0, 100)


async def test_each_message_goes_to_the_next_subscriber_in_turn(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        first, second = Delivered(await joined(connect)), Delivered(await joined(connect))
        for number in range(10):
            await publisher.publish("a", b"%d" % number)
        assert await first.take(5) == [b"0", b"2", b"4", b"6", b"8"]
        assert await second.take(5) == [b"1", b"3", b"5", b"7", b"9"]


async def test_a_full_window_is_skipped_and_acks_open_it(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 10)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        narrow = Delivered(await joined(connect, window="2"))
        assert await narrow.take(2) == bodies(0, 2)
        wide = Delivered(await joined(connect))
        assert await wide.take(8) == bodies(2, 10)
        await publisher.publish("a", b"10")
        await publisher.publish("a", b"11")
        assert await wide.take(2) == bodies(10, 12)
        await narrow.settle(acks=[[0, 0, 2, 1]])
        await all_saved(publisher)
        await publisher.publish("a", b"12")
        await publisher.publish("a", b"13")
        assert sorted([*await narrow.take(1), *await wide.take(1)]) == [b"12", b"13"]


async def test_what_a_dead_subscriber_had_goes_to_the_others_and_says_its_attempt(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 4)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        lost = Delivered(await joined(connect))
        await lost.take(4)
        await lost.settle(acks=[[0, 1]])
        heir = Delivered(await joined(connect))
        await trio.aclose_forcefully(lost.peer.stream)
        taken = [await heir.next() for _ in range(3)]
        assert [(offset, attempt) for _, offset, _, attempt in taken] == [(0, 2), (2, 2), (3, 2)]


async def test_a_nacked_message_comes_again_after_its_delay(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 1)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        subscriber = Delivered(await joined(connect))
        await subscriber.next()
        await subscriber.settle(nacks=[[0, 0, 0.01, "not today"]])
        assert await subscriber.next() == (0, 0, b"0", 2)
        await subscriber.settle(acks=[[0, 0]])
        assert (await publisher.call("describe_subscription", subscription_id="s"))["lag"] == 0


async def test_an_unacked_message_comes_again_when_its_deadline_passes(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 1)
        options = {"ack_deadline": 0.05, "backoff": {"initial": 0.01, "cap": 0.01}}
        await publisher.call("create_subscription", subscription_id="s", topic="a", options=options)
        subscriber = Delivered(await joined(connect))
        assert [(await subscriber.next())[3] for _ in range(3)] == [1, 2, 3]


async def test_after_max_deliveries_a_message_is_dead_lettered_listed_retried_and_purged(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 1)
        await publisher.publish("a", b"\xff poison", key="k", colour="red")
        options = {"max_deliveries": 2, "backoff": {"initial": 0, "cap": 0}}
        await publisher.call("create_subscription", subscription_id="s", topic="a", options=options)
        subscriber = Delivered(await joined(connect))
        await subscriber.take(2)
        await subscriber.settle(acks=[[0, 0]], nacks=[[0, 1, None, "first"]])
        await subscriber.next()
        await subscriber.settle(nacks=[[0, 1, None, "it is poison"]])
        letters = []
        with trio.fail_after(10):
            while not letters:
                letters = await publisher.call("dead_letters", subscription_id="s")
        letter = letters[0]
        assert (letter["topic"], letter["partition"], letter["offset"]) == ("a", 0, 1)
        assert (letter["attempts"], letter["reason"], letter["key"]) == (2, "it is poison", "k")
        assert (await publisher.call("describe_subscription", subscription_id="s"))["dead_lettered"] == 1
        assert await publisher.call("retry_dead_letters", subscription_id="s", numbers=[7]) == "BAD_REQUEST"
        assert await publisher.call("retry_dead_letters", subscription_id="s") == {"retried": 1}
        assert (await subscriber.next())[:3] == (0, 1, b"\xff poison")
        await subscriber.settle(acks=[[0, 1]])
        assert await publisher.call("dead_letters", subscription_id="s") == []
        assert await publisher.call("purge_dead_letters", subscription_id="s") == {"purged": 0}


async def test_seek_pause_resume_fork_and_explain(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 5)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        subscriber = Delivered(await joined(connect))
        assert await subscriber.take(5) == bodies(0, 5)
        await subscriber.settle(acks=[[0, 0, 3, 1]])
        assert (await publisher.call("describe_subscription", subscription_id="s"))["lag"] == 2
        assert (await publisher.call("fork", subscription_id="s", new_id="t"))["topic"] == "a"
        fork = Delivered(await joined(connect, "t"))
        assert await fork.take(2) == bodies(3, 5)
        assert "acked" in (await publisher.call("explain", subscription_id="s", offset=0))["text"]
        assert "in flight" in (await publisher.call("explain", subscription_id="s", offset=4))["text"]
        assert (await publisher.call("pause", subscription_id="s"))["paused"] is True
        await publisher.publish("a", b"5")
        assert "paused" in (await publisher.call("explain", subscription_id="s", offset=5))["text"]
        await publisher.call("resume", subscription_id="s")
        assert await subscriber.take(1) == [b"5"]
        await publisher.call("seek", subscription_id="s", to="earliest")
        assert await subscriber.take(6) == bodies(0, 6)


async def test_refusals_about_subscriptions_are_typed(a_broker):
    async with a_broker() as connect:
        peer = await a_topic(connect)
        assert await peer.call("create_subscription", subscription_id="s", topic="nowhere") == "UNKNOWN_TOPIC"
        assert await peer.call("create_subscription", subscription_id="../s", topic="a") == "BAD_NAME"
        options = {"ack_deadline": -1}
        assert await peer.call("create_subscription", subscription_id="s", topic="a", options=options) == "BAD_REQUEST"
        assert await peer.call("create_subscription", subscription_id="s", topic="a", start_offset="x") == "BAD_REQUEST"
        made = await peer.call("create_subscription", subscription_id="s", topic="a", options={"mode": "exclusive"})
        assert (
            await peer.call("create_subscription", subscription_id="s", topic="a", options={"mode": "exclusive"})
            == made
        )
        assert await peer.call("create_subscription", subscription_id="s", topic="a") == "SUBSCRIPTION_EXISTS"
        assert (await peer.ask(T.SUBSCRIBE, 1, subscription_id="none")).properties["code"] == "UNKNOWN_SUBSCRIPTION"
        await joined(connect)
        assert (await peer.ask(T.SUBSCRIBE, 1, subscription_id="s")).properties["code"] == "SUBSCRIPTION_BUSY"
        assert (await peer.ask(T.SETTLE, 1, b"{}", subscription_id="s")).properties["code"] == "NOT_JOINED"
        assert await peer.call("delete_topic", topic="a", if_unused=True) == "TOPIC_IN_USE"


@pytest.mark.parametrize("body", [b"", b"[]", b'{"acks":[[0,-1]]}', b'{"acks":[[0,0,0,1]]}', b'{"nope":1}', b"\xff"])
async def test_a_malformed_settle_is_refused_and_changes_nothing(a_broker, body):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 1)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        subscriber = Delivered(await joined(connect))
        await subscriber.next()
        answer = await subscriber.peer.ask(T.SETTLE, 9, body, subscription_id="s")
        assert answer.properties["code"] == "BAD_REQUEST"
        assert (await publisher.call("describe_subscription", subscription_id="s"))["in_flight"] == 1


async def test_deleting_a_topic_removes_its_subscriptions_and_notifies_the_subscribers(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        subscriber = await joined(connect)
        await publisher.call("delete_topic", topic="a")
        notice = await subscriber.receive()
        assert (notice.type, notice.properties["subscription_id"]) == (T.UNSUBSCRIBE, "s")
        assert await publisher.call("list_subscriptions") == []


async def test_a_subscription_on_a_partitioned_topic_serves_all_partitions(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 12, partitions="3")
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        subscriber = Delivered(await joined(connect))
        taken = [await subscriber.next() for _ in range(12)]
        assert sorted((partition, offset) for partition, offset, _, _ in taken) == [
            (partition, offset) for partition in range(3) for offset in range(4)
        ]


async def test_key_shared_keeps_a_key_with_one_subscriber(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect)
        await publisher.call("create_subscription", subscription_id="s", topic="a", options={"mode": "key_shared"})
        subscribers = [Delivered(await joined(connect)) for _ in range(2)]
        for number in range(12):
            await publisher.publish("a", b"%d" % number, key=f"k{number % 2}")
        first = await subscribers[0].take(6)
        second = await subscribers[1].take(6)
        assert sorted([first, second]) == sorted([bodies(0, 12)[::2], bodies(0, 12)[1::2]])


async def test_cursors_survive_a_restart(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 6)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        subscriber = Delivered(await joined(connect))
        await subscriber.take(6)
        await subscriber.settle(acks=[[0, 0, 2, 1], [0, 4]])
        assert (await publisher.call("describe_subscription", subscription_id="s"))["lag"] == 3
    async with a_broker() as connect:
        subscriber = Delivered(await joined(connect))
        taken = [await subscriber.next() for _ in range(3)]
        assert [(offset, attempt) for _, offset, _, attempt in taken] == [(2, 2), (3, 2), (5, 2)]


async def test_partitions_added_later_are_delivered_too_also_after_a_restart(a_broker):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 1)
        await publisher.call("create_subscription", subscription_id="s", topic="a")
        await publisher.call("create_subscription", subscription_id="idle", topic="a")
        subscriber = Delivered(await joined(connect))
        assert await subscriber.take(1) == [b"0"]
        assert (await publisher.call("add_partitions", topic="a", partitions=3))["partitions"] == 3
        assert await publisher.call("add_partitions", topic="a", partitions=2) == "BAD_REQUEST"
        await publisher.publish("a", b"new", partition="2")
        assert await subscriber.take(1) == [b"new"]
    async with a_broker() as connect:
        subscriber = Delivered(await joined(connect, "idle"))
        assert sorted(await subscriber.take(2)) == [b"0", b"new"]


async def test_a_large_settle_is_carried_out_in_portions_before_the_frames_behind_it(a_broker):
    with trio.fail_after(60):
        async with a_broker() as connect:
            publisher = await a_topic(connect)
            await publisher.call("create_subscription", subscription_id="s", topic="a", options={"max_in_flight": 5000})
            subscriber = Delivered(await joined(connect))
            for number in range(3000):
                await publisher.publish("a", b"%d" % number)
            await subscriber.take(3000)
            with counted() as step:
                await subscriber.settle(acks=[[0, offset] for offset in range(0, 3000, 2)])
                await subscriber.settle(acks=[[0, offset] for offset in range(1, 3000, 2)])
            described = await publisher.call("describe_subscription", subscription_id="s")
            assert described["lag"] == 0
            assert AT_ONCE <= step.most <= MOST_AT_ONCE


async def test_a_settle_beyond_the_limit_is_refused_and_the_connection_survives(a_broker):
    with trio.fail_after(60):
        async with a_broker() as connect:
            publisher = await a_topic(connect, 1)
            await publisher.call("create_subscription", subscription_id="s", topic="a")
            subscriber = Delivered(await joined(connect))
            await subscriber.take(1)
            body = msgspec.json.encode({"acks": [[0, 0]] * 10_001})
            await subscriber.peer.send(T.SETTLE, 7, body, subscription_id="s")
            refused = await subscriber.peer.receive()
            assert refused.properties["code"] == "BAD_REQUEST"
            assert "10001 runs and messages" in refused.properties["error"]
            await subscriber.settle(acks=[[0, 0]])
            assert (await publisher.call("describe_subscription", subscription_id="s"))["lag"] == 0
