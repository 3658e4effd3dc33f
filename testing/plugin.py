"""The pytest plugin `qb`: fixtures for the tests of programs that use a broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qb.clients.blocking.client import BrokerClient
from qb.testing.chaos import Chaos
from qb.testing.fault_proxy import FaultProxy
from qb.testing.made_messages import MessageMaker
from qb.testing.running_broker import BrokerFactory, RunningBroker

MARKER = "qb_settings(**settings): settings of the broker that `qb_broker` starts, such as fsync_on_write=False"


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture(scope="session")
def qb_broker_factory() -> Iterator[BrokerFactory]:
    """Starts brokers: RunningBroker(qb_broker_factory, directory, **settings)."""
    factory = BrokerFactory()
    yield factory
    factory.close()


@pytest.fixture
def _qb_proxy(request: pytest.FixtureRequest) -> Iterator[FaultProxy | None]:
    """Stands before the broker in tests that use `qb_chaos`."""
    proxy = FaultProxy() if "qb_chaos" in request.fixturenames else None
    yield proxy
    if proxy is not None:
        proxy.close()


@pytest.fixture
def qb_broker(
    qb_broker_factory: BrokerFactory, _qb_proxy: FaultProxy | None, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[RunningBroker]:
    """A real broker of the test's own: on a free port, with an empty data directory. See `address`, `port`, `log`."""
    settings: dict[str, object] = {}
    for marker in request.node.iter_markers("qb_settings"):
        settings = marker.kwargs | settings
    directory = tmp_path / "qb"
    directory.mkdir()
    broker = RunningBroker(qb_broker_factory, directory, _qb_proxy, **settings)
    yield broker
    broker.kill()


@pytest.fixture
def qb_client(qb_broker: RunningBroker) -> Iterator[BrokerClient]:
    """A connected BrokerClient of `qb_broker`."""
    with BrokerClient(qb_broker.host, qb_broker.port) as client:
        yield client


@pytest.fixture
def qb_chaos(qb_broker: RunningBroker, _qb_proxy: FaultProxy | None) -> Chaos:
    """Breaks things between `qb_broker` and its clients."""
    assert _qb_proxy is not None
    return Chaos(qb_broker, _qb_proxy)


@pytest.fixture
def qb_message() -> MessageMaker:
    """Makes messages to call a handler with: qb_message({"id": 1}, key="customer-7")."""
    return MessageMaker()
