"""Transactions through AsyncBrokerClient: as through BrokerClient, and what cancellation does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio

from qb import (
    AsyncBrokerClient,
    BadRequest,
    BrokerUnavailable,
    ConnectionLost,
    DiskFull,
    Message,
    MessageTooLarge,
    QBError,
    RequestTimedOut,
    UnknownPartition,
    UnknownStage,
    UnknownTopic,
)
from qb.clients.protocol.conversation import WINDOW_BYTES
from qb.clients.protocol.publish_frames import PublishForm
from qb.core.wire.frames import MessageType
from tests.support.brokers import BrokerProcess
from tests.support.scripted_broker import Plan, ScriptedBroker
from tests.support.waiting import until_true

pytestmark = pytest.mark.timeout(50)

PARTITIONS = [(topic, partition) for topic in ("debits", "credits") for partition in range(4)]
RECEIPT = {
    "transaction": "t-1",
    "number": None,
    "replayed": False,
    "messages": 2,
    "timestamp": 1,
    "durability": "fsynced",
}


def data_frames(topic: str, bodies: list[bytes]) -> bytes:
    return PublishForm(topic).frames(0, bodies, MessageType.DATA)


# Against a scripted broker


def scripted(*plans: Plan) -> ScriptedBroker:
    broker = ScriptedBroker(*plans)
    broker.answers["begin_transaction"] = {"committed": False, "stage": "s1"}
    broker.answers["commit_transaction"] = RECEIPT | {"partitions": []}
    broker.answers["abort_transaction"] = {"aborted": 1, "committed": False}
    broker.answers["describe_topic"] = {"topic": "orders", "partitions": 2}
    return broker


def methods(broker: ScriptedBroker) -> list[str]:
    return [frame.properties["method"] for frame in broker.frames if frame.type == MessageType.REQUEST]


async def test_a_replayed_block_checks_its_arguments_and_sends_nothing() -> None:
    with scripted() as broker:
        broker.answers["begin_transaction"] = {"committed": True, "stage": None}
        async with AsyncBrokerClient(port=broker.port) as client:
            async with client.transaction("t-1") as tx:
                assert tx.replayed
                await tx.publish("orders", b"a", partition=700)
                assert await tx.publish_many("orders", [b"a", b"b"], keys=["a", None]) == 2
                with pytest.raises(TypeError):
                    await tx.publish("orders", "text")  # type: ignore[arg-type]
                with pytest.raises(MessageTooLarge):
                    await tx.publish("orders", bytes((1 << 20) + 1))
            assert tx.receipt is not None
            with pytest.raises(RuntimeError, match="inside its block"):
                await tx.publish("orders", b"late")
        assert methods(broker) == ["begin_transaction", "commit_transaction"]
        assert broker.staged == 0


async def test_what_was_not_answered_is_sent_again_with_the_same_first() -> None:
    with scripted(Plan(lose_stages_after=3), Plan(lose_stages_after=2)) as broker:
        async with AsyncBrokerClient(port=broker.port) as client:
            stage = await client.begin_transaction("t-1")
            assert stage is not None
            for number in range(5):
                await stage.add("orders", 0, data_frames("orders", [b"%d" % number] * 10), 10)
            assert (stage.stage_id, stage.messages, await stage.finish()) == ("s1", 50, 50)
        firsts = [int(frame.properties["first"]) for frame in broker.frames if frame.type == MessageType.STAGE]
        assert sorted(set(firsts)) == [0, 10, 20, 30, 40]
        assert (firsts.count(0), broker.staged, broker.connections) == (3, 50, 3)


async def test_a_refusal_comes_out_first_and_every_later_call_says_the_same() -> None:
    with scripted() as broker:
        broker.refuse_stages[10] = "DISK_FULL"
        async with AsyncBrokerClient(port=broker.port) as client:
            stage = await client.begin_transaction("t-1")
            assert stage is not None
            with pytest.raises(DiskFull):
                for _ in range(4):
                    await stage.add("orders", 0, data_frames("orders", [b"x"] * 10), 10)
                await stage.finish()
            with pytest.raises(DiskFull):
                await stage.finish()


async def test_staging_waits_while_megabytes_are_unanswered_and_gives_up_in_time() -> None:
    with scripted(Plan(lose_stages_after=1_000)) as broker:
        async with AsyncBrokerClient(port=broker.port, request_timeout=0.5) as client:
            stage = await client.begin_transaction("t-1")
            assert stage is not None
            megabyte = data_frames("orders", [bytes(1_000)] * 900)
            with pytest.raises(RequestTimedOut):
                for _ in range(40):
                    await stage.add("orders", 0, megabyte, 900)
            assert 0 <= stage.messages / 900 * len(megabyte) - WINDOW_BYTES < 2 * len(megabyte)
            assert await client.ping() > 0
            other = await client.begin_transaction("t-1")
            assert other is not None
            await other.add("orders", 0, megabyte, 900)
            with pytest.raises(RequestTimedOut, match="900 messages may or may not be staged"):
                await other.finish()


@pytest.mark.parametrize("method", ["begin_transaction", "commit_transaction", "abort_transaction"])
async def test_a_lost_answer_is_asked_for_again(method: str) -> None:
    with scripted(*[Plan(lose_answer_to=method)] * 2) as broker:
        async with AsyncBrokerClient(port=broker.port) as client:
            assert await client.begin_transaction("t-1") is not None
            assert (await client.commit_transaction("t-1", [("s1", 0)])).messages == 2
            assert await client.abort_transaction("t-1", stages=["s1"]) == 1
        assert methods(broker).count(method) == 3


async def test_a_commit_without_an_answer_in_time_is_not_called_unsent() -> None:
    with scripted(Plan(lose_answer_to="commit_transaction")) as broker:
        async with AsyncBrokerClient(port=broker.port, request_timeout=0.5) as client:
            assert await client.begin_transaction("t-1") is not None
            broker.stop_listening()
            with pytest.raises(ConnectionLost):
                await client.commit_transaction("t-1", [])
            with pytest.raises(BrokerUnavailable):
                await client.commit_transaction("t-1", [])


async def test_a_client_that_is_disconnected_does_not_come_back_by_itself() -> None:
    with scripted(Plan(silent=True)) as broker:
        async with AsyncBrokerClient(port=broker.port) as client, trio.open_nursery() as nursery:

            async def commit() -> None:
                with pytest.raises(ConnectionLost):
                    await client.commit_transaction("t-1", [])

            nursery.start_soon(commit)
            await trio.to_thread.run_sync(broker.wait_for, lambda: broker.ignored == 1)
            await client.disconnect()
        assert broker.connections == 1


async def test_a_cancelled_block_aborts_its_own_stage() -> None:
    with scripted() as broker:
        async with AsyncBrokerClient(port=broker.port) as client:
            with trio.CancelScope() as scope:
                async with client.transaction("t-1") as tx:
                    await tx.publish("orders", b"x")
                    scope.cancel()
                    await trio.sleep_forever()
            assert scope.cancelled_caught
            assert tx.receipt is None
        assert methods(broker) == ["begin_transaction", "describe_topic", "abort_transaction"]


async def test_a_call_that_was_cancelled_midway_spoils_the_stage() -> None:
    with scripted(Plan(lose_stages_after=1_000)) as broker:
        async with AsyncBrokerClient(port=broker.port) as client:
            with pytest.raises(QBError, match="was interrupted"):
                async with client.transaction("t-1") as tx:
                    with trio.move_on_after(0.2) as scope:
                        await tx.publish_many("orders", (bytes(100_000) for _ in range(200)))
                    assert scope.cancelled_caught
        assert "commit_transaction" not in methods(broker)


# Against a real broker


@pytest.fixture
async def client(shared: BrokerProcess) -> AsyncIterator[AsyncBrokerClient]:
    """A client of a broker that has the topics of PARTITIONS, empty."""
    async with AsyncBrokerClient(port=shared.port) as client:
        await make_topics(client)
        yield client
        for topic in ("debits", "credits"):
            await client.delete_topic(topic)


async def make_topics(client: AsyncBrokerClient) -> None:
    for topic in ("debits", "credits"):
        await client.create_topic(topic, partitions=4)


async def all_bodies(client: AsyncBrokerClient) -> list[bytes]:
    found: list[bytes] = []
    for place in PARTITIONS:
        offset = 0
        while portion := await client.fetch(*place, offset, max_messages=100_000, max_bytes=16 << 20):
            found, offset = found + [message.body for message in portion], portion.next_offset
    return sorted(found)


async def ends(client: AsyncBrokerClient) -> list[int]:
    return [(await client.offsets(*place)).next for place in PARTITIONS]


async def test_nothing_is_seen_before_the_end_of_the_block_and_everything_after_it(client: AsyncBrokerClient) -> None:
    pushed: list[Message] = []
    arrived = trio.Semaphore(0)

    def take(message: Message) -> None:
        pushed.append(message)
        trio.from_thread.run_sync(arrived.release)

    async def staged() -> bool:
        return (await client.list_transactions())["stages"][0]["messages"] > 0  # it counts what the disk has

    async with await client.create_and_subscribe("watch", "credits", take):
        async with client.transaction("whole", 1) as tx:
            for topic, partition in PARTITIONS:
                await tx.publish(topic, b"%d" % partition, partition, key="k", colour="red")
                await tx.publish_many(topic, [bytes(100_000)] * 12, partition)
            assert await ends(client) == [0] * 8
            await until_true(staged)
            assert pushed == []
        assert await ends(client) == [13] * 8
        for _ in range(4 * 13):
            await arrived.acquire()
    assert {(message.partition, message.offset) for message in pushed} == {(p, o) for p in range(4) for o in range(13)}
    assert {message.properties.get("colour") for message in pushed if message.offset == 0} == {"red"}
    assert tx.receipt is not None
    assert (tx.receipt.messages, tx.receipt.number, tx.receipt.durability) == (8 * 13, 1, "fsynced")
    async with client.transaction("whole", 1) as tx:
        assert tx.replayed
        await tx.publish("debits", b"again")
    assert await ends(client) == [13] * 8
    with pytest.raises(BadRequest, match="number"):
        await client.begin_transaction("whole")
    await client.delete_subscription("watch")


async def test_bodies_come_from_asynchronous_iterables_too(client: AsyncBrokerClient) -> None:
    async def bodies() -> AsyncIterator[bytes]:
        for number in range(3_000):
            yield b"%d" % number

    async with client.transaction("streamed") as tx:
        assert await tx.publish_many("debits", bodies(), keys=(f"k{number % 7}" for number in range(3_000))) == 3_000
        assert await tx.publish_many("credits", bodies(), key="one") == 3_000
    found = await all_bodies(client)
    assert len(found) == 6_000
    assert set(found) == {b"%d" % number for number in range(3_000)}


async def test_an_exception_publishes_nothing_and_leaves_nothing(client: AsyncBrokerClient) -> None:
    with pytest.raises(LookupError):
        async with client.transaction("failed") as tx:
            await tx.publish_many("debits", [bytes(1_000)] * 5_000)
            raise LookupError
    assert await all_bodies(client) == []
    assert (await client.list_transactions())["stages"] == []


async def test_mistakes_are_found_in_the_block_by_the_errors_of_publish(client: AsyncBrokerClient) -> None:
    async with client.transaction("mistakes") as tx:
        with pytest.raises(UnknownTopic, match="create-topic nowhere"):
            await tx.publish("nowhere", b"x")
        with pytest.raises(UnknownPartition, match="it has 0 to 3"):
            await tx.publish("debits", b"x", partition=4)
    await client.create_topic("gone")
    with pytest.raises(UnknownTopic, match="gone"):
        async with client.transaction("refused") as tx:
            await tx.publish("debits", b"x")
            await tx.publish("gone", b"x")
            await client.delete_topic("gone")
    assert await all_bodies(client) == []
    assert (await client.list_transactions())["stages"] == []


async def test_late_writes_to_a_stage_that_was_ended_are_refused(client: AsyncBrokerClient) -> None:
    stage = await client.begin_transaction("dead")
    assert stage is not None
    await stage.add("debits", 0, data_frames("debits", [b"a"]), 1)
    assert await stage.finish() == 1
    assert await client.abort_transaction("dead") == 1
    with pytest.raises(UnknownStage, match="begin again"):
        await stage.add("debits", 0, data_frames("debits", [b"late"]), 1)
        await stage.finish()
    with pytest.raises(UnknownStage):
        await client.commit_transaction("dead", [(stage.stage_id, 1)])
    assert await all_bodies(client) == []


@pytest.mark.kill
async def test_a_broker_killed_while_staging_and_during_the_commit_loses_and_repeats_nothing(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    broker: Any = await trio.to_thread.run_sync(start_broker)

    async def bodies() -> AsyncIterator[bytes]:
        for number in range(6_000):
            if number == 4_000:  # megabytes are on their way
                await trio.to_thread.run_sync(broker.restart)
            yield b"%d " % number + bytes(1_000)

    async with AsyncBrokerClient(port=broker.port) as client, trio.open_nursery() as nursery:
        await make_topics(client)
        async with client.transaction("killed") as tx:
            await tx.publish("credits", b"first")
            assert await tx.publish_many("debits", bodies()) == 6_000
            assert await ends(client) == [0] * 8
            nursery.start_soon(trio.to_thread.run_sync, broker.restart)  # at any moment of the commit
        assert tx.receipt is not None
        assert tx.receipt.messages == 6_001
        found = await all_bodies(client)
        assert len(found) == len(set(found)) == 6_001
