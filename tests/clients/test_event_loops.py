"""What the async client promises holds under every event loop. The other tests of it run under trio."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from qb import (
    AsyncBrokerClient,
    AsyncConsumer,
    BrokerClient,
    BrokerUnavailable,
    Message,
    RequestTimedOut,
    UnknownTopic,
    UsedAfterFork,
)
from qb.clients.aio.event_loops.on_asyncio import AsyncioStream
from tests.support.brokers import ROOT, BrokerProcess
from tests.support.event_loops import NATIVE, RUNNERS, UVLOOP, Main
from tests.support.forks import Child
from tests.support.scripted_broker import Plan, ScriptedBroker
from tests.support.waiting import until_true

pytestmark = pytest.mark.timeout(60)

Run = Callable[[Main], object]


@pytest.fixture(params=RUNNERS)
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a main function under an event loop, for a bounded time."""
    return RUNNERS[request.param]


@pytest.fixture(params=NATIVE)
def run_native(request: pytest.FixtureRequest) -> Run:
    """Runs a main function under a loop of asyncio's kind, whose tasks can be cancelled by themselves."""
    return RUNNERS[request.param]


@pytest.fixture
def scripted() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


async def handled(client: AsyncBrokerClient, subscription_id: str) -> bool:
    return (await client.describe_subscription(subscription_id))["lag"] == 0


def numbered(count: int) -> list[bytes]:
    return [b"%d" % i for i in range(count)]


# Publishing and requests


def test_publishes_and_requests_are_answered(run: Run, scripted: ScriptedBroker) -> None:
    async def main() -> None:
        async with AsyncBrokerClient(port=scripted.port) as client:
            assert (await client.publish("orders", b"one")).offset == 0
            assert list(await client.publish_many("orders", numbered(5_000))) == list(range(1, 5_001))
            assert await client.ping() > 0
            with pytest.raises(UnknownTopic):
                await client.describe_topic("unknown")

    run(main)
    assert scripted.bodies == [b"one", *numbered(5_000)]
    assert scripted.connections == 1


def test_what_tasks_publish_at_a_time_is_stored_in_the_order_of_each(run: Run, scripted: ScriptedBroker) -> None:
    async def main() -> None:
        async with AsyncBrokerClient(port=scripted.port) as client:

            async def publish(task: int) -> None:
                for i in range(20):
                    await client.publish("orders", b"%d %d" % (task, i))

            async with anyio.create_task_group() as tasks:
                for task in range(16):
                    tasks.start_soon(publish, task)

    run(main)
    for task in range(16):
        assert [body for body in scripted.bodies if body.startswith(b"%d " % task)] == [
            b"%d %d" % (task, i) for i in range(20)
        ]
    assert len(scripted.bodies) == 320


def test_tasks_that_publish_at_a_time_share_a_write(run: Run, scripted: ScriptedBroker) -> None:
    async def main() -> None:
        async with AsyncBrokerClient(port=scripted.port) as client:
            stream = client._link._connection.stream
            assert stream is not None

            async def publish_all() -> int:
                """Return how many writes it takes."""
                with patch.object(stream, "send", wraps=stream.send) as send:
                    async with anyio.create_task_group() as tasks:
                        for number in numbered(32):
                            tasks.start_soon(client.publish, "orders", number)
                    return send.call_count

            await client.publish("orders", b"first")  # now nothing holds the right to write any more
            assert await publish_all() == 2  # the first one goes at once: no other publish was on its way
            assert await publish_all() == 1

    run(main)
    assert sorted(scripted.bodies) == sorted([b"first", *numbered(32), *numbered(32)])


def test_what_a_stream_of_asyncio_gives_away_early_does_not_end_a_receive(run_native: Run) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        _, stream = await asyncio.get_running_loop().create_connection(lambda: AsyncioStream(ours), sock=ours)
        taken = list[bytes]()
        arrived = asyncio.Event()

        def early(data: bytes) -> bytes:
            taken.append(data)
            arrived.set()
            return b"rest" if data == b"two" else b""

        stream.early = early
        receiving = asyncio.create_task(stream.receive(30))
        theirs.sendall(b"one")
        await arrived.wait()
        await anyio.lowlevel.checkpoint()
        assert not receiving.done()
        theirs.sendall(b"two")
        assert (await receiving, taken) == (b"rest", [b"one", b"two"])
        assert await stream.receive(0) is None
        theirs.close()
        assert await stream.receive(30) == b""
        stream.close()

    run_native(main)


def test_a_body_larger_than_all_buffers_arrives_whole(run: Run) -> None:
    body = os.urandom(8 << 20)
    with ScriptedBroker(max_message_size=len(body)) as broker:

        async def main() -> None:
            async with AsyncBrokerClient(port=broker.port) as client:
                await client.publish("orders", body)
                await client.publish("orders", b"next")

        run(main)
        assert broker.bodies == [body, b"next"]


