"""Streams that Spark publishes while processes are killed at chosen moments, and what is then in their topics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from qb.core.wire.addresses import parse_address
from tests.spark.conftest import QUICK
from tests.support.brokers import ROOT
from tests.support.peers import Peer
from tests.support.running_cell import RunningCell

DRIVER = Path(__file__).with_name("driver.py")
JVM_KILLED = 3
PARTITIONS = 3
ROWS = 30


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
    """Runs Spark drivers one after another."""

    def __init__(self, directory: Path, broker_pid: Callable[[], int | None]) -> None:
        """`broker_pid` is called again and again: which process is killed when a broker is, None if there is none."""
        self._directory, self._broker_pid = directory, broker_pid
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
                if (pid := self._broker_pid()) is not None:
                    (self._directory / "broker.pid.new").write_text(str(pid))
                    (self._directory / "broker.pid.new").replace(self._directory / "broker.pid")
                try:
                    return driver.wait(timeout=0.05)
                except subprocess.TimeoutExpired:
                    pass
        finally:
            driver.kill()
            driver.wait()


def publish_exactly_once(cell: RunningCell, work: Path, faults: list[str], seconds: float = 30.0) -> None:
    """Publish a stream to a cell, with a fault in each batch, and look for every row."""
    stream = Stream(work / "exactly-once", faults, servers=",".join(cell.servers))
    address = parse_address(cell.servers[0])
    with Peer(address.port, seconds, address.host) as peer:
        peer.create_topic(stream.topic, partitions=str(PARTITIONS))
    assert Drivers(work, partial(owner_pid, cell)).finish(most=1) == 1
    assert stream.fired() == len(faults)
    cell.wait_until_whole(seconds)
    with Peer(address.port, seconds, address.host) as peer:
        assert published(peer, stream) == stream.rows


def owner_pid(cell: RunningCell) -> int | None:
    """Return the process that owns a cell, None if no broker does just now."""
    found = cell.status()
    owners = [each["pid"] for each in found.get("brokers", ()) if each["name"] == found["owner"]]
    return owners[0] if owners else None


def published(peer: Peer, stream: Stream) -> Counter[str]:
    """Every row of a topic, and how often it is there."""
    bodies = [body for partition in range(PARTITIONS) for body in peer.bodies(stream.topic, partition)]
    return Counter(body.decode() for body in bodies)
