"""Subscriptions on many partitions: to join, to start with them and to stop costs no more than what has moved."""

from __future__ import annotations

from typing import Any

import msgspec
import trio

from qb.core.pacing import AT_ONCE, counted
from qb.core.push.subscription_manager import SubscriptionManager
from qb.core.subscriptions.snapshot import KeyedMessages, PartitionSnapshot, SubscriptionSnapshot
from qb.core.subscriptions.subscription_options import SubscriptionMode, SubscriptionOptions
from qb.core.wire.frames import MessageType as T
from qb.storage.commit.completions import Watchers
from qb.storage.metadata.metadata_store import MetadataStore
from tests.support.push_peers import a_fast_peer, a_topic, joined
from tests.support.slow_passes import IN_A_TURN, SUBSCRIPTIONS, slow_work, subscribed
from tests.support.waiting import until

PARTITIONS = 16


def watchers_of(connect: Any, topic: str) -> list[Watchers]:
    return [connect.broker.engine.log(topic, partition)._watchers for partition in range(PARTITIONS)]


async def test_a_log_has_one_watcher_however_many_subscriptions_are_joined(a_broker) -> None:
    with trio.fail_after(60):
        async with a_broker() as connect:
            operator = await a_topic(connect, topic="wide", partitions=str(PARTITIONS))
            for number in range(10):
                await operator.call("create_subscription", subscription_id=f"s{number}", topic="wide")
            peer = await a_fast_peer(connect)
            for number in range(10):
                await peer.ask(T.SUBSCRIBE, 2, subscription_id=f"s{number}", announces="true")
            assert {len(each._callbacks) for each in watchers_of(connect, "wide")} == {1}
            await operator.publish("wide", b"x", partition="7")
            names = {(await peer.receive()).properties["subscription_id"] for _ in range(10)}
            assert names == {f"s{number}" for number in range(10)}
            await peer.stream.aclose()
            await until(lambda: not any(each._callbacks for each in watchers_of(connect, "wide")))


async def test_partitions_that_are_added_are_watched_for_those_that_have_joined(a_broker) -> None:
    with trio.fail_after(60):
        async with a_broker() as connect:
            operator = await a_topic(connect)
            await operator.call("create_subscription", subscription_id="s", topic="a")
            subscriber = await joined(connect)
            await operator.call("add_partitions", topic="a", partitions=3)
            await operator.publish("a", b"x", partition="2")
            assert (await subscriber.receive()).properties["partition"] == "2"


async def test_the_broker_takes_up_its_subscriptions_over_several_passes(a_broker, monkeypatch) -> None:
    restore, slow = SubscriptionManager._restore, slow_work(monkeypatch)

    async def restoring(self: SubscriptionManager, saved: Any) -> None:
        slow.do(saved.name)
        await restore(self, saved)

    with trio.fail_after(60):
        async with a_broker() as connect:
            await subscribed(connect, "shared")
        monkeypatch.setattr(SubscriptionManager, "_restore", restoring)
        trio.lowlevel.add_instrument(slow)
        try:
            async with a_broker() as connect:
                assert len(await (await connect()).call("list_subscriptions")) == SUBSCRIPTIONS
        finally:
            trio.lowlevel.remove_instrument(slow)
    assert sum(map(len, slow.passes)) == SUBSCRIPTIONS
    assert max(map(len, slow.passes)) <= IN_A_TURN


async def test_a_stop_saves_nothing_for_what_is_only_in_flight_and_it_comes_again(a_broker, monkeypatch) -> None:
    saved: list[str] = []
    put_then = MetadataStore.put_then

    def noting(self: MetadataStore, values: Any, done: Any) -> None:
        saved.extend(values)
        put_then(self, values, done)

    with trio.fail_after(60):
        async with a_broker() as connect:
            operator = await a_topic(connect, topic="wide", partitions=str(PARTITIONS))
            await operator.call("create_subscription", subscription_id="s", topic="wide")
            peer = await joined(connect)
            for partition in range(PARTITIONS):
                await operator.publish("wide", b"x", partition=str(partition))
            for _ in range(PARTITIONS):
                await peer.receive()
            active = connect.broker.subscriptions.active("s")
            await until(lambda: not active.subscription.dirty)
            settle = msgspec.json.encode({"acks": [[3, 0, 1, 1]]})
            await peer.send(T.SETTLE, 1, settle, subscription_id="s")
            await peer.ask(T.HEARTBEAT, 9)
            await until(lambda: not active.subscription.dirty)
            monkeypatch.setattr(MetadataStore, "put_then", noting)
        assert saved == []
        async with a_broker() as connect:
            again = await joined(connect)
            came = {}
            while len(came) < PARTITIONS - 1:
                frame = await again.receive()
                came[frame.properties["partition"]] = frame.properties["attempt"]
            assert came == {str(partition): "2" for partition in range(PARTITIONS) if partition != 3}


async def test_what_was_open_in_a_subscription_is_opened_again_in_portions(a_broker) -> None:
    offsets = list(range(3 * AT_ONCE))
    keyed = KeyedMessages(1, offsets, [f"customer-{offset % 7}" for offset in offsets])
    partition = PartitionSnapshot(0, 0, len(offsets), [], [keyed])
    saved = SubscriptionSnapshot(SubscriptionOptions(mode=SubscriptionMode.KEY_SHARED), [partition])
    with trio.fail_after(60):
        async with a_broker() as connect:
            await connect()
            with counted() as step:
                reopened = await connect.broker.subscriptions._reopened("s", saved)
            assert step.most == AT_ONCE
            assert reopened.snapshot() == saved
