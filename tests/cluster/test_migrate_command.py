"""`qb migrate` with real NATS servers: there and back, also when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qb import BrokerClient, BrokerUnavailable
from qb.core.rights.users_file import hash_of
from tests.damage.directories import make_clean
from tests.support.brokers import BrokerProcess, free_port
from tests.support.local_state import state
from tests.support.nats_cluster import NatsCluster
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def nats_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    cluster = NatsCluster(tmp_path_factory.mktemp("nats"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clean(tmp_path_factory.mktemp("original"))


def migrating(source: str | Path, target: str | Path, cell: str) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).with_name("qb")), "migrate", "--cell", cell]
    command += ["--from", str(source), "--to", str(target)]
    environment = {**os.environ, "QB_LEASE_TTL": "2"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def migrate(source: str | Path, target: str | Path, cell: str) -> tuple[int, str]:
    with migrating(source, target, cell) as process:
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, output


def kill_when(holds: Callable[[int], bool], source: str | Path, target: str | Path, cell: str) -> None:
    """Kill a migration as soon as something holds of its process id, or it has ended."""
    with migrating(source, target, cell) as process:
        wait_until(lambda: holds(process.pid) or process.poll() is not None)
        process.kill()


@contextmanager
def broker(urls: str, directory: Path, cell: str, token_file: str | None = None) -> Iterator[BrokerClient]:
    """A client of a real broker of the cell, which is stopped in good order at the end."""
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("qb-server")),
        "--storage-engine",
        "jetstream",
        "--nats-servers",
        urls,
    ]
    command += ["--data-dir", str(directory), "--port", str(port), "--cell", cell, "--lease-ttl", "2"]
    command += ["--cluster-port", "0", "--json-port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with BrokerClient(port=port, request_timeout=30, connect_wait=30, token_file=token_file) as client:
                yield client
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_broker_serves_what_was_migrated_and_its_copy_restores_a_journal(
    original: Path, nats_cluster: NatsCluster, tmp_path: Path
) -> None:
    urls = ",".join(nats_cluster.urls)
    code, said = migrate(original, urls, "served")
    assert code == 0, said
    with broker(urls, tmp_path / "copy", "served") as client:
        assert sorted(each.subscription_id for each in client.list_subscriptions()) == [
            "all",
            "failing",
            "late",
            "paused",
        ]
        assert client.publish("events", b"after").durability == "replicated"
        before = {topic: client.offsets(topic) for topic in ("orders", "events", "short")}
        assert before["short"].first > 0
        code, said = migrate(urls, tmp_path / "refused", "served")
        assert code == 1
        assert "a broker owns the cell" in said
    code, said = migrate(tmp_path / "copy", urls, "restored")
    assert code == 0, said
    with broker(urls, tmp_path / "anew", "restored") as client:
        assert {topic: client.offsets(topic) for topic in before} == before


def test_a_directory_is_migrated_there_and_back(original: Path, nats_cluster: NatsCluster, tmp_path: Path) -> None:
    urls = ",".join(nats_cluster.urls)
    code, said = migrate(original, urls, "whole")
    assert code == 0, said
    assert "migrated" in said
    code, said = migrate(original, urls, "whole")
    assert code == 1
    assert "not empty" in said
    code, said = migrate(urls, tmp_path / "local", "whole")
    assert code == 0, said
    assert state(tmp_path / "local", tmp_path / "after") == state(original, tmp_path / "before")


def test_users_that_a_broker_keeps_come_along_both_ways(nats_cluster: NatsCluster, tmp_path: Path) -> None:
    urls, token = ",".join(nats_cluster.urls), tmp_path / "token"
    first, directory = tmp_path / "first-users", tmp_path / "local"
    token.write_text("qb_operator\n")
    first.write_text(f"user ops sha256:{hash_of('qb_operator')} admin:*\nuser a cert:CN=a read:x\n")
    first.chmod(0o600)
    for where, flags in ((directory, {"first_users_file": first}), (tmp_path / "back", {})):
        where.mkdir(exist_ok=True)
        local = BrokerProcess(where, **flags)
        try:
            with BrokerClient(port=local.port, token_file=str(token)) as client:
                assert [each["name"] for each in client._request("list_users")] == ["a", "ops"]
            with pytest.raises(BrokerUnavailable) as refused:
                BrokerClient(port=local.port).connect()
            assert refused.value.code == "UNAUTHENTICATED"
            assert local.stop() == 0
        finally:
            local.kill()
        if flags:
            code, said = migrate(directory / "data", urls, "users")
            assert code == 0, said
            with broker(urls, tmp_path / "copy", "users", token_file=str(token)) as client:
                assert [each["name"] for each in client._request("list_users")] == ["a", "ops"]
            code, said = migrate(urls, tmp_path / "back" / "data", "users")
            assert code == 0, said


def test_a_migration_that_is_killed_is_begun_again(original: Path, nats_cluster: NatsCluster, tmp_path: Path) -> None:
    urls, local = ",".join(nats_cluster.urls), tmp_path / "local"
    kill_when(lambda pid: (original / "lock").read_text().strip() == str(pid), original, urls, "killed")
    code, said = migrate(original, urls, "killed")
    assert code == 0 or "not empty" in said, said  # it may have been whole before it was killed
    kill_when(lambda pid: (local / "checkpoint").exists(), urls, local, "killed")
    kill_when(lambda pid: (local / "topics" / "events").exists(), urls, local, "killed")
    code, said = migrate(urls, local, "killed")
    assert code == 0 or "not empty" in said, said
    assert state(local, tmp_path / "after") == state(original, tmp_path / "before")
