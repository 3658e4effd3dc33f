"""Partitions are added and topics deleted while others are in the middle of something, in a real broker."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from qb.core.broker.outgoing_messages import OutgoingMessage
from qb.core.subscriptions.push_decisions import DeadLetterDecision
from qb.core.wire.errors import BrokerError, UnknownSubscription, UnknownTopic
from qb.storage.local_engine import LocalEngine
from qb.storage.log.partition_log import LocalLog
from qb.storage.metadata.metadata_store import MetadataStore
from tests.support.push_peers import Delivered, a_topic, joined


class Gate:
    """Holds up calls of an async method: `came` when one is there, until `go` is set."""

    def __init__(self, monkeypatch, owner, name):
        self.came, self.go = trio.Event(), trio.Event()
        real = getattr(owner, name)

        async def held(*arguments, **named):
            self.came.set()
            await self.go.wait()
            return await real(*arguments, **named)

        monkeypatch.setattr(owner, name, held)


async def grow_meanwhile(connect, gate):
    """Add partitions to topic a while a call is held up."""
    await gate.came.wait()
    await connect.broker.topics.add_partitions("a", 5)
    gate.go.set()


async def subscribe(connect, topic="a", name="s"):
    return await connect.broker.subscriptions.create(name, topic)


async def test_partitions_added_during_a_read_from_disk_do_not_end_the_broker(a_broker, monkeypatch):
    async with a_broker() as connect:
        publisher = await a_topic(connect, 3)
        await subscribe(connect)
        monkeypatch.setattr(LocalLog, "read_recent", lambda *_: None)
        gate = Gate(monkeypatch, LocalLog, "read")
        subscriber = Delivered(await joined(connect))
        await grow_meanwhile(connect, gate)
        assert await subscriber.take(3) == [b"0", b"1", b"2"]
        for partition in range(1, 5):
            await publisher.publish("a", b"new", partition=str(partition))
        got = [await subscriber.next() for _ in range(4)]
        assert sorted(partition for partition, *_ in got) == [1, 2, 3, 4]


async def test_partitions_added_during_a_seek_do_not_fail_it(a_broker, monkeypatch):
    async with a_broker() as connect:
        await a_topic(connect, 3)
        await subscribe(connect)
        gate = Gate(monkeypatch, LocalLog, "offset_for_time")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(grow_meanwhile, connect, gate)
            await connect.broker.subscriptions.seek("s", "@99999999999999")
        described = await connect.broker.subscriptions.describe("s")
        assert [each["next"] for each in described["partitions"]] == [3, 0, 0, 0, 0]


async def test_partitions_added_during_a_describe_do_not_fail_it(a_broker, monkeypatch):
    async with a_broker() as connect:
        await a_topic(connect, 3)
        await subscribe(connect)
        gate = Gate(monkeypatch, LocalLog, "read")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(grow_meanwhile, connect, gate)
            described = await connect.broker.subscriptions.describe("s")
        assert described["oldest_unacked_age"] is not None


@pytest.mark.parametrize("make", ["create", "fork"])
async def test_partitions_added_while_a_subscription_is_being_made_are_served_by_it(a_broker, monkeypatch, make):
    async with a_broker() as connect:
        await a_topic(connect, 3)
        manager = connect.broker.subscriptions
        await subscribe(connect, name="source")
        real, put, grown = MetadataStore.put, trio.Event(), trio.Event()

        async def slow_put(metadata, key, value, **named):
            if key == "subscription/s":
                put.set()
                await grown.wait()
            return await real(metadata, key, value, **named)

        monkeypatch.setattr(MetadataStore, "put", slow_put)

        async def grow():
            await put.wait()
            await connect.broker.engine.add_partitions("a", 2)
            manager.partitions_added("a")
            grown.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(grow)
            await (manager.create("s", "a") if make == "create" else manager.fork("source", "s"))
        described = await manager.describe("s")
        assert [each["partition"] for each in described["partitions"]] == [0, 1]


# Removing topics


def left_behind(broker):
    """Return the subscriptions, in service or in the metadata, whose topic is gone."""
    topics = broker.engine.topics()
    served = {active.name for active in broker.subscriptions.deliveries if active.topic not in topics}
    entries = broker.engine.metadata.under("subscription/")
    kept = {key.partition("/")[2] for key, entry in entries.items() if entry.value["topic"] not in topics}
    return served | kept


async def after(steps, call, *arguments):
    """Call it so many steps of the event loop later; a refusal is fine."""
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    try:
        await call(*arguments)
    except BrokerError:
        pass


async def test_no_interleaving_with_delete_topic_leaves_a_subscription_on_a_topic_that_is_gone(a_broker):
    async with a_broker() as connect:
        await connect()  # then it has started
        broker, manager = connect.broker, connect.broker.subscriptions
        chance = random.Random(1)
        for number in range(120):
            await broker.topics.create("t")
            await broker.appends.publish("t", OutgoingMessage(b"x"))
            await manager.create("source", "t")
            async with trio.open_nursery() as nursery:
                for call, *arguments in (
                    (broker.topics.delete, "t"),
                    (manager.create, f"made{number}", "t", "@1"),
                    (manager.fork, "source", f"forked{number}"),
                    (manager.seek, "source", "@1"),
                    (manager.pause, "source"),
                    (manager.delete, "source"),
                ):
                    nursery.start_soon(after, chance.randrange(12), call, *arguments)
            assert not left_behind(broker), number
            assert not manager.on_topic("t")
            assert "t" not in broker.engine.topics()


async def test_create_waits_for_a_topic_that_is_being_deleted_and_is_refused(a_broker, monkeypatch):
    async with a_broker() as connect:
        await connect()  # then it has started
        await connect.broker.topics.create("t")
        gate = Gate(monkeypatch, LocalEngine, "delete_topic")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connect.broker.topics.delete, "t")
            await gate.came.wait()

            async def create():
                with pytest.raises(UnknownTopic):
                    await connect.broker.subscriptions.create("s", "t")

            nursery.start_soon(create)
            await trio.testing.wait_all_tasks_blocked()
            gate.go.set()
        assert not left_behind(connect.broker)


@pytest.mark.parametrize("method", ["create", "fork"])
async def test_a_creation_whose_caller_goes_away_is_finished(a_broker, method):
    async with a_broker() as connect:
        await connect()  # then it has started
        await connect.broker.topics.create("t")
        manager = connect.broker.subscriptions
        await manager.create("source", "t")
        with trio.move_on_after(0) as scope:
            await (manager.create("s", "t") if method == "create" else manager.fork("source", "s"))
        for steps in range(1, 6):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(after, 0, manager.create, f"s{steps}", "t")
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
        assert scope.cancel_called
        await connect.broker.engine.metadata.flush()
        entries = connect.broker.engine.metadata.under("subscription/")
        assert {key.partition("/")[2] for key in entries} == {active.name for active in manager.deliveries}


async def test_a_seek_that_comes_too_late_is_refused_and_brings_nothing_back(a_broker, monkeypatch):
    async with a_broker() as connect:
        await connect()  # then it has started
        await connect.broker.topics.create("t")
        manager = connect.broker.subscriptions
        await manager.create("s", "t")
        gate = Gate(monkeypatch, LocalLog, "offset_for_time")

        async def seek():
            with pytest.raises(UnknownSubscription):
                await manager.seek("s", "@1")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(seek)
            await gate.came.wait()
            await manager.delete("s")
            gate.go.set()
        assert not connect.broker.engine.metadata.under("subscription/")


async def test_a_subscription_that_is_gone_makes_no_dead_letter_topic(a_broker):
    async with a_broker() as connect:
        await a_topic(connect, 1)
        await subscribe(connect)
        manager = connect.broker.subscriptions
        active = manager.active("s")
        frame = (await connect.broker.topics.log("a", 0).read(0, 1)).frames
        await connect.broker.topics.delete("a")
        with pytest.raises(UnknownSubscription):
            await manager._store_dead_letter(active, DeadLetterDecision(0, 0, 1, "no"), frame)
        assert not connect.broker.engine.topics()


async def test_a_start_removes_and_logs_subscriptions_whose_topic_is_gone(a_broker, caplog):
    async with a_broker() as connect:
        await a_topic(connect, 1)
        await subscribe(connect)
        await subscribe(connect, name="orphan")
        await connect.broker.subscriptions.delete("orphan")
        entry = connect.broker.engine.metadata.get("subscription/s").value
        await connect.broker.engine.metadata.put("subscription/orphan", {**entry, "topic": "gone"})
        await connect.broker.engine.metadata.put("dead/orphan", {"floor": 3, "numbers": []})
    async with a_broker() as connect:
        await connect()  # then it has started
        while left_behind(connect.broker) or connect.broker.engine.metadata.get("dead/orphan"):
            await trio.lowlevel.checkpoint()
        assert [active.name for active in connect.broker.subscriptions.deliveries] == ["s"]
    assert "'orphan'" in caplog.text
    assert "'gone'" in caplog.text
