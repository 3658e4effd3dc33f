"""What a client publishes, is delivered and fetches travels compressed, counted by a proxy in between."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
import trio

from qb import AsyncBrokerClient, BrokerClient, Consumer
from tests.support.brokers import BrokerProcess
from tests.support.counting_proxy import CountingProxy
from tests.support.waiting import wait_until

COUNT = 4_000
PARTITIONS = 2


def rows() -> list[bytes]:
    """JSON such as services publish: names that repeat, values that differ."""
    dice = random.Random(17)
    return [
        json.dumps(
            {
                "id": number,
                "customer": f"customer-{dice.randrange(10_000)}",
                "item": dice.choice(["tea", "coffee", "cake", "bread"]),
                "price": round(dice.random() * 100, 2),
                "created_at": f"2026-01-{dice.randrange(1, 29):02}T12:{dice.randrange(60):02}:00Z",
            }
        ).encode()
        for number in range(COUNT)
    ]


ROWS = rows()
PLAIN = sum(map(len, ROWS)) + 32 * COUNT  # at least so many bytes travel without compression


@pytest.fixture
def proxy(shared: BrokerProcess) -> Iterator[CountingProxy]:
    proxy = CountingProxy(shared.port)
    yield proxy
    proxy.close()


@pytest.mark.parametrize(("codec", "least"), [("zstd", 4), ("lz4", 2)])
def test_publish_many_sends_a_fraction_of_the_bytes_and_all_is_stored_as_it_was(shared, topic, proxy, codec, least):
    with BrokerClient(port=proxy.port, compression=codec) as client:
        offsets = client.publish_many(topic, ROWS, keys=[str(n % 50) for n in range(COUNT)])
        assert len(offsets) == COUNT
    assert proxy.sent * least < PLAIN
    with BrokerClient(port=shared.port) as plain:
        stored = [message.body for n in range(PARTITIONS) for message in plain.fetch(topic, n, 0, max_messages=COUNT)]
    assert sorted(stored) == sorted(ROWS)


def test_without_compression_the_same_bytes_travel_as_ever(topic, proxy):
    with BrokerClient(port=proxy.port) as client:
        client.publish_many(topic, ROWS)
    assert proxy.sent > PLAIN


def test_a_small_message_alone_is_not_compressed_and_a_large_one_is(topic, proxy):
    with BrokerClient(port=proxy.port, compression="zstd") as client:
        before = proxy.sent
        client.publish(topic, b"a" * 500)
        assert proxy.sent - before > 500
        before = proxy.sent
        client.publish(topic, b"a" * 100_000)
        assert proxy.sent - before < 1_000


def test_a_producer_sends_a_fraction_of_the_bytes(client, topic, proxy):
    with (
        BrokerClient(port=proxy.port) as sender,
        sender.producer(topic, compression="zstd", linger_ms=1000) as producer,
    ):
        for row in ROWS:
            producer.send(row, partition=1)
    assert proxy.sent * 4 < PLAIN
    assert [message.body for message in client.fetch(topic, 1, 0, max_messages=COUNT)] == ROWS


def test_fetches_and_consumers_receive_a_fraction_of_the_bytes(client, topic, proxy):
    client.publish_many(topic, ROWS, partition=0)
    with BrokerClient(port=proxy.port, compression="zstd") as reader:
        assert [message.body for message in reader.fetch(topic, 0, 0, max_messages=COUNT)] == ROWS
    assert proxy.received * 4 < PLAIN
    before = proxy.received
    with Consumer(f"group-{topic}"[:200], topic, port=proxy.port, compression="zstd") as consumer:
        read: list[bytes] = []
        while len(read) < COUNT:
            read += [message.body for message in consumer.poll(5.0)]
    assert sorted(read) == sorted(ROWS)
    assert (proxy.received - before) * 4 < PLAIN


def test_deliveries_are_a_fraction_of_the_bytes(client, topic, proxy):
    client.publish_many(topic, ROWS, partition=0)
    handled: list[bytes] = []
    with BrokerClient(port=proxy.port, compression="zstd") as subscriber:
        subscriber.create_and_subscribe(
            topic, topic, lambda message: handled.append(message.body), window=COUNT, max_in_flight=COUNT
        )
        wait_until(lambda: len(handled) == COUNT)
    assert handled == ROWS
    assert proxy.received * 4 < PLAIN


async def test_the_async_client_does_it_too(shared, topic, proxy):
    with trio.fail_after(30):
        async with AsyncBrokerClient(port=proxy.port, compression="zstd") as client:
            await client.publish_many(topic, ROWS, partition=1)
            sent = proxy.sent
            fetched = await client.fetch(topic, 1, 0, max_messages=COUNT)
            assert [message.body for message in fetched] == ROWS
    assert sent * 4 < PLAIN
    assert proxy.received * 4 < PLAIN


def test_a_transaction_is_staged_compressed(client, topic, proxy):
    with BrokerClient(port=proxy.port, compression="zstd") as writer, writer.transaction(topic) as transaction:
        transaction.publish_many(topic, ROWS, partition=0)
    assert proxy.sent * 4 < PLAIN
    assert [message.body for message in client.fetch(topic, 0, 0, max_messages=COUNT)] == ROWS


def test_what_was_not_answered_is_sent_again_after_a_lost_connection_and_stored_once(client, topic, proxy):
    with BrokerClient(port=proxy.port, compression="zstd") as writer:
        sent = 0

        def bodies() -> Iterator[bytes]:
            nonlocal sent
            for sent, row in enumerate(ROWS * 3):
                if sent in (5_000, 9_000):
                    proxy.drop_connections()
                yield row

        writer.publish_many(topic, bodies(), partition=0)
    stored, at = [], 0
    while batch := client.fetch(topic, 0, at, max_messages=100_000, max_bytes=1 << 24):
        stored += [message.body for message in batch]
        at = batch.next_offset
    assert stored == ROWS * 3


def test_a_codec_that_there_is_not_is_refused_when_the_client_is_made():
    with pytest.raises(ValueError, match="'zstd', 'lz4' or None"):
        BrokerClient(compression="gzip")
