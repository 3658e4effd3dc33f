"""Subscriptions in AsyncBrokerClient, against a real broker process."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from qb import AsyncBrokerClient, Message, NotJoined, SubscriptionRemoved, UnknownSubscription
from qb.clients.aio.methods.subscriptions import AsyncSubscriptionMethods
from qb.clients.aio.subscribing.joined_subscription import AsyncJoinedSubscription
from qb.clients.blocking.methods.subscriptions import SubscriptionMethods
from tests.support.collecting import PATIENCE, Collector, numbered
from tests.support.peers import die_with
from tests.support.waiting import holds_during

pytestmark = [pytest.mark.process, pytest.mark.timeout(40)]

AT_ONCE = {"initial": 0.0, "cap": 0.0}


@pytest.fixture
async def client(broker: Any) -> AsyncIterator[AsyncBrokerClient]:
    """A client, and a topic `a`."""
    async with AsyncBrokerClient(port=broker.port) as client:
        await client.create_topic("a")
        with trio.fail_after(PATIENCE):
            yield client


async def ready(client: AsyncBrokerClient, count: int = 0, **options: Any) -> None:
    """Publish so many messages to `a`, and make subscription `s` on it."""
    if count:
        await client.publish_many("a", numbered(0, count))
    await client.create_subscription("s", "a", **options)


async def lag(client: AsyncBrokerClient) -> int:
    found: int = (await client.describe_subscription("s"))["lag"]
    return found


async def none_redelivered(client: AsyncBrokerClient) -> bool:
    return (await client.describe_subscription("s"))["redelivered"] == 0


class AsyncCollector:
    """An async handler that remembers what it was given; `then` is awaited after each is noted, and may raise."""

    def __init__(self, then: Callable[[Message], Any] | None = None) -> None:
        self.messages: list[Message] = []
        self._then = then
        self._changed = trio.Event()

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)
        self._changed.set()
        self._changed = trio.Event()
        if self._then:
            await self._then(message)

    async def wait_for(self, count: int) -> list[bytes]:
        await self.wait_until(lambda: len(self.messages) >= count)
        return self.bodies

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]


def test_both_clients_offer_the_same_with_the_same_arguments() -> None:
    for name, ours in vars(SubscriptionMethods).items():
        if inspect.isfunction(ours):
            theirs = vars(AsyncSubscriptionMethods)[name]
            assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters), name


# Handlers


async def test_the_backlog_comes_first_then_live_in_order(client: AsyncBrokerClient) -> None:
    await ready(client, 3000)
    collect = AsyncCollector()
    async with await client.subscribe_to_subscription("s", collect):
        await client.publish_many("a", numbered(3000, 4000))
        assert await collect.wait_for(4000) == numbered(0, 4000)
    assert await lag(client) == 0


async def test_a_handler_that_is_not_async_runs_in_a_thread(client: AsyncBrokerClient) -> None:
    await ready(client, 500)
    threads: set[int] = set()
    collect = Collector(lambda message: threads.add(threading.get_ident()))
    async with await client.subscribe_to_subscription("s", collect):
        assert await trio.to_thread.run_sync(collect.wait_for, 500) == numbered(0, 500)
    assert threading.get_ident() not in threads
    assert await lag(client) == 0


async def test_an_exception_brings_the_message_again_and_then_to_the_dead_letters(client: AsyncBrokerClient) -> None:
    await ready(client, 3, max_deliveries=2, backoff=AT_ONCE)

    async def fail(message: Message) -> None:
        if message.offset == 1:
            raise ValueError(f"attempt {message.attempt}")

    collect = AsyncCollector(fail)
    async with await client.subscribe_to_subscription("s", collect):
        while not (letters := await client.dead_letters("s")):
            pass
    assert [(letter["offset"], letter["reason"]) for letter in letters] == [(1, "ValueError: attempt 2")]
    assert sorted((seen.offset, seen.attempt) for seen in collect.messages) == [(0, 1), (1, 1), (1, 2), (2, 1)]


async def test_a_batch_handler_gets_all_messages_in_lists(client: AsyncBrokerClient) -> None:
    await ready(client, 1000)
    collect = AsyncCollector()

    async def handler(messages: list[Message]) -> None:
        for message in messages:
            await collect(message)

    async with await client.subscribe_to_subscription("s", batch_handler=handler):
        assert await collect.wait_for(1000) == numbered(0, 1000)
    assert await lag(client) == 0


async def test_concurrency_runs_so_many_handlers_at_once(client: AsyncBrokerClient) -> None:
    await ready(client, 8)
    waiting, together = 0, trio.Event()

    async def meet(message: Message) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 4:
            together.set()
        await together.wait()

    collect = AsyncCollector(meet)
    async with await client.subscribe_to_subscription("s", collect, concurrency=4):
        assert sorted(await collect.wait_for(8)) == numbered(0, 8)
    assert await lag(client) == 0


async def test_suspects_run_alone_and_then_all_hands_are_busy_again(client: AsyncBrokerClient, broker: Any) -> None:
    await ready(client, 6)
    await trio.to_thread.run_sync(die_with, broker.port, "s", 6)
    await client.publish_many("a", numbered(6, 10))
    waiting, together = 0, trio.Event()
    running, most = 0, 0

    async def handler(message: Message) -> None:
        nonlocal waiting, running, most
        if message.attempt == 1:
            waiting += 1
            if waiting == 4:
                together.set()
            await together.wait()
            return
        running += 1
        most = max(most, running)
        await lag(client)  # a round trip: the others have the chance to do it wrong
        running -= 1

    collect = AsyncCollector(handler)
    async with await client.subscribe_to_subscription("s", collect, concurrency=4):
        assert sorted(await collect.wait_for(10)) == numbered(0, 10)
        await together.wait()
    assert await lag(client) == 0
    assert most == 1


async def test_a_client_runs_the_handlers_of_all_its_subscriptions_one_at_a_time(client: AsyncBrokerClient) -> None:
    await client.publish_many("a", numbered(0, 50))
    running, most = 0, 0

    async def handler(message: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.lowlevel.checkpoint()
        running -= 1

    collect = AsyncCollector(handler)
    for name in ("x", "y"):
        await client.create_and_subscribe(name, "a", collect)
    await collect.wait_for(100)
    assert most == 1


async def test_a_handler_longer_than_the_deadline_is_not_redelivered(client: AsyncBrokerClient) -> None:
    await ready(client, 2, ack_deadline=0.3)

    async def dawdle(message: Message) -> None:
        if message.offset == 0:
            await holds_during(1.0, partial(none_redelivered, client))

    collect = AsyncCollector(dawdle)
    async with await client.subscribe_to_subscription("s", collect):
        await collect.wait_for(2)
    assert await none_redelivered(client)
    assert await lag(client) == 0


@pytest.mark.parametrize("threaded", [False, True])
async def test_acks_by_hand(client: AsyncBrokerClient, threaded: bool) -> None:
    await ready(client, 3, backoff=AT_ONCE)

    def settle(message: Message) -> None:
        if message.offset == 1 and message.attempt == 1:
            message.nack(delay=0.01, reason="later")
        elif message.offset == 2:
            message.extend(60)
        else:
            message.ack()

    async def settle_async(message: Message) -> None:
        settle(message)

    handler = settle if threaded else settle_async
    async with await client.subscribe_to_subscription("s", handler, ack="manual"):
        while await lag(client) > 1:
            pass
        assert "in flight" in await client.explain("s", 2)
        assert (await client.describe_subscription("s"))["redelivered"] == 1


async def test_unsubscribing_lets_a_handler_finish_or_cancels_it(client: AsyncBrokerClient) -> None:
    await ready(client, 3)
    release = trio.Event()

    async def wait(message: Message) -> None:
        await release.wait()

    collect = AsyncCollector(wait)
    subscriber = await client.subscribe_to_subscription("s", collect)
    await collect.wait_for(1)
    await subscriber.unsubscribe(timeout=0.01)
    assert collect.bodies == [b"0"]
    assert await lag(client) == 3, "the cancelled one is handed back"
    subscriber = await client.subscribe_to_subscription("s", collect)
    await collect.wait_for(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.unsubscribe_from_subscription, "s")
        await trio.testing.wait_all_tasks_blocked()
        release.set()
    assert await lag(client) == 3 - len(collect.messages) + 1
    with pytest.raises(NotJoined):
        await client.unsubscribe_from_subscription("s")


async def test_a_handler_may_unsubscribe_itself(client: AsyncBrokerClient) -> None:
    await ready(client, 5)

    async def leave(message: Message) -> None:
        if message.offset == 1:
            await client.unsubscribe_from_subscription("s")

    collect = AsyncCollector(leave)
    subscriber = await client.subscribe_to_subscription("s", collect)
    await subscriber.wait()
    assert collect.bodies == numbered(0, 2)
    assert await lag(client) == 3


async def test_a_handler_may_disconnect_its_client(broker: Any, client: AsyncBrokerClient) -> None:
    await ready(client, 1)

    async def leave(message: Message) -> None:
        await other.disconnect()

    async with AsyncBrokerClient(port=broker.port) as other:
        await (await other.subscribe_to_subscription("s", leave)).wait()
    assert await lag(client) == 0


async def test_a_deleted_subscription_ends_its_subscribers_with_a_typed_error(client: AsyncBrokerClient) -> None:
    await ready(client)
    subscriber = await client.subscribe_to_subscription("s", AsyncCollector())
    await client.delete_subscription("s")
    with pytest.raises(SubscriptionRemoved):
        await subscriber.wait()
    with pytest.raises(UnknownSubscription):
        await client.subscribe_to_subscription("s", AsyncCollector())


async def test_system_exit_in_a_handler_ends_the_subscriber_and_not_the_program(client: AsyncBrokerClient) -> None:
    await ready(client, 1)

    async def leave(message: Message) -> None:
        raise SystemExit(3)

    subscriber = await client.subscribe_to_subscription("s", leave)
    with pytest.raises(SystemExit):
        await subscriber.wait()
    assert "SystemExit: 3" in await client.explain("s", 0)


async def test_a_subscription_of_its_own_is_deleted_when_it_ends(client: AsyncBrokerClient) -> None:
    await client.publish_many("a", numbered(0, 10))
    collect = AsyncCollector()
    async with await client.subscribe("a", 7, collect):
        assert await collect.wait_for(3) == numbered(7, 10)
        assert len(await client.list_subscriptions("a")) == 1
    assert await client.list_subscriptions() == []


async def test_a_subscriber_goes_on_by_itself_when_the_broker_is_killed(broker: Any, client: AsyncBrokerClient) -> None:
    await ready(client, 2000)
    killed = False

    async def kill_in_the_middle(message: Message) -> None:
        nonlocal killed
        if message.offset == 1000 and not killed:
            killed = True
            await trio.to_thread.run_sync(broker.restart)

    collect = AsyncCollector(kill_in_the_middle)
    subscriber = await client.subscribe_to_subscription("s", collect)
    await collect.wait_until(lambda: killed)
    await client.publish_many("a", numbered(2000, 3000))
    await collect.wait_until(lambda: set(numbered(0, 3000)) <= set(collect.bodies))
    while await lag(client):
        pass
    assert subscriber.error is None


async def test_a_cancelled_client_cancels_its_handlers_and_leaves_in_good_order(
    broker: Any, client: AsyncBrokerClient
) -> None:
    await ready(client, 5, max_deliveries=1)

    async def stay(message: Message) -> None:
        await trio.sleep_forever()

    collect = AsyncCollector(stay)
    with trio.CancelScope() as scope:
        async with AsyncBrokerClient(port=broker.port) as other:
            await other.subscribe_to_subscription("s", collect)
            await collect.wait_for(1)
            scope.cancel()
    described = await client.describe_subscription("s")
    assert (described["subscribers"], described["lag"]) == ([], 5)
    assert await client.dead_letters("s") == [], "handed back, not taken for a death"


async def test_cancelling_the_caller_reaches_a_handler_at_once_and_starts_no_other(
    broker: Any, client: AsyncBrokerClient
) -> None:
    await ready(client, 5)
    ended: list[str] = []

    async def stay(message: Message) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            ended.append("cancelled while the block was still entered" if other._link.up else "too late")
            raise

    collect = AsyncCollector(stay)
    with trio.CancelScope() as scope:
        async with AsyncBrokerClient(port=broker.port) as other:
            await other.subscribe_to_subscription("s", collect, concurrency=2)
            await collect.wait_for(2)
            scope.cancel()
            with trio.CancelScope(shield=True):  # the block goes on, its handlers do not
                while len(ended) < 2:
                    await trio.testing.wait_all_tasks_blocked()
                assert trio.current_effective_deadline() == float("inf")
    assert scope.cancelled_caught
    assert ended == ["cancelled while the block was still entered"] * 2
    assert len(collect.messages) == 2
    assert await lag(client) == 5


async def test_a_fault_of_ours_in_the_service_of_a_handler_is_raised_by_the_block(
    broker: Any, client: AsyncBrokerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ready(client, 1)

    async def fail(joined: AsyncJoinedSubscription) -> bool:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(AsyncJoinedSubscription, "work", fail)
    with pytest.raises(ZeroDivisionError, match="a fault"):
        async with AsyncBrokerClient(port=broker.port) as other:
            await other.subscribe_to_subscription("s", AsyncCollector())
            await trio.sleep_forever()
    assert (await client.describe_subscription("s"))["subscribers"] == []


async def test_no_task_outlives_the_block(broker: Any, client: AsyncBrokerClient) -> None:
    await ready(client, 5)

    def ours() -> int:
        """Count the tasks of clients in the whole run."""
        found, left = 0, [trio.lowlevel.current_root_task()]
        while left:
            task = left.pop()
            assert task is not None
            found += task.name.startswith("qb ")
            left += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        return found

    before = ours()
    async with AsyncBrokerClient(port=broker.port) as other:
        collect = AsyncCollector()
        await other.subscribe_to_subscription("s", collect)
        await collect.wait_for(5)
        assert ours() > before
    assert ours() == before


async def test_by_hand_the_next_of_a_key_comes_when_the_one_before_is_settled(client: AsyncBrokerClient) -> None:
    await ready(client, mode="key_shared")
    for number in range(3):
        await client.publish("a", b"%d" % number, key="k")
    collect = AsyncCollector()
    await client.subscribe_to_subscription("s", collect, ack="manual", concurrency=2)
    for number in range(3):
        await collect.wait_for(number + 1)
        assert len(collect.messages) == number + 1
        collect.messages[-1].ack()
    while await lag(client):
        pass


# async for


async def test_a_loop_gets_the_backlog_then_live_messages_and_acks_each_when_it_asks_for_the_next(
    client: AsyncBrokerClient,
) -> None:
    await ready(client, 600)
    got: list[bytes] = []
    async for message in client.messages("s"):
        got.append(message.body)
        if len(got) == 600:
            await client.publish("a", b"600")
        if len(got) == 601:
            break
    assert got == numbered(0, 601)
    gc.collect()
    while (await client.describe_subscription("s"))["subscribers"]:
        pass
    assert await lag(client) == 1, "the last one was not asked beyond"


async def test_breaking_out_of_a_loop_hands_back_without_counting_a_failure(client: AsyncBrokerClient) -> None:
    await ready(client, 5, max_deliveries=1)
    async for message in client.messages("s"):
        if message.offset == 2:
            break
    del message
    again = [(message.offset, message.attempt) async for message in first(client.messages("s"), 3)]
    assert again == [(2, 2), (3, 2), (4, 2)]
    assert await client.dead_letters("s") == []


async def first(messages: Any, count: int) -> AsyncIterator[Message]:
    async with messages:
        for _ in range(count):
            yield await messages.__anext__()


async def test_an_exception_in_an_async_with_block_nacks_the_message(client: AsyncBrokerClient) -> None:
    await ready(client, 5, max_deliveries=1)
    with pytest.raises(ValueError, match="no good"):
        async with client.messages("s") as messages:
            async for message in messages:
                if message.offset == 2:
                    raise ValueError("no good")
    while not (letters := await client.dead_letters("s")):
        pass
    assert [(letter["offset"], letter["reason"]) for letter in letters] == [(2, "ValueError: no good")]
    assert await lag(client) == 2


async def test_a_cancelled_loop_leaves_in_good_order(client: AsyncBrokerClient) -> None:
    await ready(client, 2, max_deliveries=1)
    seen: list[int] = []

    async def loop() -> None:
        nonlocal seen
        async with client.messages("s") as messages:
            async for message in messages:
                seen += [message.offset]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(loop)
        while await lag(client):
            pass
        nursery.cancel_scope.cancel()
    assert seen == [0, 1]
    assert (await client.describe_subscription("s"))["subscribers"] == []


async def test_a_loop_acks_by_hand_if_asked_to(client: AsyncBrokerClient) -> None:
    await ready(client, 4)
    async with client.messages("s", ack="manual") as messages:
        async for message in messages:
            if message.offset != 1:
                message.ack()
            if message.offset == 3:
                break
    assert await lag(client) == 1


async def test_a_loop_ends_when_its_client_disconnects(broker: Any, client: AsyncBrokerClient) -> None:
    await ready(client, 2)
    seen: list[int] = []
    async with AsyncBrokerClient(port=broker.port) as other, trio.open_nursery() as nursery:
        async for message in other.messages("s"):
            seen.append(message.offset)
            if len(seen) == 2:
                nursery.start_soon(other.disconnect)
    assert seen == [0, 1]
    assert await lag(client) == 0


async def test_a_loop_over_a_deleted_subscription_raises(client: AsyncBrokerClient) -> None:
    await ready(client, 1)
    with pytest.raises(SubscriptionRemoved):
        async for _ in client.messages("s"):
            await client.delete_subscription("s")
    with pytest.raises(UnknownSubscription):
        async for _ in client.messages("s"):
            pass


async def test_a_slow_loop_keeps_its_message(client: AsyncBrokerClient) -> None:
    await ready(client, 2, ack_deadline=0.3)
    async with client.messages("s") as messages:
        async for message in messages:
            assert message.attempt == 1
            if message.offset == 1:
                break
            await holds_during(1.0, partial(none_redelivered, client))
    assert await none_redelivered(client)


async def test_a_loop_goes_on_by_itself_when_the_broker_is_killed(broker: Any, client: AsyncBrokerClient) -> None:
    await ready(client, 100)
    wanted, killed = set(numbered(0, 101)), False
    async with client.messages("s") as messages:
        async for message in messages:
            wanted.discard(message.body)
            if message.offset == 50 and not killed:
                killed = True
                await trio.to_thread.run_sync(broker.restart)
                await client.publish("a", b"100")
            if not wanted:
                break
