"""A pass of the event loop serves subscriptions for a bounded time, and the next ones go on. Rounds are counted."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import trio

from qb.core import pacing
from qb.core.push import cursor_saver, subscription_manager
from qb.core.push.cursor_saver import CursorSaver
from qb.core.push.delivery_rounds import DeliveryRounds
from qb.core.push.serving_turns import ServingTurns
from qb.storage.metadata.metadata_store import MetadataStore
from tests.support.push_peers import a_fast_peer, a_topic, joined
from tests.support.slow_passes import IN_A_TURN, SUBSCRIPTIONS, SlowWork, slow_work, subscribed
from tests.support.waiting import until


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowWork:
    return slow_work(monkeypatch)


async def test_a_call_is_made_at_once_while_the_pass_is_young_and_nothing_waits() -> None:
    turns = ServingTurns()
    assert turns.this_pass() is not None
    assert await turns.call(lambda: 17) == 17
    turns.add("a", lambda turn: None)
    assert turns.this_pass() is None, "it would pass by the one that waits"


def test_calls_wait_in_the_order_in_which_they_came_and_once_for_each_owner(slow) -> None:
    turns, made = ServingTurns(), list[int]()
    for number in [*range(10), *range(10)]:
        turns.add(number, lambda turn, number=number: (slow.do("call"), made.append(number)))
    turns.discard(2)
    turns.make_calls()
    assert made == [0, 1, 3, 4]
    turns.make_calls()
    turns.make_calls()
    assert made == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert not turns


def test_subscriptions_that_read_a_backlog_come_behind_the_others_and_one_of_them_in_each_turn(slow) -> None:
    turns, made = ServingTurns(), list[str]()

    def add(name: str, *, behind: bool) -> None:
        turns.add(name, lambda turn: (slow.do("call"), made.append(name)), behind=behind)

    for number in range(3):
        add(f"old {number}", behind=True)
    add("old 0", behind=False)  # it keeps its place
    assert turns.this_pass(behind=True) is None
    assert turns.this_pass(behind=False) is not None, "it passes by those that are behind"
    for number in range(2 * IN_A_TURN):
        add(f"new {number}", behind=False)
    assert turns.this_pass(behind=False) is None
    first, second = [f"new {number}" for number in range(IN_A_TURN)], [f"new {IN_A_TURN + n}" for n in range(IN_A_TURN)]
    for expected in ([*first, "old 0"], [*second, "old 1"], ["old 2"]):
        made.clear()
        turns.make_calls()
        assert made == expected
    assert not len(turns)


async def test_what_a_task_waits_for_is_made_in_turn_and_not_at_all_if_it_is_cancelled() -> None:
    turns, made = ServingTurns(), list[str]()

    def fails() -> None:
        raise ValueError("broken")

    async def wait_for_failure() -> None:
        with pytest.raises(ValueError, match="broken"):
            await turns.call(fails)
        made.append("failed")

    turns.add("first", lambda turn: made.append("first"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for_failure)
        with trio.move_on_after(0):
            await turns.call(lambda: made.append("cancelled"))
        await until(lambda: len(turns) == 2)
        turns.make_calls()
    assert made == ["first", "failed"]


async def test_waiting_ends_at_once_while_a_call_waits() -> None:
    turns = ServingTurns()
    turns.add("a", lambda turn: None)
    with trio.fail_after(5):
        await turns.wait(math.inf)
        turns.discard("a")
        turns.wake()
        await turns.wait(math.inf)


def slow_rounds(monkeypatch: pytest.MonkeyPatch, slow: SlowWork) -> None:
    """Let every decision take a while."""
    decide = DeliveryRounds._decide

    def deciding(self: DeliveryRounds, active: Any, chunks: Any) -> Any:
        slow.do(active.name)
        return decide(self, active, chunks)

    monkeypatch.setattr(DeliveryRounds, "_decide", deciding)


def counted_tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the subscriptions that a task served, as they are served."""
    serve, served = DeliveryRounds._serve, list[str]()

    async def serving(self: DeliveryRounds, active: Any) -> None:
        served.append(active.name)
        await serve(self, active)

    monkeypatch.setattr(DeliveryRounds, "_serve", serving)
    return served


async def received(peer: Any, counts: Counter[str], expected: int) -> None:
    """Read deliveries until every subscription of this peer had so many messages."""
    own = Counter[str]()
    while len(own) < 10 or min(own.values()) < expected:
        frame = await peer.receive()
        own[frame.properties["subscription_id"]] += int(frame.properties["count"])
    counts.update(own)


@pytest.mark.parametrize("recent", [True, False], ids=["in memory", "on disk"])
@pytest.mark.parametrize("mode", ["shared", "key_shared"])
async def test_one_publish_to_many_subscriptions_is_served_over_several_passes(
    a_broker, monkeypatch, slow, mode, recent
) -> None:
    storage = {} if recent else {"tail_bytes": 0}
    with trio.fail_after(60):
        async with a_broker(storage=storage) as connect:
            peers = await subscribed(connect, mode)
            publisher = await a_fast_peer(connect)
            slow_rounds(monkeypatch, slow)
            in_tasks = counted_tasks(monkeypatch)
            trio.lowlevel.add_instrument(slow)
            counts = Counter[str]()
            try:
                async with trio.open_nursery() as nursery:
                    for peer in peers:
                        nursery.start_soon(received, peer, counts, 3)
                    for _ in range(3):
                        await publisher.publish("a", b"x")
            finally:
                trio.lowlevel.remove_instrument(slow)
            assert counts == dict.fromkeys(counts, 3)
            assert len(counts) == SUBSCRIPTIONS
            assert bool(in_tasks) is not recent
    assert max(map(len, slow.passes)) <= 2 * IN_A_TURN + 1  # the pass's own, the turn of those that wait
    order = [name for each in slow.passes for name in each]
    assert set(order[: 2 * SUBSCRIPTIONS]) == set(counts), "one was served again and again before another"


