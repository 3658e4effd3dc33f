"""Many bodies spread over many partitions: the partitions that the broker would choose, in long runs."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb import AsyncBrokerClient, BrokerClient, PublishFailed, UnknownPartition
from qb.clients.blocking.connection.socket_calls import hang_up
from qb.clients.protocol.partition_spread import (
    BLOCK,
    FEW,
    LEAST_RUN,
    PARTITIONS_KNOWN_FOR,
    RUN,
    PartitionSpread,
    TopicRoutes,
    partition_of,
)
from qb.clients.protocol.publish_frames import portions
from qb.clients.protocol.receipts import SpreadOffsets, SpreadRun, StoredRun
from qb.core.wire.frames import decode_frame
from qb.core.wire.runs.staged_frames import frames_in
from tests.support.brokers import BrokerProcess
from tests.support.scripted_broker import ScriptedBroker

pytestmark = pytest.mark.timeout(30)
PARTITIONS = 5  # of the topic that each test has


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def stored(client: BrokerClient, topic: str) -> dict[tuple[int, int], bytes]:
    """Return all messages of a topic by partition and offset."""
    found = {}
    for partition in range(client.describe_topic(topic)["partitions"]):
        portion = client.fetch(topic, partition)
        while portion:
            found |= {(message.partition, message.offset): message.body for message in portion}
            portion = client.fetch(topic, partition, portion.next_offset)
    return found


def test_bodies_without_a_key_take_turns_from_0_and_the_next_call_goes_on(client: BrokerClient, topic: str) -> None:
    offsets = client.publish_many(topic, numbered(7_003))
    assert offsets == [number // 5 for number in range(7_003)]
    assert list(offsets.partitions) == [number % 5 for number in range(7_003)]
    more = client.publish_many(topic, numbered(2))
    assert list(more.partitions) == [3, 4]
    assert (offsets[-1], offsets[:3]) == (1_400, [0, 0, 0])
    assert stored(client, topic)[1, 3] == b"16"


@given(st.lists(st.tuples(st.binary(max_size=9), st.sampled_from([None, "a", "bb", "ccc"]))), st.integers(20, 400))
def test_lists_are_spread_as_other_iterables_are(messages: list[tuple[bytes, str | None]], enough: int) -> None:
    bodies, keys = [body for body, _ in messages], [key for _, key in messages]

    def frames(bodies: Iterable[bytes], keys: Iterable[str | None]) -> dict[int, tuple[int, str | None, bytes]]:
        spread, found = PartitionSpread("t", 3, TopicRoutes(), None, 5), dict[int, tuple[int, str | None, bytes]]()
        for block in portions(spread.with_keys(bodies, keys), spread.overhead, 100, enough):
            for piece in spread.pieces(block):
                built = piece.form.frames(1, piece.bodies)
                for index, at in zip(piece.indexes, frames_in(bytes(built)), strict=True):
                    frame = decode_frame(built, at)
                    assert frame.properties["partition"] == str(piece.partition)
                    found[index] = piece.partition, frame.properties.get("key"), bytes(frame.body)
        return found

    found = frames(bodies, keys)
    assert [(body, key) for _, (_, key, body) in sorted(found.items())] == messages
    assert found == frames(iter(bodies), iter(keys))


def test_keys_go_where_the_broker_would_put_them_and_stay_in_order(client: BrokerClient, topic: str) -> None:
    bodies = numbered(3_000)
    keys = [f"k{number % 97}" for number in range(3_000)]
    offsets = client.publish_many(topic, iter(bodies), keys=iter(keys), properties={"source": "test"})
    assert list(offsets.partitions) == [crc32(key.encode()) % 5 for key in keys]
    found = stored(client, topic)
    assert [found[place] for place in zip(offsets.partitions, offsets, strict=True)] == bodies
    receipt = client.publish(topic, b"x", key="k1")
    assert receipt.partition == offsets.partitions[1]
    (message,) = client.fetch(topic, offsets.partitions[5], offsets[5], max_messages=1)
    assert (message.key, message.properties) == ("k5", {"source": "test"})


def test_bodies_with_and_without_keys_may_be_mixed(client: BrokerClient, topic: str) -> None:
    offsets = client.publish_many(topic, numbered(4), keys=[None, "a", None, "a"])
    home = crc32(b"a") % 5
    assert list(offsets.partitions) == [0, home, 1, home]


def test_a_topic_with_one_partition_takes_keys_too(client: BrokerClient, topic: str) -> None:
    client.create_topic(f"{topic}-one")
    assert client.publish_many(f"{topic}-one", numbered(3), keys=["a", "b", "c"]) == [0, 1, 2]
    assert [message.key for message in client.fetch(f"{topic}-one")] == ["a", "b", "c"]


def test_bodies_of_different_lengths_are_stored_as_they_are_with_their_keys_in_order(
    client: BrokerClient, topic: str
) -> None:
    bodies = [b"%d" % number + b"x" * (number % 300) for number in range(20_000)]
    keys = [f"customer-{number * 7 % 1_000}" for number in range(20_000)]
    offsets = client.publish_many(topic, bodies, keys=keys, properties={"colour": "grün"})
    found = {}
    for partition in range(PARTITIONS):
        at = 0
        while portion := client.fetch(topic, partition, at):
            found |= {(partition, each.offset): (each.key, each.body, each.properties["colour"]) for each in portion}
            at = portion.next_offset
    expected = zip(keys, bodies, ["grün"] * len(bodies), strict=True)
    assert [found[place] for place in zip(offsets.partitions, offsets, strict=True)] == list(expected)
    assert list(offsets.partitions) == [crc32(key.encode()) % PARTITIONS for key in keys]
    for partition in range(PARTITIONS):
        mine = [offset for offset, where in zip(offsets, offsets.partitions, strict=True) if where == partition]
        assert mine == list(range(len(mine)))


def test_keys_that_contradict_or_end_too_soon_are_refused(client: BrokerClient, topic: str) -> None:
    with pytest.raises(ValueError, match="either keys"):
        client.publish_many(topic, numbered(3), partition=1, keys=["a"] * 3)
    with pytest.raises(ValueError, match="fewer keys than bodies"):
        client.publish_many(topic, numbered(3), keys=["a"])
    assert len(stored(client, topic)) == 1  # the one that had a key


def test_a_body_that_is_refused_leaves_the_others_where_they_are(client: BrokerClient, topic: str) -> None:
    with pytest.raises(PublishFailed) as caught:
        client.publish_many(topic, [b"a", b"b", b"c", bytes(17 * 2**20), b"d"])
    assert caught.value.index == 3
    assert caught.value.stored == [0, 0, 0]


def test_a_topic_made_anew_with_fewer_partitions_is_noticed(client: BrokerClient, topic: str) -> None:
    client.publish_many(topic, numbered(10))
    client.delete_topic(topic)
    client.create_topic(topic, partitions=2)
    with pytest.raises(PublishFailed) as caught:
        client.publish_many(topic, numbered(10))
    assert isinstance(caught.value.__cause__, UnknownPartition)
    assert set(client.publish_many(topic, numbered(10)).partitions) == {0, 1}


def test_every_body_is_stored_once_across_lost_connections(shared: BrokerProcess, topic: str) -> None:
    with BrokerClient(port=shared.port) as client:
        client.publish(topic, b"", 0)

        def bodies() -> Iterator[bytes]:
            for number, body in enumerate(sent):
                if number in (9_000, 20_000):
                    hang_up(client._link._connection.socket)
                yield body

        sent = [body.ljust(100) for body in numbered(30_000)]
        offsets = client.publish_many(topic, bodies())
        found = stored(client, topic)
        assert [found[place] for place in zip(offsets.partitions, offsets, strict=True)] == sent
        assert len(found) == 30_001


def test_the_broker_routes_where_the_partitions_are_not_known() -> None:
    with ScriptedBroker(partitions=3) as broker, BrokerClient(port=broker.port) as client:
        assert client.publish_many("unknown", numbered(6)) == [0, 0, 0, 1, 1, 1]
        assert "partition" not in broker.messages[0].properties


async def test_the_trio_client_does_the_same(shared: BrokerProcess, topic: str, client: BrokerClient) -> None:
    async def endless() -> AsyncIterator[bytes]:
        number = 0
        while True:
            yield b"%d" % number
            number += 1

    async with AsyncBrokerClient(port=shared.port) as trio_client:
        offsets = await trio_client.publish_many(topic, numbered(1_000))
        assert list(offsets.partitions) == [number % 5 for number in range(1_000)]
        with pytest.raises(ValueError, match="fewer keys"):
            bodies = endless()
            await trio_client.publish_many(topic, bodies, keys=["k"] * 10)
        await bodies.aclose()
    assert len(stored(client, topic)) == 1_010


@given(
    count=st.integers(1, 40),
    blocks=st.lists(st.integers(1, 40), max_size=5),
    keyed=st.booleans(),
)
def test_pieces_cover_every_body_once_in_the_order_of_each_partition(
    count: int, blocks: list[int], keyed: bool
) -> None:
    scatter = PartitionSpread("t", count, TopicRoutes(), None, 0)
    keys = [None if number % 3 else f"k{number % 5}" for number in range(sum(blocks))]
    left = iter(scatter.with_keys(numbered(sum(blocks)), keys) if keyed else numbered(sum(blocks)))
    pieces: list[tuple[int, bytes, list[int], list[bytes]]] = []
    for size in blocks:
        firsts = []
        for partition, indexes, form, bodies in scatter.pieces([bytes(next(left)) for _ in range(size)]):
            firsts.append(indexes[0])
            pieces.append((partition, form.frames(1, bodies), list(indexes), list(bodies)))
        assert firsts == sorted(firsts)
    for partition, frames, indexes, bodies in pieces:
        assert bodies == [b"%d" % index for index in indexes]
        assert set(re.findall(rb"partition=(\d+)", frames)) == {b"%d" % partition}
    assert sorted(index for _, _, indexes, _ in pieces for index in indexes) == list(range(sum(blocks)))


def test_scattered_offsets_are_a_sequence_without_what_was_not_stored() -> None:
    offsets = SpreadOffsets([SpreadRun(range(0, 6, 2), 0, 10), SpreadRun([1, 5], 1, 70)])
    assert offsets == [10, 70, 11, 12, 71]
    assert len(SpreadOffsets([])) == 0
    holes = SpreadOffsets([SpreadRun(range(0, 9, 4), 0, 3), SpreadRun([1, 6], 1, 70)])
    assert (list(holes), list(holes.partitions)) == ([3, 70, 4, 71, 5], [0, 1, 0, 1, 0])
    assert [run.start for run in holes.runs] == [0, 1, 4, 6, 8]
    assert holes.runs[-1] == StoredRun(8, 1, 0, 5)
    assert repr(holes) == "<5 offsets in 2 partitions>"
    for copied in (pickle.loads(pickle.dumps(holes)), copy.deepcopy(holes)):
        assert copied == holes
        assert copied.runs == holes.runs


def test_what_goes_to_one_partition_is_cut_into_runs_even_if_all_have_the_same_key() -> None:
    scatter = PartitionSpread("t", 16, TopicRoutes(), None, 0)
    bodies = numbered(100_000)
    list(scatter.with_keys(bodies, ["hot" if number % 10 else str(number) for number in range(100_000)]))
    pieces = list(scatter.pieces(bodies))
    assert all(len(piece.form.frames(1, piece.bodies)) <= 1.1 * RUN for piece in pieces)
    assert [piece.indexes[0] for piece in pieces] == sorted(piece.indexes[0] for piece in pieces)
    hot = [index for piece in pieces if piece.partition == partition_of("hot", 16) for index in piece.indexes]
    assert hot == sorted(hot)
    assert sorted(index for piece in pieces for index in piece.indexes) == list(range(100_000))


def test_bodies_without_keys_make_as_many_runs_as_they_are_worth_and_come_to_all_partitions_in_turn() -> None:
    partitions, routes = 1_024, TopicRoutes()
    body, used = b"x" * 1_000, set[int]()
    scatter = PartitionSpread("t", partitions, routes, None, 0)
    block = [body] * (BLOCK // (len(body) + scatter.overhead))
    for _ in range(partitions * LEAST_RUN // BLOCK + 2):
        pieces = list(scatter.pieces(block))
        assert len(pieces) <= BLOCK // LEAST_RUN
        assert sorted(index for piece in pieces for index in piece.indexes)[-1] == scatter.next_index - 1
        used |= {piece.partition for piece in pieces}
    assert used == set(range(partitions))


def test_few_partitions_are_used_evenly_however_little_is_published() -> None:
    scatter = PartitionSpread("t", FEW, TopicRoutes(), None, 0)
    assert [len(piece.bodies) for piece in scatter.pieces(numbered(2 * FEW))] == [2] * FEW
    first = {piece.partition for piece in PartitionSpread("t", 100, TopicRoutes(), None, 0).pieces(numbered(1_000))}
    assert len(first) == FEW


def test_what_is_known_of_a_topic_is_asked_again_after_a_while() -> None:
    routes = TopicRoutes()
    assert routes.partitions("t", 0.0) is None
    routes.learn("t", 4, 10.0)
    assert routes.partitions("t", 10.0 + PARTITIONS_KNOWN_FOR - 1) == 4
    assert routes.partitions("t", 10.0 + PARTITIONS_KNOWN_FOR) is None
