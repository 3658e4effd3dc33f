"""A producer's numbers are its own: no other peer can use them up, and a number stands for one message."""

from __future__ import annotations

import itertools

import pytest
import trio

from qb import BrokerClient, OutOfSequence
from qb.clients.protocol.publish_frames import PublishForm
from qb.core.pacing import AT_ONCE, counted
from qb.core.wire.frames import Frame, MessageType, decode_frame, encode_frame, frame_length
from qb.core.wire.runs.publish_table import MOST_BYTES
from tests.support.brokers import BrokerProcess
from tests.support.peers import Peer, TrioPeer, identity

pytestmark = pytest.mark.timeout(60)


def producer_in_seals(stored: bytes) -> int:
    """Return the producer id that stands in the first seal among stored frames."""
    at = 0
    while (frame := decode_frame(stored, at)).type != MessageType.SEAL:
        at += frame_length(stored, at)
    return int.from_bytes(frame.body[12:20])


def read_producer_id(port: int, topic: str, offset: int) -> str:
    """Return the producer id of a stored batch, as any reader can."""
    with Peer(port) as reader:
        answer = reader.fetch(topic, offset, bulk="1")
    return str(producer_in_seals(answer.body[4 * int(answer.properties["count"]) :]))


# Who may continue as a producer


def test_a_producer_id_read_from_a_seal_takes_nothing_over(broker: BrokerProcess) -> None:
    with BrokerClient(port=broker.port) as victim, Peer(broker.port) as attacker:
        victim.create_topic("orders")
        victim.publish("orders", b"first")
        stolen = read_producer_id(broker.port, "orders", 0)
        hello = attacker.hello(producer_id=stolen)
        assert hello.properties["producer_id"] != stolen
        for number in range(2, 5):
            assert attacker.publish("orders", b"attack", number).properties["status"] == "success"
        receipts = [victim.publish("orders", body) for body in (b"second", b"third")]
        assert [receipt.duplicate for receipt in receipts] == [False, False]
        assert [body for body in attacker.bodies("orders") if body != b"attack"] == [b"first", b"second", b"third"]


def test_after_a_restart_only_the_secret_continues_a_producer(broker: BrokerProcess) -> None:
    with Peer(broker.port) as victim:
        hello = victim.hello(producer_id="new")
        victim.create_topic("orders")
        victim.publish("orders", b"first", 1)
    broker.restart()
    with Peer(broker.port) as attacker:
        assert read_producer_id(broker.port, "orders", 0) == hello.properties["producer_id"]
        assert attacker.hello(producer_id=hello.properties["producer_id"]).properties["status"] == "success"
        assert "duplicate" not in attacker.publish("orders", b"attack", 1).properties
    with Peer(broker.port) as victim:
        again = victim.hello(**identity(hello))
        assert identity(again) == identity(hello)
        answers = [victim.publish("orders", body, n) for n, body in enumerate((b"first", b"second"), 1)]
        assert [answer.properties["offset"] for answer in answers] == ["0", "2"]
        assert [answer.properties.get("duplicate") for answer in answers] == ["true", None]
        assert victim.bodies("orders") == [b"first", b"attack", b"second"]


@pytest.mark.parametrize("secret", ["", "0" * 32, "é", "x" * 5_000])
async def test_a_wrong_secret_is_refused_and_fences_no_producer(a_broker, secret) -> None:
    async with a_broker() as connect:
        victim, attacker = await connect(), await connect()
        hello = await victim.ask(MessageType.HELLO, 2**63, protocol="1", producer_id="new")
        await victim.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        wrong = identity(hello) | {"producer_secret": secret}
        answer = await attacker.ask(MessageType.HELLO, 2**63, protocol="1", **wrong)
        assert answer.properties["code"] == "PRODUCER_FENCED"
        assert await attacker.receive() is None
        assert (await victim.publish("a", b"x", 1)).properties["offset"] == "0"


async def test_the_secret_of_one_producer_is_not_that_of_another(a_broker) -> None:
    async with a_broker() as connect:
        hellos = [
            await (await connect()).ask(MessageType.HELLO, 2**63, protocol="1", producer_id="new") for _ in range(2)
        ]
        mixed = identity(hellos[0]) | {"producer_secret": hellos[1].properties["producer_secret"]}
        answer = await (await connect()).ask(MessageType.HELLO, 2**63, protocol="1", **mixed)
        assert answer.properties["code"] == "PRODUCER_FENCED"


async def test_hellos_at_the_same_time_have_secrets_of_one_key(a_broker) -> None:
    async with a_broker() as connect:
        hellos: list[Frame] = []

        async def say_hello() -> None:
            peer = await connect()
            hellos.append(await peer.ask(MessageType.HELLO, 2**63, protocol="1", producer_id="new"))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(say_hello)
        for hello in hellos:
            again = await (await connect()).ask(MessageType.HELLO, 2**63, protocol="1", **identity(hello))
            assert identity(again) == identity(hello)
        assert connect.broker.engine.metadata.get("producers/key").version == 1


