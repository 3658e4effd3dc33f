"""A publish and an ack cost as much as has moved, however many partitions there are. Work is counted, never timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import trio

from qb.core.push import delivery_rounds
from qb.core.push.partition_turns import PARTITIONS_A_ROUND
from qb.core.subscriptions import dispatch
from qb.core.subscriptions.subscription import Subscription
from qb.storage.metadata.metadata_store import MetadataStore
from tests.support.push_peers import Delivered, a_topic, all_saved, joined


@pytest.fixture
def counted(monkeypatch) -> Counter[str]:
    """Counts the partitions that subscriptions are asked about, and the entries that are stored."""
    counts: Counter[str] = Counter()
    wanted, shares, put_then = Subscription.wanted, dispatch._shares, MetadataStore.put_then

    def counting_wanted(self: Subscription, partition: int) -> range:
        counts["asked"] += 1
        return wanted(self, partition)

    def counting_shares(*given: Any) -> Any:
        found = shares(*given)
        counts["shared"] += len(found)
        return found

    def counting_put(self: MetadataStore, values: Mapping[str, Any], done: Any) -> None:
        counts["stored"] += len(values)
        put_then(self, values, done)

    monkeypatch.setattr(Subscription, "wanted", counting_wanted)
    monkeypatch.setattr(dispatch, "_shares", counting_shares)
    monkeypatch.setattr(MetadataStore, "put_then", counting_put)
    return counts


async def a_publish_and_an_ack(connect: Any, counted: Counter[str], topic: str, partitions: int) -> dict[str, int]:
    """Publish one message to one partition, push it and ack it; return what that took."""
    publisher = await a_topic(connect, topic=topic, partitions=str(partitions))
    await publisher.call("create_subscription", subscription_id=topic, topic=topic)
    subscriber = Delivered(await joined(connect, topic))
    for _ in range(2):  # what is done once, after joining, is no cost of a publish
        counted.clear()
        await publisher.publish(topic, b"x", partition="0")
        partition, offset, _, _ = await subscriber.next()
        await subscriber.settle(topic, acks=[[partition, offset]])
        await all_saved(publisher, topic)
    return dict(counted)


async def test_a_publish_costs_the_same_on_one_partition_and_on_many(a_broker, counted) -> None:
    with trio.fail_after(60):
        async with a_broker() as connect:
            few = await a_publish_and_an_ack(connect, counted, "few", 1)
            many = await a_publish_and_an_ack(connect, counted, "many", 100)
            assert many["asked"] <= few["asked"] <= 8
            assert many["shared"] == few["shared"] == 1
            assert many["stored"] <= 4  # the cursor as it was pushed, and as it was acked; a save may come between


async def test_of_many_partitions_with_a_backlog_some_are_read_in_each_round(a_broker, counted) -> None:
    with trio.fail_after(60):
        async with a_broker() as connect:
            count = 3 * PARTITIONS_A_ROUND
            publisher = await a_topic(connect, partitions=str(count))
            for partition in range(count):
                for number in range(2):
                    await publisher.publish("a", b"%d" % number, partition=str(partition))
            await publisher.call("create_subscription", subscription_id="s", topic="a", options={"max_in_flight": 1})
            subscriber = Delivered(await joined(connect))
            seen = []
            for _ in range(2 * count):
                counted.clear()
                partition, offset, _, _ = await subscriber.next()
                seen.append((partition, offset))
                await subscriber.settle(acks=[[partition, offset]])
                assert counted["asked"] <= 8 * PARTITIONS_A_ROUND
            assert sorted(seen) == [(partition, offset) for partition in range(count) for offset in range(2)]


async def test_a_seek_and_new_partitions_are_read_though_nothing_is_published(a_broker) -> None:
    with trio.fail_after(60):
        async with a_broker() as connect:
            publisher = await a_topic(connect, 3)
            await publisher.call("create_subscription", subscription_id="s", topic="a")
            subscriber = Delivered(await joined(connect))
            assert await subscriber.take(3) == [b"0", b"1", b"2"]
            await subscriber.settle(acks=[[0, 0, 3, 1]])
            await publisher.call("seek", subscription_id="s", to=1)
            assert await subscriber.take(2) == [b"1", b"2"]
            await publisher.call("add_partitions", topic="a", partitions=2)
            await publisher.publish("a", b"new", partition="1")
            assert await subscriber.take(1) == [b"new"]


async def test_what_was_saved_piece_by_piece_is_restored_as_a_whole(a_broker) -> None:
    with trio.fail_after(60):
        async with a_broker() as connect:
            publisher = await a_topic(connect, partitions="4")
            await publisher.call("create_subscription", subscription_id="s", topic="a")
            await publisher.call("create_subscription", subscription_id="gone", topic="a")
            subscriber = Delivered(await joined(connect))
            for partition in range(4):
                for number in range(3):
                    await publisher.publish("a", b"%d" % number, partition=str(partition))
            await subscriber.take(12)
            await subscriber.settle(acks=[[0, 0, 3, 1], [1, 0, 1, 1], [3, 1, 2, 1]], nacks=[[2, 0, 600.0, "later"]])
            await publisher.call("pause", subscription_id="s")
            await publisher.call("delete_subscription", subscription_id="gone")
            assert not [key for key in connect.broker.engine.metadata.under("cursor/") if "/gone/" in key]
        async with a_broker() as connect:
            described = await (await connect()).call("describe_subscription", subscription_id="s")
            assert described["paused"]
            found = [(each["floor"], each["next"], each["waiting"]) for each in described["partitions"]]
            assert found == [(3, 3, 0), (1, 3, 2), (0, 3, 3), (0, 3, 1)]


async def test_a_subscription_of_a_data_directory_from_before_is_read(a_broker) -> None:
    """Its whole state stood under one key."""
    with trio.fail_after(60):
        async with a_broker() as connect:
            publisher = await a_topic(connect, 3)
            await publisher.call("create_subscription", subscription_id="s", topic="a")
            metadata = connect.broker.engine.metadata
            entry = metadata.get("subscription/s").value
            partition = {"partition": 0, "start": 0, "next": 3, "open": [[1, 1, 1, 2, 1, [], False, "broken", None]]}
            old = {**entry, "snapshot": {**entry["snapshot"], "partitions": [partition], "redelivered": 7}}
            await metadata.delete(*metadata.under("cursor/"))
            await metadata.put("subscription/s", old)
        async with a_broker() as connect:
            described = await (await connect()).call("describe_subscription", subscription_id="s")
            assert (described["waiting"], described["redelivered"], described["lag"]) == (1, 7, 1)


async def test_what_goes_out_is_cut_from_what_the_same_round_has_read(a_broker, monkeypatch) -> None:
    """A message that is offered without room for it has to be read once more."""
    read_again = []
    collect_recent = delivery_rounds.collect_recent

    def checking(log: Any, runs: Any, chunk: Any) -> Any:
        if chunk is None or not all(chunk.first_offset <= run[0] and run[-1] < chunk.next_offset for run in runs):
            read_again.append(runs)
        return collect_recent(log, runs, chunk)

    monkeypatch.setattr(delivery_rounds, "collect_recent", checking)
    with trio.fail_after(60):
        async with a_broker() as connect:
            publisher = await a_topic(connect, partitions="5")
            for number in range(100):
                await publisher.publish("a", b"x" * (number % 7) ** 3, partition=str(number % 5))
            await publisher.call("create_subscription", subscription_id="s", topic="a", options={"max_in_flight": 50})
            subscriber = Delivered(await joined(connect))
            for _ in range(4):
                pushed = [await subscriber.next() for _ in range(25)]
                await subscriber.settle(acks=[[partition, offset] for partition, offset, _, _ in pushed])
            assert not read_again


async def test_a_settle_that_frees_no_slot_reads_and_decides_nothing(a_broker, monkeypatch) -> None:
    decided = Counter[str]()
    decide = Subscription.decide

    def counting(self: Subscription, now: float) -> Any:
        decisions = decide(self, now)
        decided["in vain" if not decisions else "for something"] += 1
        return decisions

    with trio.fail_after(60):
        async with a_broker() as connect:
            publisher = await a_topic(connect, 20)
            await publisher.call("create_subscription", subscription_id="s", topic="a", options={"max_in_flight": 1})
            subscriber = Delivered(await joined(connect))
            await subscriber.next()
            monkeypatch.setattr(Subscription, "decide", counting)
            for offset in range(15):
                await subscriber.settle(acks=[[0, offset]])
                await subscriber.next()
            assert decided["for something"] == 15
            assert decided["in vain"] <= 2  # the round that began with the join may end late