def test_a_publish_whose_ack_is_lost_is_stored_once(run: Run) -> None:
    with ScriptedBroker(Plan(lose_acks_after=1)) as broker:

        async def main() -> None:
            async with AsyncBrokerClient(port=broker.port) as client:
                assert (await client.publish("orders", b"x")).duplicate

        run(main)
        assert (broker.bodies, broker.connections) == ([b"x"], 2)


def test_a_broker_that_is_not_there_is_named(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def main() -> None:
        with pytest.raises(BrokerUnavailable, match=f"nothing listens on localhost:{port}"):
            async with AsyncBrokerClient("localhost", port):
                pytest.fail("there is no broker")

    run(main)


def test_a_silent_broker_times_out_and_is_given_up(run: Run) -> None:
    with ScriptedBroker(Plan(silent=True)) as broker:

        async def main() -> None:
            async with AsyncBrokerClient(
                port=broker.port, request_timeout=0.05, heartbeat_interval=0.1, connect_wait=10
            ) as client:
                with pytest.raises(RequestTimedOut):
                    await client.ping()
                await anyio.to_thread.run_sync(broker.wait_for, lambda: broker.connections == 2)

        run(main)


# Subscriptions, groups and transactions, at a real broker


@pytest.mark.process
def test_handlers_loops_and_consumers_get_every_message(run: Run, shared: BrokerProcess, topic: str) -> None:
    bodies, pushed, threads, looped, consumed = set(numbered(500)), set(), set(), set(), set()

    async def handle(message: Message) -> None:
        pushed.add(bytes(message.body))

    def handle_in_thread(message: Message) -> None:
        assert threading.current_thread() is not threading.main_thread()
        threads.add(bytes(message.body))
        message.ack()

    async def main() -> None:
        async with AsyncBrokerClient(port=shared.port) as client:
            async with client.transaction(topic) as transaction:
                await transaction.publish_many(topic, numbered(500))
            async with (
                await client.create_and_subscribe(f"{topic}-a", topic, handle, concurrency=4),
                await client.create_and_subscribe(f"{topic}-b", topic, handle_in_thread, ack="manual"),
            ):
                for name in (f"{topic}-a", f"{topic}-b"):
                    await until_true(partial(handled, client, name))
            await client.create_subscription(f"{topic}-c", topic)
            async with client.messages(f"{topic}-c") as messages:
                async for message in messages:
                    looped.add(bytes(message.body))
                    if len(looped) == 500:
                        break
        async with AsyncConsumer(topic, topic, port=shared.port) as consumer:
            while len(consumed) < 500:
                consumed.update(bytes(message.body) for message in await consumer.poll())

    run(main)
    assert pushed == threads == looped == consumed == bodies


@pytest.mark.process
def test_what_a_consumer_has_handled_is_committed_when_its_block_is_left(
    run: Run, shared: BrokerProcess, topic: str
) -> None:
    async def main() -> None:
        async with AsyncBrokerClient(port=shared.port) as client:
            await client.publish_many(topic, numbered(3))
            async with AsyncConsumer(topic, topic, port=shared.port) as consumer:
                async for message in consumer:
                    if message.offset == 2:
                        consumer.stop()
            assert [each["offset"] for each in await client.committed_offsets(topic)] == [3]

    run(main)


@pytest.mark.process
def test_a_consumer_that_waits_is_stopped_from_another_thread(run: Run, shared: BrokerProcess, topic: str) -> None:
    async def main() -> None:
        async with AsyncConsumer(topic, topic, port=shared.port) as consumer:
            while not consumer.assignment:
                await consumer.poll(0.01)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.to_thread.run_sync, consumer.stop)
                async for _ in consumer:
                    pytest.fail("the topic is empty")

    run(main)


# Tasks: cancellation and faults


def test_a_fault_of_ours_cancels_the_block_and_is_raised_by_it(run: Run, scripted: ScriptedBroker) -> None:
    async def fail() -> None:
        raise ZeroDivisionError("a fault")

    async def main() -> None:
        with pytest.raises(ZeroDivisionError, match="a fault"):
            async with AsyncBrokerClient(port=scripted.port) as client:
                client._background.start("fails", fail)
                await anyio.sleep_forever()

    run(main)


