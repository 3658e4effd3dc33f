"""`qb migrate` with real NATS servers: there and back, also when it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.damage.directories import make_clean
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
