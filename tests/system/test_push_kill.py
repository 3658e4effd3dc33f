"""A minute of bad luck: real subscribers and the broker are killed at random, and nothing is lost."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time

import pytest

from qb import BrokerClient
from tests.support.brokers import ROOT

pytestmark = [pytest.mark.process, pytest.mark.kill, pytest.mark.timeout(180)]

SECONDS = 60.0
WINDOW = 50
SUBSCRIBER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from qb import BrokerClient
file = os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
def handle(message):
    os.write(file, message.body + b"\\n")
client = BrokerClient(port=int(sys.argv[2]))
client.connect(wait=60)
client.subscribe_to_subscription("jobs", handle).wait()
"""


class Fleet:
    """Subscriber processes that note each message they handle in a file of their own."""

    def __init__(self, directory, port, size):
        self._directory, self._port = directory, port
        self.processes = [self._start(number) for number in range(size)]
        self.kills = 0

    def _start(self, number):
        command = [
            sys.executable,
            "-c",
            SUBSCRIBER,
            str(ROOT),
            str(self._port),
            str(self._directory / f"seen-{number}"),
        ]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def kill(self, number):
        """SIGKILL one, and start it again."""
        self.stop(number)
        self.kills += 1
        self.processes[number] = self._start(number)

    def stop(self, number):
        self.processes[number].kill()
        self.processes[number].wait()

    def stop_all(self):
        for number in range(len(self.processes)):
            self.stop(number)

    def handled(self):
        """Return the body of every message that was handled, as often as it was."""
        return [body for path in self._directory.glob("seen-*") for body in path.read_bytes().split(b"\n")[:-1]]


class Publisher(threading.Thread):
    """Publishes numbered messages, one after another, until it is stopped."""

    def __init__(self, port):
        super().__init__()
        self._port = port
        self.acked: list[bytes] = []
        self.failures: list[BaseException] = []
        self.stopped = threading.Event()

    def run(self):
        try:
            with BrokerClient(port=self._port) as client:
                while not self.stopped.is_set():
                    bodies = [b"%d" % (len(self.acked) + each) for each in range(20)]
                    client.publish_many("work", bodies)
                    self.acked += bodies
        except BaseException as error:
            self.failures.append(error)


def test_every_acked_publish_is_handled_and_duplicates_are_bounded(broker, tmp_path):
    dice, server_kills = random.Random(4711), 0
    with BrokerClient(port=broker.port) as client:
        client.create_topic("work")
        client.create_subscription("jobs", "work", max_in_flight=WINDOW, ack_deadline=5)
        fleet, publisher = Fleet(tmp_path, broker.port, 3), Publisher(broker.port)
        try:
            publisher.start()
            ends = time.monotonic() + SECONDS
            while time.monotonic() < ends:
                publisher.stopped.wait(dice.uniform(0.5, 3.0))  # the time between two blows, not a wait for anything
                if dice.random() < 0.3:
                    server_kills += 1
                    broker.restart()
                else:
                    fleet.kill(dice.randrange(3))
            publisher.stopped.set()
            publisher.join(60)
            assert not publisher.failures
            while client.describe_subscription("jobs")["lag"]:
                pass
        finally:
            publisher.stopped.set()
            fleet.stop_all()
    handled = fleet.handled()
    missing = set(publisher.acked) - set(handled)
    assert not missing
    assert fleet.kills >= 5
    assert server_kills >= 3
    duplicates = len(handled) - len(set(handled))
    assert duplicates <= WINDOW * fleet.kills + 3 * WINDOW * server_kills, "more than was in flight"
