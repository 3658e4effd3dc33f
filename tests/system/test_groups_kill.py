"""Consumer groups under churn: real consumers, killed with SIGKILL, and a broker that is killed too."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qb import BrokerClient
from tests.support.brokers import ROOT, BrokerProcess
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.kill, pytest.mark.timeout(60)]

PARTITIONS = 6


class Crowd:
    """Consumers of one group, each in a process of its own, and what they say they have handled."""

    def __init__(self, directory: Path, port: int) -> None:
        self._directory, self._port = directory, port
        self._alive: dict[Path, subprocess.Popen[bytes]] = {}
        self._born = 0

    def add(self) -> None:
        self._born += 1
        path = self._directory / f"worker-{self._born}"
        path.touch()
        argv = [sys.executable, ROOT / "tests" / "support" / "group_worker.py", str(self._port), "g", "t", path]
        self._alive[path] = subprocess.Popen(argv)

    def kill_one(self) -> None:
        path = random.choice(sorted(self._alive))
        process = self._alive.pop(path)
        process.kill()
        process.wait()

    def stop_all(self) -> list[int]:
        """Ask all to stop; return their exit codes."""
        for process in self._alive.values():
            process.terminate()
        codes = [process.wait(timeout=20) for process in self._alive.values()]
        self._alive.clear()
        return codes

    def kill_all(self) -> None:
        while self._alive:
            self.kill_one()

    def notes(self) -> dict[Path, list[tuple[int, int, int]]]:
        """Return what each has handled, as (generation, partition, offset); a line cut off by a kill is left out."""
        found = {}
        for path in self._directory.glob("worker-*"):
            lines = path.read_bytes().split(b"\n")[:-1]
            found[path] = [(int(a), int(b), int(c)) for a, b, c in map(bytes.split, lines)]
        return found

    def handled(self) -> set[tuple[int, int]]:
        return {(partition, offset) for notes in self.notes().values() for _, partition, offset in notes}


@pytest.fixture
def broker(start_broker: Callable[..., BrokerProcess]) -> BrokerProcess:
    return start_broker()


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[BrokerClient]:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("t", partitions=PARTITIONS)
        yield client


@pytest.fixture
def crowd(tmp_path: Path, broker: BrokerProcess) -> Iterator[Crowd]:
    crowd = Crowd(tmp_path, broker.port)
    yield crowd
    crowd.kill_all()


def wait_until_shared(client: BrokerClient, members: int) -> None:
    """Return when so many members share the partitions, each holding what it should; the dead are out by then."""

    def is_shared() -> bool:
        if not any(group["group"] == "g" for group in client.list_groups()):
            return False
        group = client.describe_group("g")
        return [len(member["partitions"]) for member in group["members"]] == [PARTITIONS // members] * members

    wait_until(is_shared)


def committed(client: BrokerClient) -> dict[int, int]:
    return {row["partition"]: row["offset"] for row in client.committed_offsets("g")}


def check_nothing_skipped(client: BrokerClient, crowd: Crowd) -> None:
    """All that lies before a committed offset was handled."""
    offsets = committed(client)  # first: meanwhile more may be handled, never less
    handled = crowd.handled()
    missing = [(p, n) for p, end in offsets.items() for n in range(end) if (p, n) not in handled]
    assert missing == []


def check_one_owner(crowd: Crowd) -> None:
    """No partition was handled by two members in one generation."""
    owners: dict[tuple[int, int], set[Path]] = {}
    for path, notes in crowd.notes().items():
        for generation, partition, _ in notes:
            owners.setdefault((generation, partition), set()).add(path)
    assert {place: who for place, who in owners.items() if len(who) > 1} == {}


class Publisher(threading.Thread):
    """Publishes small portions until it is stopped."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.positions, self.stopping = port, set[tuple[int, int]](), threading.Event()
        self.start()

    def run(self) -> None:
        with BrokerClient(port=self.port) as client:
            while not self.stopping.wait(0.02):
                offsets = client.publish_many("t", [b"x"] * 60)
                self.positions.update(zip(offsets.partitions, offsets, strict=True))

    def end(self) -> set[tuple[int, int]]:
        self.stopping.set()
        self.join()
        return self.positions


def test_every_message_is_handled_and_none_skipped_though_consumers_are_killed(
    broker: BrokerProcess, client: BrokerClient, crowd: Crowd
) -> None:
    publisher = Publisher(broker.port)
    for _ in range(3):
        crowd.add()
    for _ in range(3):
        wait_until_shared(client, 3)
        before = len(crowd.handled())
        wait_until(lambda before=before: len(crowd.handled()) > before + 500)
        crowd.kill_one()
        check_nothing_skipped(client, crowd)
        crowd.add()
    positions = publisher.end()
    wait_until(lambda: crowd.handled() >= positions)
    check_nothing_skipped(client, crowd)
    check_one_owner(crowd)


def test_committed_offsets_survive_kill_9_of_the_broker_and_consumers_go_on(
    broker: BrokerProcess, client: BrokerClient, crowd: Crowd
) -> None:
    publisher = Publisher(broker.port)
    for _ in range(2):
        crowd.add()
    for _ in range(2):
        wait_until_shared(client, 2)
        before = len(crowd.handled())
        wait_until(lambda before=before: len(crowd.handled()) > before + 500 and len(committed(client)) == PARTITIONS)
        known = committed(client)
        broker.kill()
        broker.start()
        after = committed(client)
        assert {p: after[p] >= offset for p, offset in known.items()} == dict.fromkeys(known, True)
    positions = publisher.end()
    wait_until(lambda: crowd.handled() >= positions)
    check_nothing_skipped(client, crowd)
    check_one_owner(crowd)


def test_a_consumer_that_is_stopped_leaves_nothing_uncommitted(
    broker: BrokerProcess, client: BrokerClient, crowd: Crowd
) -> None:
    crowd.add()
    crowd.add()
    wait_until_shared(client, 2)
    offsets = client.publish_many("t", [b"x"] * 3_000)
    positions = set(zip(offsets.partitions, offsets, strict=True))
    wait_until(lambda: crowd.handled() >= positions)
    assert crowd.stop_all() == [0, 0]
    assert committed(client) == dict.fromkeys(range(PARTITIONS), 500)
    assert sum(map(len, crowd.notes().values())) == 3_000  # each once
    assert client.describe_group("g")["members"] == []
