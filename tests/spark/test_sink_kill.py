"""Whatever is killed, and whenever, a topic holds each row of a stream exactly once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.spark.faulty_streams import PARTITIONS, Drivers, Stream, published
from tests.support.brokers import BrokerProcess
from tests.support.peers import Peer

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.kill]

OF_THE_DRIVER = [
    "driver killed in a task",
    "driver killed before commit",
    "driver killed inside commit",
    "driver killed after commit",
]
OF_OTHERS = [
    "task killed",
    "task fails",
    "broker killed while staging",
    "broker killed before commit",
    "broker killed while committing",
    "broker killed after commit",
    "commit killed when it was done",
]


@pytest.mark.timeout(600)
def test_each_row_is_published_exactly_once_through_two_dozen_faults(broker: BrokerProcess, tmp_path: Path) -> None:
    work = tmp_path / "work"
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    faults = OF_THE_DRIVER + OF_OTHERS * 2 + dice.choices(OF_OTHERS, k=6)
    dice.shuffle(faults)
    servers = f"127.0.0.1:{broker.port}"
    exact = Stream(work / "exactly-once", faults, servers=servers)
    control = Stream(work / "straight", ["task fails", OF_OTHERS[-1]], servers=servers, delivery="at-least-once")
    with Peer(broker.port) as peer:
        for stream in (exact, control):
            peer.create_topic(stream.topic, partitions=str(PARTITIONS))

    def running() -> int:
        if broker.process.poll() is not None:
            broker.wait()
            broker.start()
        return broker.process.pid

    drivers = Drivers(work, running).finish(most=len(OF_THE_DRIVER) + 1)

    with Peer(broker.port) as peer:
        peer.hello()
        found, straight = published(peer, exact), published(peer, control)
    assert found == exact.rows, f"seed {seed}"
    assert exact.fired() == len(faults) == 24
    assert drivers == len(OF_THE_DRIVER) + 1, "the JVM was killed each time"
    assert straight.keys() == control.rows.keys(), "at least once"
    assert straight > control.rows, "what the same faults do without transactions"
