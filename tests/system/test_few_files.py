"""A real broker whose limit of open files is far below what its topics and peers would take."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from qb import BrokerClient
from qb.storage.verification import verify
from tests.support.brokers import BrokerProcess

pytestmark = pytest.mark.timeout(300)

FEW_FILES = ("bash", "-c", 'ulimit -n 256 && exec "$@"', "qb")
TOPICS, PARTITIONS = 40, 4  # with a log and an index each: 320 files


def bodies_of(topic: str, partition: int) -> list[bytes]:
    return [f"{topic} {partition} {number}".encode() for number in range(2)]


def test_with_256_files_every_topic_is_made_written_and_read_after_a_restart(
    start_broker: Callable[..., BrokerProcess],
) -> None:
    broker = start_broker(prefix=FEW_FILES)
    assert "the limit of open files is 256: that allows 128 connections" in broker.log
    partitions = [(f"t{number}", partition) for number in range(TOPICS) for partition in range(PARTITIONS)]
    with BrokerClient(port=broker.port) as client, ExitStack() as crowd:
        for number in range(TOPICS):
            client.create_topic(f"t{number}", partitions=PARTITIONS)
        for _ in range(300):
            crowd.enter_context(socket.create_connection(("127.0.0.1", broker.port)))
        for topic, partition in partitions:
            client.publish_many(topic, bodies_of(topic, partition), partition=partition)
        client.create_topic("one-more")
    broker.kill()
    assert verify(broker.data_dir).findings == []
    broker.start()
    with BrokerClient(port=broker.port) as client:
        for topic, partition in partitions:
            found = client.fetch(topic, partition=partition)
            assert [message.body for message in found] == bodies_of(topic, partition)
    assert "Too many open files" not in broker.log
    assert broker.stop() == 0
