"""Producers of the async client, under every event loop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from qb import (
    AsyncBrokerClient,
    BufferFull,
    ConnectionLost,
    Delivery,
    PublishFailed,
    PublishUncertain,
    UnknownTopic,
    UsedAfterFork,
)
from tests.support.brokers import ROOT, BrokerProcess
from tests.support.event_loops import RUNNERS, UVLOOP, Main
from tests.support.forks import child, raised_by
from tests.support.scripted_broker import Plan, ScriptedBroker

pytestmark = pytest.mark.timeout(60)
AN_HOUR = 3_600_000  # a linger that no test waits for

Run = Callable[[Main], object]


@pytest.fixture(params=RUNNERS)
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a main function under an event loop, for a bounded time."""
    return RUNNERS[request.param]


@pytest.fixture
def scripted() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_send_returns_at_once_with_a_handle_to_await(run: Run, scripted: ScriptedBroker) -> None:
    async def main() -> None:
        async with AsyncBrokerClient(port=scripted.port) as client:
            async with client.producer("orders", linger_ms=AN_HOUR) as producer:
                handles = [producer.send(body, key="k") for body in numbered(5)]
                assert not handles[0].done()
                with pytest.raises(RuntimeError, match="await the handle"):
                    handles[0].result()
                await producer.flush()
                assert handles[4].done()
                assert handles[4].result().offset == 4
            assert [(await handle).offset for handle in handles] == [0, 1, 2, 3, 4]
            async with client.producer("orders", linger_ms=1) as producer:
                assert (await producer.send(b"lone")).offset == 5
            async with client.producer("orders", linger_ms=AN_HOUR, batch_size=2) as producer:
                first, second = producer.send(b"a"), producer.send(b"b")
                assert ((await first).offset, (await second).offset) == (6, 7)

    run(main)
    assert scripted.bodies == [*numbered(5), b"lone", b"a", b"b"]


def test_many_tasks_wait_for_handles_of_one_batch_and_one_that_is_cancelled_harms_none(
    run: Run, scripted: ScriptedBroker
) -> None:
    async def main() -> None:
        offsets: list[int] = []

        async def wait(handle: object) -> None:
            offsets.append((await handle).offset)  # type: ignore[misc]

        async with AsyncBrokerClient(port=scripted.port) as client, client.producer("o", linger_ms=AN_HOUR) as producer:
            async with anyio.create_task_group() as tasks:
                for body in numbered(10):
                    tasks.start_soon(wait, producer.send(body))
                with anyio.move_on_after(0):
                    await producer.send(b"cancelled")
                await producer.flush()
            assert sorted(offsets) == list(range(10))

    run(main)
    assert scripted.bodies == [*numbered(10), b"cancelled"]


def test_a_full_buffer_raises_and_room_waits_for_it(run: Run) -> None:
    async def main() -> None:
        with ScriptedBroker(Plan(silent=True)) as broker:
            async with AsyncBrokerClient(port=broker.port) as client:
                client._routes.learn("orders", 1, float("inf"))
                async with client.producer("orders", max_buffered_bytes=300) as producer:
                    await producer.room()
                    producer.send(b"x" * 300)
                    with pytest.raises(BufferFull):
                        producer.send(b"not taken")
                    broker.drop_connections()  # the next one is answered
                    for body in numbered(20):
                        await producer.room()
                        producer.send(body * 100)
            assert broker.bodies == [b"x" * 300, *[body * 100 for body in numbered(20)]]

    run(main)


