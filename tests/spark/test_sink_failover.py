"""A cell's owner is killed while Spark publishes to it: a topic holds each row of a stream exactly once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.spark.faulty_streams import publish_exactly_once
from tests.support.local_cluster import LocalClusterProcess

pytestmark = [
    pytest.mark.spark,
    pytest.mark.cluster,
    pytest.mark.process,
    pytest.mark.kill,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="the processes end with their parent on Linux alone"),
]


def test_each_row_is_published_exactly_once_while_owners_are_killed(tmp_path: Path) -> None:
    directory = tmp_path / "cluster"
    directory.mkdir()
    cluster = LocalClusterProcess(directory)
    try:
        cluster.wait_until_whole()
        epoch = cluster.status()["epoch"]
        publish_exactly_once(cluster, tmp_path / "work", ["broker killed while staging", "broker killed before commit"])
        assert cluster.wait_for_owner(epoch + 2)
    finally:
        cluster.kill()
