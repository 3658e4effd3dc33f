"""AsyncConsumer, the trio member of a group, against a real broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import trio

from qb import AsyncBrokerClient, AsyncConsumer, BrokerUnavailable, Message, StaleGeneration
from tests.support.brokers import BrokerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(40)
PARTITIONS = 4  # of the topic that each test has


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def take(consumer: AsyncConsumer, count: int) -> list[Message]:
    """Return so many messages; the last one stays in hand."""
    found: list[Message] = []
    async for message in consumer:
        found.append(message)
        if len(found) == count:
            break
    return found


async def committed(client: AsyncBrokerClient, group: str) -> dict[int, int]:
    return {row["partition"]: row["offset"] for row in await client.committed_offsets(group)}


async def test_every_message_comes_in_order_and_the_group_goes_on_where_it_left(
    shared: BrokerProcess, topic: str
) -> None:
    async with AsyncBrokerClient(port=shared.port) as client:
        await client.publish_many(topic, numbered(5_000))
        async with client.consumer("a1", topic) as consumer:
            found = await take(consumer, 3_000)
        async with client.consumer("a1", topic) as consumer:
            found = found[:-1] + await take(consumer, 2_001)  # the last one was in hand
    assert Counter(message.body for message in found) == Counter(numbered(5_000))
    for partition in range(4):
        offsets = [message.offset for message in found if message.partition == partition]
        assert offsets == list(range(len(offsets)))


async def test_polls_commits_and_seeks(shared: BrokerProcess, topic: str) -> None:
    async with AsyncBrokerClient(port=shared.port) as client:
        await client.publish_many(topic, numbered(10), partition=0)
        async with client.consumer("a2", topic, max_poll_records=4, auto_commit=False) as consumer:
            messages = await consumer.poll(20)
            assert [message.body for message in messages] == numbered(4)
            await consumer.commit(messages[1])
            assert await committed(client, "a2") == {0: 2}
            await consumer.commit()
            assert (await committed(client, "a2"))[0] == 4
            consumer.seek(topic, 0, 8)
            assert [message.body for message in await consumer.poll(20)] == [b"8", b"9"]
            assert await consumer.poll(0.1) == []
            with pytest.raises(StaleGeneration):
                consumer.seek(topic, 77, 0)


async def test_a_handler_is_awaited_and_gets_its_message_again_if_it_raised(shared: BrokerProcess, topic: str) -> None:
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        await trio.lowlevel.checkpoint()
        handled.append(message.body)
        if handled == [b"0", b"1"]:
            raise ZeroDivisionError
        if message.body == b"2":
            consumer.stop()

    async with AsyncBrokerClient(port=shared.port) as client:
        await client.publish_many(topic, numbered(3), partition=0)
        async with client.consumer("a3", topic) as consumer:
            with pytest.raises(ZeroDivisionError):
                await consumer.run(handle)
            await consumer.run(handle)
        assert (await committed(client, "a3"))[0] == 3
    assert handled == [b"0", b"1", b"1", b"2"]


async def test_consumers_share_the_partitions_and_leave_even_if_cancelled(shared: BrokerProcess, topic: str) -> None:
    handled: Counter[bytes] = Counter()
    consumers: list[AsyncConsumer] = []

    async def work(client: AsyncBrokerClient) -> None:
        async with client.consumer("a4", topic, session_timeout=1.5) as consumer:
            consumers.append(consumer)
            async for message in consumer:
                handled[message.body] += 1

    async with AsyncBrokerClient(port=shared.port) as client:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(work, client)
            await until(lambda: sorted(len(each.assignment) for each in consumers) == [2, 2])
            await client.publish_many(topic, numbered(2_000))
            await until(lambda: sum(handled.values()) >= 2_000)
            nursery.cancel_scope.cancel()
        assert (await client.describe_group("a4"))["members"] == []
    assert handled == Counter(numbered(2_000))


async def test_a_handler_that_never_waits_does_not_cost_the_membership(shared: BrokerProcess, topic: str) -> None:
    async with AsyncBrokerClient(port=shared.port) as client:
        await client.publish_many(topic, numbered(100_000))
        generations = set()
        async with client.consumer("a5", topic, session_timeout=1.0) as consumer:
            count = 0
            async for _ in consumer:
                generations.add(consumer._member.state._generation)
                count += 1
                if count == 100_000:
                    break
        assert len(generations) == 1


async def test_a_consumer_survives_kill_and_restart_of_the_broker(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker()
    async with AsyncBrokerClient(port=broker.port) as client:
        await client.create_topic("t", partitions=3)
        await client.publish_many("t", numbered(300))
        async with client.consumer("g", "t", session_timeout=2.0) as consumer:
            before = [message.body for message in await take(consumer, 150)]
            await consumer.commit()
            await trio.to_thread.run_sync(broker.restart)
            after = [message.body for message in await take(consumer, 150)]
    assert Counter(before + after) == Counter(numbered(300))


async def test_a_consumer_without_a_broker_says_so_at_once() -> None:
    with pytest.raises(BrokerUnavailable, match="nothing listens"):
        async with AsyncConsumer("g", "t", port=1):
            pytest.fail("there is no broker")


async def test_a_consumer_outside_its_block_says_how_to_open_it() -> None:
    with pytest.raises(RuntimeError, match="use it inside `async with`"):
        await AsyncConsumer("g", "t", port=1).poll()