@pytest.mark.process
@pytest.mark.parametrize("how", ["scope", "task"])
def test_to_cancel_the_caller_cancels_its_handlers_and_gives_the_message_back(
    how: str, run_native: Run, shared: BrokerProcess, topic: str
) -> None:
    """A scope of anyio, and the task itself, as asyncio.timeout(), asyncio.TaskGroup and a server do it."""
    ended: list[str] = []

    async def block(started: asyncio.Event) -> None:
        async def handle(message: Message) -> None:
            started.set()
            try:
                await anyio.sleep_forever()
            finally:
                ended.append(f"handler, attempt {message.attempt}")

        async with AsyncBrokerClient(port=shared.port) as client:
            await client.create_and_subscribe(topic, topic, handle)
            await client.publish(topic, b"x")
            await anyio.sleep_forever()

    async def main() -> None:
        started = asyncio.Event()
        if how == "scope":
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(block, started)
                await started.wait()
                tasks.cancel_scope.cancel()
        else:
            task = asyncio.create_task(block(started))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
        assert ended == ["handler, attempt 1"]
        assert len(asyncio.all_tasks()) == 1, "a task was left behind"

    run_native(main)
    with BrokerClient(port=shared.port) as client:
        assert client.describe_subscription(topic)["subscribers"] == []


def test_a_time_limit_of_asyncio_ends_a_call_and_leaves_the_client_usable(run_native: Run) -> None:
    with ScriptedBroker() as broker:

        async def main() -> None:
            async with AsyncBrokerClient(port=broker.port) as client:

                async def endless() -> None:
                    while True:
                        await client.publish("orders", b"x")

                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await endless()
                await client.publish("orders", b"last")

        run_native(main)
        assert broker.bodies[-1] == b"last"
        assert broker.connections == 1, "half a frame was sent"


@pytest.mark.process
def test_a_handler_that_meets_a_cancellation_has_failed_and_is_called_again(
    run_native: Run, shared: BrokerProcess, topic: str
) -> None:
    attempts: list[int] = []

    async def main() -> None:
        done = asyncio.Event()

        async def handle(message: Message) -> None:
            attempts.append(message.attempt)
            if len(attempts) == 2:
                done.set()
            else:
                other = asyncio.get_running_loop().create_future()
                other.cancel()
                await other

        async with AsyncBrokerClient(port=shared.port) as client:
            await client.create_subscription(topic, topic, backoff={"initial": 0.01, "cap": 0.01})
            await client.subscribe_to_subscription(topic, handle)
            await client.publish(topic, b"x")
            await done.wait()

    run_native(main)
    assert attempts == [1, 2]


def test_calls_of_tasks_that_are_not_the_blocks_own_are_answered(run_native: Run, scripted: ScriptedBroker) -> None:
    """As in a web application: the block is entered at its start, and requests are tasks of their own."""

    async def main() -> None:
        opened, closing = asyncio.Event(), asyncio.Event()
        client = AsyncBrokerClient(port=scripted.port)

        async def lifespan() -> None:
            async with client:
                opened.set()
                await closing.wait()

        living = asyncio.create_task(lifespan())
        await opened.wait()
        receipts = await asyncio.gather(*(client.publish("orders", b"x") for _ in range(50)))
        assert sorted(receipt.offset for receipt in receipts) == list(range(50))
        await client.disconnect()
        assert (await client.publish("orders", b"x")).offset == 50  # connects anew, from a task that is not the block's
        closing.set()
        await living

    run_native(main)
    assert scripted.connections == 2


@pytest.mark.skipif(UVLOOP in os.environ, reason="what a fork makes of uvloop is not ours to say")
def test_a_child_of_fork_uses_nothing_of_the_parent(run_native: Run, scripted: ScriptedBroker) -> None:
    async def main() -> None:
        async with AsyncBrokerClient(port=scripted.port) as client:
            await client.publish("orders", b"before")

            def child() -> None:
                with pytest.raises(UsedAfterFork):
                    client.publish("orders", b"of the child").send(None)

            Child(child).result()
            await client.publish("orders", b"after")

    run_native(main)
    assert (scripted.bodies, scripted.connections) == ([b"before", b"after"], 1)


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.skipif(UVLOOP in os.environ, reason="this is that run")
def test_all_of_this_holds_under_uvloop() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {UVLOOP: "yes"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr


# What is loaded


def test_a_blocking_client_loads_no_event_loop(scripted: ScriptedBroker) -> None:
    program = f"import qb\nwith qb.BrokerClient(port={scripted.port}) as client: client.publish('orders', b'x')"
    assert loaded_by(program) == set()
    assert scripted.bodies == [b"x"]


def test_an_async_client_under_asyncio_loads_no_trio(scripted: ScriptedBroker) -> None:
    program = f"""
import asyncio, qb
async def main():
    async with qb.AsyncBrokerClient(port={scripted.port}) as client:
        await client.publish("orders", b"x")
asyncio.run(main())"""
    assert loaded_by(program) == {"anyio", "asyncio"}
    assert scripted.bodies == [b"x"]


def loaded_by(program: str) -> set[str]:
    """Run a program; return which of the libraries for event loops it has loaded."""
    show = f"{program}\nimport sys; print(*{{'trio', 'anyio', 'asyncio', 'uvloop'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return {*done.stdout.split()}
