"""A message that kills its process, in real worker processes on a real broker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qb import BrokerClient
from tests.support.brokers import ROOT
from tests.support.collecting import numbered

pytestmark = [pytest.mark.process, pytest.mark.kill, pytest.mark.timeout(60)]

POISON = b"57"

# Handles messages until it has nothing more to do, or until the poison ends it; writes down what it has survived.
WORKER = """
import os, sys
import trio
from qb import AsyncBrokerClient, BrokerClient
port, journal, how = int(sys.argv[1]), open(sys.argv[2], "ab", buffering=0), eval(sys.argv[3])
def handler(message):
    if message.body == b"57":
        journal.write(b"death %d\\n" % message.attempt)
        os._exit(1)
    journal.write(message.body + b"\\n")
def batch_handler(messages):
    for message in messages:
        handler(message)
async def subscribe():
    async with AsyncBrokerClient(port=port) as client:
        await (await client.subscribe_to_subscription("s", **how)).wait()
if how.pop("batch", False):
    how["batch_handler"] = batch_handler
else:
    how["handler"] = handler
if how.pop("trio", False):
    trio.run(subscribe)
else:
    BrokerClient(port=port).subscribe_to_subscription("s", **how).wait()
"""


class Workers:
    """Worker processes, started again whenever one dies."""

    def __init__(self, port: int, journal: Path, how: dict[str, Any], count: int) -> None:
        self._command = [sys.executable, "-c", WORKER, str(port), str(journal), repr(how)]
        self._processes = [self._start() for _ in range(count)]
        self.deaths = 0

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, cwd=ROOT)

    def keep_alive(self) -> None:
        for index, process in enumerate(self._processes):
            if process.poll() is not None:
                assert process.returncode == 1
                self.deaths += 1
                self._processes[index] = self._start()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("how", "count"),
    [
        ({}, 1),
        ({}, 3),
        ({"concurrency": 4}, 1),
        ({"concurrency": 4}, 3),
        ({"concurrency": 4, "trio": True}, 1),
        ({"batch": True}, 1),
        ({"window": 1}, 1),
    ],
    ids=["one worker", "three workers", "four threads", "three times four", "four tasks", "batches", "window of one"],
)
@pytest.mark.parametrize("max_deliveries", [2, 4])
def test_exactly_the_message_that_kills_is_dead_lettered(
    broker: Any, tmp_path: Path, how: dict[str, Any], count: int, max_deliveries: int
) -> None:
    journal = tmp_path / "journal"
    with BrokerClient(port=broker.port) as client:
        client.create_topic("a")
        client.publish_many("a", numbered(0, 200))
        client.create_subscription("s", "a", max_deliveries=max_deliveries, backoff={"initial": 0.01, "cap": 0.01})
        workers = Workers(broker.port, journal, how, count)
        try:
            while client.describe_subscription("s")["lag"]:
                workers.keep_alive()
        finally:
            workers.stop()
        letters = client.dead_letters("s")
    lines = journal.read_bytes().split(b"\n")[:-1]
    survived = [line for line in lines if not line.startswith(b"death")]
    assert set(survived) == set(numbered(0, 200)) - {POISON}, "no neighbour is lost"
    assert [letter["offset"] for letter in letters] == [57], "no neighbour is dead-lettered"
    deaths = [line for line in lines if line.startswith(b"death")]
    assert len(deaths) == max_deliveries
    assert "died" in letters[0]["reason"]
