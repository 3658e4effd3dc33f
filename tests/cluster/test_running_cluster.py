"""Real brokers and real NATS servers: whatever happens to the owner or to NATS, nothing that was acked is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qb import BrokerClient
from qb.core.wire.frames import MessageType as T
from tests.support.brokers import ROOT, run_server
from tests.support.cluster_load import ClusterLoad
from tests.support.line_peers import converse
from tests.support.local_cluster import LocalClusterProcess, is_running
from tests.support.peers import Peer
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.process,
    pytest.mark.timeout(150),
    pytest.mark.skipif(sys.platform != "linux", reason="the processes end with their parent on Linux alone"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClusterProcess]:
    """One cluster for all tests of this file; each leaves it whole."""
    cluster = LocalClusterProcess(tmp_path_factory.mktemp("cluster"))
    try:
        assert cluster.banner.startswith("QB cluster"), (cluster.directory / "cluster.err").read_text()
        yield cluster
    finally:
        cluster.kill()


def qb(cluster: LocalClusterProcess, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "client.py"), *words, "--servers", ",".join(cluster.servers)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def survive(cluster: LocalClusterProcess, name: str, harm: Callable[[str], None], *, new_owner: bool = True) -> float:
    """Do harm to a cluster that works; returns the longest time without an ack that a publisher saw."""
    cluster.wait_until_whole()
    owner, epoch = cluster.owner(), cluster.status()["epoch"]
    load = ClusterLoad(cluster.servers, name, cluster.lines)
    with load.running() as ledger:
        ledger.longest_gap = 0.0
        harm(owner)
        cluster.wait_for_owner(epoch + new_owner)
        acked, committed = len(ledger.stored), len(ledger.committed)
        wait_until(lambda: ledger.faults or (len(ledger.stored) > acked + 100 and len(ledger.committed) > committed))
    load.check()
    print(f"{name}: the longest gap of a publisher was {ledger.longest_gap:.3f} s, {len(ledger.stored)} acks")
    return ledger.longest_gap


def test_the_cell_moves_by_command(cluster: LocalClusterProcess) -> None:
    def move(owner: str) -> None:
        other = next(name for name in ("broker-1", "broker-2") if name != owner)
        done = qb(cluster, "cluster", "move", "--to", other, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["owner"] == other

    survive(cluster, "move", move)


def test_an_owner_that_is_stopped_in_good_order(cluster: LocalClusterProcess) -> None:
    survive(cluster, "term", lambda owner: cluster.signal(owner, signal.SIGTERM))


def test_an_owner_that_is_killed(cluster: LocalClusterProcess) -> None:
    survive(cluster, "kill", lambda owner: cluster.signal(owner, signal.SIGKILL))


def test_the_leader_of_the_journal_is_killed(cluster: LocalClusterProcess) -> None:
    def kill(owner: str) -> None:
        leader = cluster.status()["journal"]["nodes"][0]["name"]
        pid = cluster.pid(leader)
        cluster.signal(leader, signal.SIGKILL)
        wait_until(lambda: cluster.pid(leader) != pid)

    survive(cluster, "leader", kill, new_owner=False)


def test_an_owner_that_hangs_for_twenty_seconds_answers_nothing_when_it_goes_on(cluster: LocalClusterProcess) -> None:
    def hang(owner: str) -> None:
        epoch = cluster.status()["epoch"]
        pid, began = cluster.pid(owner), time.monotonic()
        with Peer(cluster.base_port + int(owner.removeprefix("broker-")) - 1, timeout=60) as peer:
            assert peer.hello().properties["epoch"] == str(epoch)
            cluster.signal(owner, signal.SIGSTOP)
            try:
                peer.send(T.REQUEST, 5, b"{}", method="list_topics")
                cluster.wait_for_owner(epoch + 1)
                wait_until(lambda: time.monotonic() > began + 20)
            finally:
                cluster.signal(owner, signal.SIGCONT)
            answered = [frame.sequence_number for frame in iter(peer.receive, None) if frame.type == T.ACK]
            assert answered == [], "a stale owner has answered"
        wait_until(lambda: "begins anew as a follower" in cluster.log(owner).rpartition("owns cell")[2])
        assert cluster.pid(owner) == pid, "it is the same process"

    survive(cluster, "hang", hang)


def test_every_process_is_replaced_one_after_another_as_in_a_rolling_upgrade(cluster: LocalClusterProcess) -> None:
    brokers, nodes = ["broker-1", "broker-2", "broker-3"], ["nats-1", "nats-2", "nats-3"]
    before = {name: cluster.pid(name) for name in [*brokers, *nodes]}

    def replace(name: str) -> None:
        cluster.signal(name, signal.SIGTERM)
        wait_until(lambda: cluster.pid(name) != before[name], 30)
        cluster.wait_until_whole()

    def replace_all(owner: str) -> None:
        for name in [each for each in brokers if each != owner]:
            replace(name)
        assert qb(cluster, "cluster", "move").returncode == 0
        replace(owner)
        for name in nodes:
            replace(name)

    survive(cluster, "rolling", replace_all)
    assert all(cluster.pid(name) != pid for name, pid in before.items())


def test_every_broker_serves_every_kind_of_peer(cluster: LocalClusterProcess) -> None:
    cluster.wait_until_whole()
    with BrokerClient(servers=cluster.servers) as client:
        client.create_topic("doors")
    for number in range(3):
        said = converse(cluster.base_port + 10 + number, b'{"type":"produce","topic":"doors","value":"x"}\n')
        assert json.loads(said)["ok"], said
        for path in ("/ready", "/health", "/topics/doors"):
            with urllib.request.urlopen(f"http://127.0.0.1:{cluster.base_port + 20 + number}{path}", timeout=20) as got:
                assert got.status == 200
        with BrokerClient(port=cluster.base_port + number) as client:
            assert client.publish("doors", b"y").durability == "replicated"
    listed = qb(cluster, "cluster", "status", "--json")
    assert listed.returncode == 0, listed.stderr
    status = json.loads(listed.stdout)
    assert sorted(each["role"] for each in status["brokers"]) == ["follower", "follower", "owner"]
    assert status["verdict"].startswith("3 of 3 NATS nodes")


def test_all_copies_are_proved_while_they_are_used(cluster: LocalClusterProcess) -> None:
    cluster.wait_until_whole()
    load = ClusterLoad(cluster.servers, "verify", cluster.lines)
    with load.running() as ledger:
        wait_until(lambda: len(ledger.stored) > 100)
        verified = qb(cluster, "cluster", "verify", "--json")
    load.check()
    assert verified.returncode == 0, verified.stdout + verified.stderr
    found = json.loads(verified.stdout)
    assert (found["whole"], found["findings"], found["unproved"]) == (True, [], [])
    compared = next(proof for proof in found["proofs"].values() if proof["nodes"])
    assert compared["brokers"] == {"broker-1": "same", "broker-2": "same", "broker-3": "same"}
    assert sorted(each["node"] for each in compared["nodes"]["nodes"]) == ["nats-1", "nats-2", "nats-3"]
    assert all(proof["copy"]["bytes"] > 0 for proof in found["proofs"].values())


@pytest.mark.parametrize("which", [0, -1])
def test_a_verification_names_a_broker_that_is_silent(cluster: LocalClusterProcess, which: int) -> None:
    cluster.wait_until_whole()
    silent = sorted(each["name"] for each in cluster.status()["brokers"] if each["role"] == "follower")[which]
    cluster.signal(silent, signal.SIGSTOP)
    try:
        verified = qb(cluster, "cluster", "verify", "--json")
    finally:
        cluster.signal(silent, signal.SIGCONT)
    assert verified.returncode == 1, verified.stdout + verified.stderr
    found = json.loads(verified.stdout)
    assert found["whole"] is False
    assert any(each.startswith(f"broker {silent}: not compared: ") for each in found["unproved"]), found["unproved"]
    compared = next(proof for proof in found["proofs"].values() if proof["nodes"])
    assert [name for name, what in compared["brokers"].items() if what != "same"] in ([], [silent])


def test_the_cell_is_shown_and_a_repair_says_whether_it_is_safe(cluster: LocalClusterProcess) -> None:
    cluster.wait_until_whole()
    owner = cluster.owner()
    wait_until(lambda: [each["lag"] for each in cluster.status()["brokers"]] == [0, 0, 0])
    http = f"http://127.0.0.1:{cluster.base_port + 20}"
    with urllib.request.urlopen(f"{http}/metrics", timeout=20) as got:
        text = got.read().decode()
    assert 'qb_cluster_node_current{node="nats-2"} 1.0' in text
    assert f'qb_cluster_broker_lag_records{{broker="{owner}"}} 0.0' in text
    with urllib.request.urlopen(f"{http}/summary", timeout=20) as got:
        cell = json.load(got)["cell"]
    assert (cell["owner"], cell["verdict"][:17], cell["spare_nodes"]) == (owner, "3 of 3 NATS nodes", 1)
    roles = set()
    for number in range(3):
        with urllib.request.urlopen(f"http://127.0.0.1:{cluster.base_port + 20 + number}/ready", timeout=20) as got:
            roles.add(json.load(got)["role"])
    assert roles == {"owner", "follower"}
    refused = qb(cluster, "cluster", "repair", owner)
    assert refused.returncode == 1
    assert "owns the cell" in refused.stderr
    steps = qb(cluster, "cluster", "repair", "nats-2")
    assert steps.returncode == 0
    assert "stop the NATS server nats-2" in steps.stdout
    running = qb(cluster, "cluster", "repair", "nats-2", "--directory", str(cluster.directory / "nats-2"))
    assert "still answers" in running.stderr


def test_sigterm_ends_all_processes(tmp_path: Path) -> None:
    cluster = LocalClusterProcess(tmp_path, "--nodes", "1")
    try:
        assert cluster.banner.startswith("QB cluster"), (tmp_path / "cluster.err").read_text()
        pids = cluster.pids()
        assert len(pids) == 2
        with BrokerClient(port=cluster.base_port) as client:
            client.create_topic("kept")
            client.publish("kept", b"x")
        assert cluster.stop() == 0
        wait_until(lambda: not any(map(is_running, pids)))
    finally:
        cluster.kill()


def test_a_cluster_port_beyond_loopback_has_to_be_asked_for(tmp_path: Path) -> None:
    flags = ["--storage-engine", "jetstream", "--cluster-host", "0.0.0.0", "--data-dir", str(tmp_path)]
    refused = run_server(*flags)
    assert refused.returncode == 2
    assert "the cluster port on 0.0.0.0 would be open beyond loopback" in refused.stderr
    without_nats = run_server(*flags, "--insecure", "--port", "0", "--cluster-port", "0")
    assert without_nats.returncode == 1
    assert "the storage engine jetstream needs QB_NATS_SERVERS" in without_nats.stderr
