"""Whatever is killed, and whenever, a topic holds each row of a stream exactly once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.spark.conftest import QUICK
from tests.support.brokers import ROOT, BrokerProcess
from tests.support.peers import Peer

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.kill]

DRIVER = Path(__file__).with_name("driver.py")
JVM_KILLED = 3
PARTITIONS = 3
ROWS = 30

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


class Stream:
    """Files to publish, one a batch, and the faults that are to happen on the way, one a batch."""

    def __init__(self, directory: Path, faults: list[str], **options: str) -> None:
        self.topic, self.faults = directory.name, faults
        self.rows = Counter(f"{file}-{row}" for file in range(len(faults)) for row in range(ROWS))
        self._fired = directory / "fired"
        for path in (self._fired, directory / "input"):
            path.mkdir(parents=True)
        for file in range(len(faults)):
            path = directory / "input" / f"{file:03}"
            path.write_text("".join(f"{file}-{row}\n" for row in range(ROWS)))
            os.utime(path, (file, file))  # Spark takes the oldest first
        options |= {"topic": self.topic, "requestTimeout": "20"}
        (directory / "plan.json").write_text(json.dumps({"faults": dict(enumerate(faults)), "options": options}))

    def fired(self) -> int:
        """How many faults have happened."""
        return len(list(self._fired.iterdir()))


class Drivers:
    """Runs Spark drivers one after another, and the broker again whenever it was killed."""

    def __init__(self, directory: Path, broker: BrokerProcess) -> None:
        self._directory, self._broker = directory, broker
        (directory / "spark.json").write_text(json.dumps(QUICK))

    def finish(self, most: int) -> int:
        """Return how many drivers it took until all is published."""
        for drivers in range(1, most + 1):
            code = self._run()
            if code == 0:
                return drivers
            assert code == JVM_KILLED, (self._directory / "driver.log").read_text()[-5000:]
        raise AssertionError(f"{most} drivers were not enough")

    def _run(self) -> int:
        command = [sys.executable, str(DRIVER), str(self._directory)]
        with (self._directory / "driver.log").open("ab") as log:
            driver = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log)
        try:
            while True:
                if self._broker.process.poll() is not None:
                    self._broker.wait()
                    self._broker.start()
                (self._directory / "broker.pid").write_text(str(self._broker.process.pid))
                try:
                    return driver.wait(timeout=0.05)
                except subprocess.TimeoutExpired:
                    pass
        finally:
            driver.kill()
            driver.wait()


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

    drivers = Drivers(work, broker).finish(most=len(OF_THE_DRIVER) + 1)

    assert published(broker, exact) == exact.rows, f"seed {seed}"
    assert exact.fired() == len(faults) == 24
    assert drivers == len(OF_THE_DRIVER) + 1, "the JVM was killed each time"
    straight = published(broker, control)
    assert straight.keys() == control.rows.keys(), "at least once"
    assert straight > control.rows, "what the same faults do without transactions"


def published(broker: BrokerProcess, stream: Stream) -> Counter[str]:
    """Every row of a topic, and how often it is there."""
    with Peer(broker.port) as peer:
        peer.hello()
        bodies = [body for partition in range(PARTITIONS) for body in peer.bodies(stream.topic, partition)]
    return Counter(body.decode() for body in bodies)