async def test_subscriptions_that_are_due_together_are_saved_over_several_passes(a_broker, monkeypatch, slow) -> None:
    take = CursorSaver._take

    def taking(self: CursorSaver, active: Any, now: float) -> Any:
        slow.do(active.name)
        return take(self, active, now)

    with trio.fail_after(60):
        async with a_broker() as connect:
            await subscribed(connect, "shared")
            publisher = await a_fast_peer(connect)
            monkeypatch.setattr(CursorSaver, "_take", taking)
            trio.lowlevel.add_instrument(slow)
            try:
                await publisher.publish("a", b"x")
                names = {f"s{number}" for number in range(SUBSCRIPTIONS)}
                await until(lambda: {name for each in slow.passes for name in each} >= names)
                saved = [connect.broker.subscriptions.active(name) for name in names]
                await until(lambda: not any(active.subscription.dirty for active in saved))
            finally:
                trio.lowlevel.remove_instrument(slow)
    assert max(map(len, slow.passes)) <= IN_A_TURN


async def test_a_peer_that_had_joined_many_subscriptions_leaves_them_over_several_passes(
    a_broker, monkeypatch, slow
) -> None:
    leave = DeliveryRounds.leave

    def leaving(self: DeliveryRounds, active: Any, sink: Any, *, died: bool) -> None:
        slow.do(active.name)
        leave(self, active, sink, died=died)

    with trio.fail_after(60):
        async with a_broker() as connect:
            peers = await subscribed(connect, "shared")
            monkeypatch.setattr(DeliveryRounds, "leave", leaving)
            trio.lowlevel.add_instrument(slow)
            try:
                for peer in peers:
                    await peer.stream.aclose()
                left = [connect.broker.subscriptions.active(f"s{number}") for number in range(SUBSCRIPTIONS)]
                await until(lambda: not any(active.sinks for active in left))
            finally:
                trio.lowlevel.remove_instrument(slow)
    assert {name for each in slow.passes for name in each} == {f"s{number}" for number in range(SUBSCRIPTIONS)}
    assert max(map(len, slow.passes)) <= IN_A_TURN + 1  # one more if the pass was not over yet


async def test_subscriptions_on_many_partitions_are_saved_in_several_transactions(a_broker, monkeypatch) -> None:
    together = []
    put_then = MetadataStore.put_then

    def counting(self: MetadataStore, values: Any, done: Any) -> None:
        together.append(len(values))
        put_then(self, values, done)

    monkeypatch.setattr(cursor_saver, "AT_ONCE", 8)
    with trio.fail_after(60):
        async with a_broker() as connect:
            operator = await a_topic(connect, topic="wide", partitions="4")
            peer = await a_fast_peer(connect)
            for number in range(20):
                await operator.call("create_subscription", subscription_id=f"s{number}", topic="wide")
                await peer.ask(7, 2, subscription_id=f"s{number}")
            monkeypatch.setattr(MetadataStore, "put_then", counting)
            for partition in range(4):
                await operator.publish("wide", b"x", partition=str(partition))
            saved = [connect.broker.subscriptions.active(f"s{number}") for number in range(20)]
            await until(lambda: not any(active.subscription.dirty for active in saved))
    assert max(together) <= 8 + 4 + 3  # the last one as a whole, and the heads


async def test_a_topic_is_deleted_with_its_subscriptions_in_several_transactions(a_broker, monkeypatch) -> None:
    together = []
    delete = MetadataStore.delete

    async def counting(self: MetadataStore, *keys: str) -> None:
        together.append(len(keys))
        await delete(self, *keys)

    monkeypatch.setattr(subscription_manager, "KEYS_AT_ONCE", 10)
    with trio.fail_after(60):
        async with a_broker() as connect:
            await subscribed(connect, "shared")
            operator = await connect()
            monkeypatch.setattr(MetadataStore, "delete", counting)
            await operator.call("delete_topic", topic="a")
            assert await operator.call("list_subscriptions") == []
            metadata = connect.broker.engine.metadata
            assert not [*metadata.under("subscription/"), *metadata.under("cursor/")]
    assert max(together) <= 10 + 3
    assert sum(together) >= 3 * SUBSCRIPTIONS


async def test_a_lone_subscription_is_served_in_the_pass_of_the_publish(a_broker, monkeypatch) -> None:
    waited = []
    with trio.fail_after(60):
        async with a_broker() as connect:
            publisher = await a_topic(connect)
            await publisher.call("create_subscription", subscription_id="s", topic="a")
            subscriber = await joined(connect)
            await publisher.publish("a", b"x")
            await subscriber.receive()
            add = ServingTurns.add
            monkeypatch.setattr(ServingTurns, "add", lambda *given: waited.append(given[1]) or add(*given))
            monkeypatch.setattr(pacing, "TURN", 60.0)  # however busy the machine is
            for _ in range(10):
                await publisher.publish("a", b"x")
                assert (await subscriber.receive()).properties["count"] == "1"
            assert not waited