def test_a_client_keeps_its_producer_over_a_restart_of_the_broker(broker: BrokerProcess) -> None:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("orders")
        client.publish("orders", b"first")
        before = read_producer_id(broker.port, "orders", 0)
        broker.restart()
        client.publish("orders", b"second")
        with Peer(broker.port) as reader:
            assert read_producer_id(broker.port, "orders", 1) == before
            assert reader.bodies("orders") == [b"first", b"second"]


# A number stands for one message


def publishes(first: int, bodies: list[bytes], timestamp: int = 0, **properties: str) -> bytes:
    properties = {"topic": "a"} | properties
    return b"".join(
        encode_frame(MessageType.PUBLISH, n, timestamp, properties, body) for n, body in enumerate(bodies, first)
    )


async def introduced(connect) -> tuple[TrioPeer, Frame]:
    peer = await connect()
    return peer, await peer.ask(MessageType.HELLO, 2**63, protocol="1", producer_id="new")


async def continued(connect, hello: Frame) -> TrioPeer:
    peer = await connect()
    await peer.ask(MessageType.HELLO, 2**63, protocol="1", **identity(hello))
    return peer


async def answers(peer: TrioPeer, data: bytes, count: int) -> dict[int, tuple[str, str | None]]:
    """Send publishes and return for each number its offset, or the code of the refusal, and whether a duplicate."""
    found: dict[int, tuple[str, str | None]] = {}
    await peer.stream.send_all(data)
    with trio.fail_after(20):
        while len(found) < count:
            ack = await peer.receive()
            about, first = ack.properties, ack.sequence_number
            for i in range(int(about["count"])):
                assert first + i not in found
                place = about["code"] if "code" in about else str(int(about["offset"]) + i)
                found[first + i] = (place, about.get("duplicate"))
    return found


async def test_a_number_that_was_used_for_another_message_is_refused(a_broker) -> None:
    async with a_broker() as connect:
        peer, hello = await introduced(connect)
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        await peer.publish("a", b"mine", 1, key="k")
        again = await continued(connect, hello)
        for body, properties in ((b"other", {"key": "k"}), (b"mine", {"key": "j"}), (b"mine", {"key": "k", "x": "y"})):
            refused = await again.publish("a", body, 1, **properties)
            assert refused.properties["code"] == "OUT_OF_SEQUENCE"
            assert "used for another message" in refused.properties["error"]
        assert (await again.publish("a", b"mine", 1, key="k")).properties["duplicate"] == "true"
        assert (await again.call("describe_topic", topic="a"))["messages"] == 1


async def test_a_timestamp_is_compared_if_the_publisher_gave_one(a_broker) -> None:
    async with a_broker() as connect:
        peer, hello = await introduced(connect)
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        await answers(peer, publishes(1, [b"x"], timestamp=1_000), 1)
        again = await continued(connect, hello)
        assert await answers(again, publishes(1, [b"x"], timestamp=1_000), 1) == {1: ("0", "true")}
        assert await answers(again, publishes(1, [b"x"], timestamp=2_000), 1) == {1: ("OUT_OF_SEQUENCE", None)}