def test_errors_reach_the_handle_an_async_callback_and_the_log(
    run: Run, scripted: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.refuse[b"bad"] = "UNKNOWN_TOPIC"
    deliveries: list[Delivery] = []

    async def on_delivery(delivery: Delivery) -> None:
        await anyio.lowlevel.checkpoint()
        deliveries.append(delivery)

    async def main() -> None:
        async with AsyncBrokerClient(port=scripted.port) as client:
            async with client.producer("orders", on_delivery=on_delivery) as producer:
                good, bad = producer.send(b"good"), producer.send(b"bad")
                with pytest.raises(UnknownTopic):
                    await bad
                assert (await good).offset == 0
            with pytest.raises(PublishFailed):
                async with client.producer("orders") as producer:
                    producer.send(b"bad")

    run(main)
    assert [(each.value, type(each.error)) for each in deliveries] == [(b"good", type(None)), (b"bad", UnknownTopic)]
    assert caplog.text.count("1 message for topic orders is not stored: refused: UNKNOWN_TOPIC") == 2


def test_the_end_of_the_clients_block_closes_its_producers(run: Run, scripted: ScriptedBroker) -> None:
    async def main() -> None:
        async with AsyncBrokerClient(port=scripted.port) as client:
            handle = client.producer("orders", linger_ms=AN_HOUR).send(b"one")
        assert handle.result().offset == 0

    run(main)


def test_a_cancelled_client_fails_what_was_not_sent_and_ends(run: Run, scripted: ScriptedBroker) -> None:
    async def main() -> None:
        handles = []
        with anyio.CancelScope() as scope:
            async with AsyncBrokerClient(port=scripted.port) as client:
                producer = client.producer("orders", linger_ms=AN_HOUR)
                handles.append(producer.send(b"one"))
                scope.cancel()
                await anyio.sleep_forever()
        with pytest.raises((ConnectionLost, PublishUncertain)):
            await handles[0]

    run(main)
    assert scripted.bodies == []


def test_acks_none_says_so(run: Run, scripted: ScriptedBroker) -> None:
    async def main() -> None:
        async with AsyncBrokerClient(port=scripted.port) as client, client.producer("o", acks="none") as producer:
            assert (await producer.send(b"one")).durability == "none"

    run(main)
    scripted.wait_for(lambda: scripted.messages)


def test_a_lost_connection_loses_and_doubles_nothing(run: Run) -> None:
    async def main() -> None:
        with ScriptedBroker(Plan(lose_acks_after=700)) as broker:
            async with AsyncBrokerClient(port=broker.port) as client:
                async with client.producer("orders", batch_size=100) as producer:
                    handles = [producer.send(body) for body in numbered(3000)]
                assert [(await handle).offset for handle in handles] == list(range(3000))
            assert broker.bodies == numbered(3000)

    run(main)


@pytest.mark.process
def test_kill_9_of_the_broker_in_the_middle_loses_and_doubles_nothing(run: Run, broker: BrokerProcess) -> None:
    total = 20_000

    async def main() -> None:
        async with AsyncBrokerClient(port=broker.port) as client:
            await client.create_topic("t")
            async with client.producer("t", batch_size=200, linger_ms=1, max_buffered_bytes=1 << 18) as producer:
                handles = []
                for number in range(total):
                    await producer.room()
                    handles.append(producer.send(b"%d" % number))
                    if number == total // 2:
                        await anyio.to_thread.run_sync(broker.restart)
            assert [(await handle).offset for handle in handles] == list(range(total))
            stored = await client.fetch("t", max_messages=total + 1, max_bytes=1 << 24)
            assert [message.body for message in stored] == numbered(total)

    run(main)


@pytest.mark.skipif(UVLOOP in os.environ, reason="what a fork makes of uvloop is not ours to say")
def test_a_child_of_fork_uses_nothing_of_the_parent(run: Run, scripted: ScriptedBroker) -> None:
    async def main() -> None:
        async with AsyncBrokerClient(port=scripted.port) as client:
            async with client.producer("orders", linger_ms=AN_HOUR) as producer:
                handle = producer.send(b"of the parent")
                sent = partial(producer.send, b"of the child")
                in_child = child(lambda: (raised_by(sent), handle.done(), raised_by(handle.result)))
                assert in_child == (UsedAfterFork.__name__, True, UsedAfterFork.__name__)
            assert (await handle).offset == 0

    run(main)
    assert scripted.bodies == [b"of the parent"]


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.skipif(UVLOOP in os.environ, reason="this is that run")
def test_all_of_this_holds_under_uvloop() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {UVLOOP: "yes"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
