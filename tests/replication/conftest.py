"""A real NATS cluster for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.nats_cluster import NatsCluster


@pytest.fixture(scope="module")
def nats_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    """Three nodes with JetStream, for tests that do them no harm."""
    cluster = NatsCluster(tmp_path_factory.mktemp("nats"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()