@pytest.mark.parametrize("lengths", [[10], [0, 1, 300, 7]], ids=["uniform", "mixed"])
@pytest.mark.parametrize("timestamp", [0, 1_000])
@pytest.mark.parametrize("tail_bytes", [0, 1 << 20], ids=["from disk", "from memory"])
async def test_a_run_that_is_sent_again_is_confirmed_with_its_first_offsets(
    a_broker, lengths, timestamp, tail_bytes
) -> None:
    bodies = [bytes([n % 251]) * length for n, length in zip(range(300), itertools.cycle(lengths), strict=False)]
    async with a_broker({"tail_bytes": tail_bytes}) as connect:
        peer, hello = await introduced(connect)
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        for first in range(0, 300, 100):  # several batches, with another message in between
            await answers(peer, publishes(1 + first, bodies[first : first + 100], timestamp), 100)
            await (await connect()).publish("a", b"between")
        again = await continued(connect, hello)
        found = await answers(again, publishes(1, [*bodies, b"new"], timestamp), 301)
        assert found == {n: (str(n - 1 + (n - 1) // 100), "true") for n in range(1, 301)} | {301: ("303", None)}


async def test_many_publishes_that_are_sent_again_are_compared_in_portions(a_broker) -> None:
    bodies = [b"%05d" % n for n in range(20_000)]
    async with a_broker() as connect:
        peer, hello = await introduced(connect)
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        await answers(peer, publishes(1, bodies), len(bodies))
        again = await continued(connect, hello)
        with counted() as work:
            found = await answers(again, publishes(1, bodies), len(bodies))
        assert found == {n: (str(n - 1), "true") for n in range(1, 20_001)}
        assert 0 < work.most <= AT_ONCE


async def test_of_a_run_only_the_messages_that_differ_are_refused(a_broker) -> None:
    bodies = [b"%03d" % n for n in range(200)]
    changed = [b"no!" if n in (0, 77, 78, 199) else body for n, body in enumerate(bodies)]
    async with a_broker() as connect:
        peer, hello = await introduced(connect)
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        await answers(peer, publishes(1, bodies), 200)
        found = await answers(await continued(connect, hello), publishes(1, changed), 200)
        assert [n - 1 for n, answer in found.items() if answer == ("OUT_OF_SEQUENCE", None)] == [0, 77, 78, 199]
        assert all(found[n] == (str(n - 1), "true") for n in range(1, 201) if changed[n - 1] != b"no!")


async def test_runs_with_a_table_are_recognised_as_what_they_stand_for(a_broker) -> None:
    bodies = [b"x" * n for n in range(200)]
    changed = [b"no!" if n in (0, 77, 199) else body for n, body in enumerate(bodies)]

    def run(first: int, bodies: list[bytes]) -> bytes:
        return PublishForm("a").publishes(first, bodies, MOST_BYTES)

    async with a_broker() as connect:
        peer, hello = await introduced(connect)
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        assert await answers(peer, run(1, bodies[:100]), 100) == {n: (str(n - 1), None) for n in range(1, 101)}
        again = await continued(connect, hello)  # the first half is stored, the other is new
        found = await answers(again, run(1, bodies), 200)
        assert found == {n: (str(n - 1), "true" if n <= 100 else None) for n in range(1, 201)}
        found = await answers(again, run(1, changed), 200)
        assert [n - 1 for n, answer in found.items() if answer == ("OUT_OF_SEQUENCE", None)] == [0, 77, 199]
        found = await answers(again, publishes(1, bodies), 200)
        assert found == {n: (str(n - 1), "true") for n in range(1, 201)}


async def test_keys_of_several_partitions_are_compared_where_they_are(a_broker) -> None:
    data = b"".join(publishes(n, [b"%d" % n], key=f"k{n % 5}") for n in range(1, 41))
    async with a_broker() as connect:
        peer, hello = await introduced(connect)
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a", partitions="3")
        first = await answers(peer, data, 40)
        again = await answers(await continued(connect, hello), data, 40)
        assert again == {n: (offset, "true") for n, (offset, _) in first.items()}


async def test_a_retry_of_what_is_stored_but_not_visible_yet_is_confirmed(a_broker) -> None:
    async with a_broker() as connect:
        peer, hello = await introduced(connect)
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        log = connect.broker.engine.log("a", 0)
        log.hold()  # as a transaction does
        await peer.publish("a", b"x", 1)
        again = await continued(connect, hello)
        assert await answers(again, publishes(1, [b"x"]), 1) == {1: ("0", "true")}
        assert await answers(again, publishes(1, [b"y"]), 1) == {1: ("OUT_OF_SEQUENCE", None)}


async def test_a_retry_of_what_retention_has_taken_is_unverified(a_broker) -> None:
    async with a_broker({"segment_bytes": 4_096}) as connect:
        peer, hello = await introduced(connect)
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        for number in range(1, 31):
            await peer.publish("a", b"%d" % number * 500, number)
        log = connect.broker.engine.log("a", 0)
        log.drop_first(1)
        kept = log.first_offset
        assert 0 < kept < 30
        again = await continued(connect, hello)
        gone = await again.publish("a", b"1" * 500, 1)
        assert {"offset": "0", "duplicate": "true", "unverified": "true"}.items() <= gone.properties.items()
        found = await answers(again, publishes(1, [b"%d" % n * 500 for n in range(1, 31)]), 30)
        assert found == {n: (str(n - 1), "true") for n in range(1, 31)}
        there = await again.publish("a", b"%d" % (kept + 1) * 500, kept + 1)
        assert there.properties["duplicate"] == "true"
        assert "unverified" not in there.properties


async def test_a_retry_of_what_was_deleted_with_its_topic_is_unverified(a_broker) -> None:
    async with a_broker() as connect:
        peer, hello = await introduced(connect)
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        await peer.publish("a", b"x", 1)
        await peer.call("delete_topic", topic="a")
        await peer.ask(MessageType.CREATE_TOPIC, 2**63 + 1, topic="a")
        answer = await (await continued(connect, hello)).publish("a", b"x", 1)
        assert answer.properties["unverified"] == "true"


def test_a_client_whose_number_was_used_raises_and_returns_no_receipt(broker: BrokerProcess) -> None:
    with BrokerClient(port=broker.port) as client, Peer(broker.port) as other:
        client.create_topic("orders")
        client.publish("orders", b"first")
        conversation = client._link._conversation
        about = {"producer_id": str(conversation.producer_id), "producer_secret": conversation._producer_secret}
        assert other.hello(**about).properties["status"] == "success"
        other.publish("orders", b"not the client's", 2)
        broker.restart()  # so that the client continues as the producer, knowing nothing of number 2
        with pytest.raises(OutOfSequence, match="used for another message"):
            client.publish("orders", b"second")
