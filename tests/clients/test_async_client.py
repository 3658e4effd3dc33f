"""AsyncBrokerClient: the same promises as BrokerClient, and what cancellation does."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import ExitStack, aclosing
from contextvars import ContextVar
from typing import Any

import pytest
import trio
import trio.testing

from qb import (
    AsyncBrokerClient,
    BadRequest,
    BrokerUnavailable,
    ConnectionLost,
    DiskFull,
    MessageTooLarge,
    PublishFailed,
    PublishUncertain,
    RequestTimedOut,
    UnknownTopic,
)
from qb.core.wire.frames import PROBE, MessageType
from tests.support.scripted_broker import Plan, ScriptedBroker

pytestmark = pytest.mark.timeout(30)

_colour: ContextVar[str] = ContextVar("_colour")


@pytest.fixture
def scripted() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


@pytest.fixture
async def client(scripted: ScriptedBroker) -> AsyncIterator[AsyncBrokerClient]:
    async with AsyncBrokerClient(port=scripted.port, client_id="tester") as client:
        yield client


def numbered(count: int) -> list[bytes]:
    return [b"%d" % i for i in range(count)]


async def wait_for(broker: ScriptedBroker, condition: Any) -> None:
    await trio.to_thread.run_sync(broker.wait_for, condition)


async def test_a_publish_returns_its_receipt(scripted: ScriptedBroker, client: AsyncBrokerClient) -> None:
    receipt = await client.publish("orders", b"one", partition=0, key="k", timestamp_ms=5, colour="red")
    assert receipt == ("orders", 0, 0, 1_700_000_000_123, "fsynced", False, False)
    assert (await client.publish_text("orders", "grün")).offset == 1
    assert scripted.bodies == [b"one", "grün".encode()]
    assert scripted.messages[0].properties == {"topic": "orders", "partition": "0", "key": "k", "colour": "red"}


async def test_disconnect_ends_the_connection_and_a_later_call_connects_anew(scripted: ScriptedBroker) -> None:
    async with AsyncBrokerClient(port=scripted.port) as client:
        assert await client.ping() > 0
        await client.disconnect()
        await client.disconnect()
        assert scripted.connections == 1
        await client.publish("orders", b"x")
    assert scripted.connections == 2


async def test_a_client_outside_its_block_says_how_to_open_it(scripted: ScriptedBroker) -> None:
    client = AsyncBrokerClient(port=scripted.port)
    for call in (client.connect, client.list_topics, lambda: client.publish("orders", b"x")):
        with pytest.raises(RuntimeError, match="use it inside `async with`"):
            await call()
    await client.disconnect()
    async with client:
        with pytest.raises(RuntimeError, match="open already"):
            await client.__aenter__()
        await client.publish("orders", b"x")
    with pytest.raises(RuntimeError, match="use it inside `async with`"):
        await client.publish("orders", b"y")
    assert scripted.bodies == [b"x"]


def test_a_client_may_be_opened_in_one_trio_run_after_another(scripted: ScriptedBroker) -> None:
    client = AsyncBrokerClient(port=scripted.port)

    async def publish() -> int:
        async with client:
            return (await client.publish("orders", b"x")).offset

    assert [trio.run(publish), trio.run(publish)] == [0, 1]
    assert scripted.connections == 2


async def test_what_the_block_raises_comes_out_of_it_as_it_is(scripted: ScriptedBroker) -> None:
    with pytest.raises(UnknownTopic, match="there is no topic"):
        async with AsyncBrokerClient(port=scripted.port) as client:
            await client.describe_topic("unknown")


async def test_a_fault_of_the_link_cancels_the_block_and_is_raised_by_it(scripted: ScriptedBroker) -> None:
    with pytest.raises(ZeroDivisionError, match="a fault"):
        async with AsyncBrokerClient(port=scripted.port) as client:

            def fail() -> None:
                raise ZeroDivisionError("a fault")

            client._conversation.next_event = fail  # type: ignore[method-assign, assignment]
            with trio.fail_after(10):
                await client.ping()
                pytest.fail("the block went on")


async def test_a_fault_is_not_hidden_by_what_the_block_raises(scripted: ScriptedBroker) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        async with AsyncBrokerClient(port=scripted.port) as client:
            client._background.start("fails", _fail_at_once)
            raise KeyError("the caller's own")
    before: BaseException | None = caught.value
    while before is not None and not isinstance(before, KeyError):
        before = before.__context__  # perhaps by way of a cancelled disconnect()
    assert before is not None


async def _fail_at_once() -> None:
    raise ZeroDivisionError


async def test_background_tasks_see_the_context_variables_of_the_block(scripted: ScriptedBroker) -> None:
    seen: list[str] = []

    async def look() -> None:
        seen.append(_colour.get())

    _colour.set("of the block")
    async with AsyncBrokerClient(port=scripted.port) as client:
        _colour.set("of a call")
        client._background.start("looks", look)
        await trio.testing.wait_all_tasks_blocked()
    assert seen == ["of the block"]


async def test_requests_are_answered_or_refused(client: AsyncBrokerClient) -> None:
    created = await client.create_topic("orders", partitions=3)
    assert created["arguments"] == {"topic": "orders", "partitions": 3}
    assert await client.list_topics() == [{"method": "list_topics", "arguments": {}}]
    assert (await client.server_info())["method"] == "server_info"
    await client.delete_topic("orders", if_unused=True)
    with pytest.raises(UnknownTopic, match="there is no topic"):
        await client.describe_topic("unknown")


async def test_mistakes_are_found_before_anything_is_sent(scripted: ScriptedBroker, client: AsyncBrokerClient) -> None:
    with pytest.raises(TypeError, match="publish_text"):
        await client.publish("orders", "text")  # type: ignore[arg-type]
    with pytest.raises(BadRequest):
        await client.publish("orders", b"x", client_id="me")
    with pytest.raises(MessageTooLarge):
        await client.publish("orders", bytes((1 << 20) + 1))
    assert scripted.bodies == []


async def test_many_are_published_in_order_from_both_kinds_of_iterable(
    scripted: ScriptedBroker, client: AsyncBrokerClient
) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        for body in numbered(10_000):
            if body.endswith(b"00"):
                await trio.lowlevel.checkpoint()
            yield body

    assert await client.publish_many("orders", slowly()) == range(10_000)
    assert await client.publish_many("orders", iter(numbered(10_000))) == range(10_000, 20_000)
    assert scripted.bodies == numbered(10_000) * 2


async def test_a_refusal_among_many_says_where(scripted: ScriptedBroker, client: AsyncBrokerClient) -> None:
    scripted.refuse[b"2"] = "DISK_FULL"
    with pytest.raises(PublishFailed) as caught:
        await client.publish_many("orders", numbered(5))
    assert (caught.value.index, list(caught.value.stored)) == (2, [0, 1, 2, 3])
    assert isinstance(caught.value.__cause__, DiskFull)


async def test_what_an_iterable_raises_comes_out_after_its_bodies_are_stored(
    scripted: ScriptedBroker, client: AsyncBrokerClient
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"a"
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        await client.publish_many("orders", broken())
    assert scripted.bodies == [b"a"]


async def test_tasks_share_one_client(scripted: ScriptedBroker, client: AsyncBrokerClient) -> None:
    offsets: dict[bytes, int] = {}

    async def one_by_one(name: int) -> None:
        for i in range(100):
            body = b"%d/%d" % (name, i)
            offsets[body] = (await client.publish("orders", body)).offset

    async def in_bulk(name: int) -> None:
        bodies = [b"bulk %d/%d" % (name, i) for i in range(5_000)]
        offsets.update(zip(bodies, await client.publish_many("orders", bodies), strict=True))

    async with trio.open_nursery() as nursery:
        for name in range(5):
            nursery.start_soon(one_by_one, name)
        for name in range(2):
            nursery.start_soon(in_bulk, name)
    assert len(offsets) == 5 * 100 + 2 * 5_000
    assert offsets == {message.body: message.offset for message in scripted.messages}
    assert scripted.connections == 1


# Cancellation


async def test_a_cancelled_call_leaves_the_client_usable() -> None:
    with ScriptedBroker(Plan(silent=True)) as broker:
        async with AsyncBrokerClient(port=broker.port) as client:
            for call in (
                lambda: client.publish("orders", b"lost"),
                client.list_topics,
                lambda: client.publish_many("orders", [b"lost"] * 10),
            ):
                with trio.move_on_after(0.05) as scope:
                    await call()
                assert scope.cancelled_caught
            broker.drop_connections()
            assert (await client.publish("orders", b"kept")).offset == 0
            assert broker.bodies == [b"kept"]  # what was cancelled is not sent again
            assert await client.list_topics()


async def test_cancelling_in_the_middle_of_a_row_tears_no_frame(scripted: ScriptedBroker) -> None:
    async with AsyncBrokerClient(port=scripted.port) as client:

        async def endless() -> AsyncGenerator[bytes, None]:
            i = 0
            while True:
                yield b"%d" % i
                i += 1

        async with aclosing(endless()) as bodies, trio.open_nursery() as nursery:
            nursery.start_soon(client.publish_many, "orders", bodies)
            await wait_for(scripted, lambda: len(scripted.messages) > 3_000)
            nursery.cancel_scope.cancel()
        await client.publish("orders", b"last")
    stored = scripted.bodies
    assert stored == [*numbered(len(stored) - 1), b"last"]
    assert scripted.connections == 1


# Lost connections


async def test_a_publish_whose_ack_is_lost_is_answered_once_and_stored_once() -> None:
    with ScriptedBroker(Plan(lose_acks_after=1)) as broker:
        async with AsyncBrokerClient(port=broker.port) as client:
            receipt = await client.publish("orders", b"x")
            assert (receipt.offset, receipt.duplicate) == (0, True)
        assert broker.bodies == [b"x"]


async def test_without_idempotence_a_lost_ack_is_uncertain() -> None:
    with ScriptedBroker(Plan(lose_acks_after=1)) as broker:
        async with AsyncBrokerClient(port=broker.port, idempotent=False) as client:
            with pytest.raises(PublishUncertain, match="may or may not be stored"):
                await client.publish("orders", b"x")
            assert (await client.publish("orders", b"y")).offset == 1


@pytest.mark.parametrize("partitions", [1, 3])
async def test_many_publishes_across_lost_connections_are_stored_once_and_in_order(partitions: int) -> None:
    plans = [Plan(lose_acks_after=1), Plan(drop_after=3_000), Plan(lose_acks_after=8_000), Plan(goodbye_after=3)]
    with ScriptedBroker(*plans, partitions=partitions) as broker:
        async with AsyncBrokerClient(port=broker.port) as client:
            offsets = await client.publish_many("orders", numbered(20_000))
        assert broker.bodies == numbered(20_000)
        assert offsets == [message.offset for message in broker.messages]
        assert broker.connections == 5


async def test_many_publishes_without_idempotence_stop_where_the_connection_was_lost() -> None:
    with ScriptedBroker(Plan(drop_after=5_000)) as broker:
        async with AsyncBrokerClient(port=broker.port, idempotent=False) as client:
            with pytest.raises(PublishUncertain) as caught:
                await client.publish_many("orders", numbered(20_000))
        assert caught.value.index == 5_000
        assert broker.bodies == numbered(5_000)


async def test_a_request_that_changes_something_says_that_its_answer_was_lost() -> None:
    with ScriptedBroker(Plan(silent=True)) as broker:
        async with AsyncBrokerClient(port=broker.port) as client, trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(ConnectionLost):
                    await client.delete_topic("orders")

            nursery.start_soon(ask)
            await wait_for(broker, lambda: len(broker.frames) == 2)
            broker.drop_connections()


async def test_connect_says_at_once_that_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(BrokerUnavailable, match=f"nothing listens on 127.0.0.1:{port}; start the broker with"):
        async with AsyncBrokerClient(port=port):
            pytest.fail("there is no broker")


async def test_a_block_may_wait_for_its_broker() -> None:
    with ScriptedBroker() as broker:
        port = broker.port
    with pytest.raises(BrokerUnavailable, match="nothing listens"):
        async with AsyncBrokerClient(port=port, connect_wait=0.1):
            pytest.fail("there is no broker")
    client = AsyncBrokerClient(port=port, connect_wait=20)

    async def publish() -> None:
        async with client:
            await client.publish("orders", b"x")

    with ExitStack() as brokers:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish)
            while not client._link._connection.trouble.failures:
                await trio.testing.wait_all_tasks_blocked()
            late = brokers.enter_context(ScriptedBroker(port=port))
        assert late.bodies == [b"x"]


async def test_a_call_waits_for_a_broker_that_is_gone_and_then_says_so() -> None:
    with ScriptedBroker() as broker:
        port = broker.port
        async with AsyncBrokerClient(port=port, request_timeout=0.2) as client:
            await client.disconnect()
            broker.close()
            with pytest.raises(BrokerUnavailable, match="nothing listens"):
                await client.publish("orders", b"x")
            with ScriptedBroker(port=port) as other:
                await client.connect(wait=10)
                await client.publish("orders", b"x")
                assert other.bodies == [b"x"]


async def test_a_silent_broker_times_out_and_is_given_up_after_two_heartbeat_intervals() -> None:
    with ScriptedBroker(Plan(silent=True), Plan(silent=True)) as broker:
        async with AsyncBrokerClient(port=broker.port, request_timeout=0.2) as client:
            with pytest.raises(PublishUncertain):
                await client.publish("orders", b"x")
            with pytest.raises(RequestTimedOut):
                await client.ping()
        async with AsyncBrokerClient(port=broker.port, heartbeat_interval=0.05) as client:
            assert (await client.publish("orders", b"x")).offset == 0
        assert broker.connections == 3


async def test_heartbeats_are_sent_and_probes_are_answered() -> None:
    with ScriptedBroker(Plan(probe=True)) as broker:
        async with AsyncBrokerClient(port=broker.port, heartbeat_interval=0.02):
            await wait_for(broker, lambda: any(frame.sequence_number == PROBE for frame in broker.frames))
            await wait_for(broker, lambda: sum(frame.type == MessageType.HEARTBEAT for frame in broker.frames) >= 5)
        assert broker.connections == 1


async def test_disconnect_ends_the_waiting_of_other_tasks() -> None:
    with ScriptedBroker(Plan(silent=True)) as broker:

        async def work() -> None:
            with pytest.raises(PublishUncertain, match="disconnected"):
                await client.publish("orders", b"x")

        async with AsyncBrokerClient(port=broker.port) as client, trio.open_nursery() as nursery:
            nursery.start_soon(work)
            await trio.testing.wait_all_tasks_blocked()
            await client.disconnect()


@pytest.mark.process
@pytest.mark.kill
async def test_many_publishes_survive_kill_9_of_a_real_broker_without_a_duplicate(broker: Any) -> None:
    async def bodies() -> AsyncIterator[bytes]:
        for i in range(60_000):
            if i in {20_000, 40_000}:
                await trio.to_thread.run_sync(broker.restart)
            yield b"%d" % i

    async with AsyncBrokerClient(port=broker.port) as client:
        await client.create_topic("orders", partitions=3)
        offsets = await client.publish_many("orders", bodies())
        assert len(offsets) == 60_000
        logs = (await client.describe_topic("orders"))["logs"]
        assert sum(log["next_offset"] for log in logs) == 60_000
        for log in logs:
            stored = [run for run in offsets.runs if run.partition == log["partition"]]
            assert sum(run.size for run in stored) == log["next_offset"]
