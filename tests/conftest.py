"""Shared fixtures: a real broker, in a process of its own or in this one."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import trio

from qb import BrokerClient
from qb.core.settings import HttpSettings, SecuritySettings, ServerSettings, Settings, StorageSettings
from qb.server import serve
from qb.storage.local_engine import LocalEngine
from tests.support.brokers import ROOT, BrokerProcess, Doors
from tests.support.dealing import Dealer, turn_of

hypothesis.settings.register_profile("qb", deadline=None)  # a timing is never asserted: the machine may be busy
hypothesis.settings.load_profile("qb")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background: no child would heed it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.dont_write_bytecode:  # then every process that is started here would compile all of it again
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(ROOT / ".pytest_cache/bytecode")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest goes first."""
    items.sort(key=turn_of)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Dealer:
    return Dealer(config, log)


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[Callable[..., BrokerProcess]]:
    """Starts brokers with given settings (segment_bytes=..., json_port=free_port()), and ends them after the test."""
    started: list[BrokerProcess] = []

    def start(name: str = "broker", prefix: tuple[str, ...] = (), **settings: object) -> BrokerProcess:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        started.append(BrokerProcess(directory, prefix, **settings))
        return started[-1]

    yield start
    for broker in started:
        if broker.process.poll() is None:
            broker.kill()


@pytest.fixture
def broker(start_broker: Callable[..., BrokerProcess]) -> BrokerProcess:
    """A real broker process with the default settings."""
    return start_broker()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker process for all tests of a file that do it no harm."""
    broker = BrokerProcess(tmp_path_factory.mktemp("shared"))
    yield broker
    broker.kill()


@pytest.fixture
def client(shared: BrokerProcess) -> Iterator[BrokerClient]:
    """A blocking client of the shared broker."""
    with BrokerClient(port=shared.port) as client:
        yield client


@pytest.fixture
def topic(shared: BrokerProcess, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own on the shared broker, with as many partitions as the module's PARTITIONS says."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[:100]
    with BrokerClient(port=shared.port) as client:
        client.create_topic(name, partitions=getattr(request.module, "PARTITIONS", 1))
    return name


@pytest.fixture
def a_broker(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Doors]]:
    """Opens a broker in this process, on this test's clock, and gives out peers."""

    @asynccontextmanager
    async def opened(
        storage: dict[str, Any] | None = None,
        http: dict[str, Any] | None = None,
        security: dict[str, Any] | None = None,
        **server: Any,
    ) -> AsyncIterator[Doors]:
        settings = Settings(
            server=ServerSettings(port=0, **server),
            http=HttpSettings(**(http or {})),
            security=SecuritySettings(**(security or {})),
            storage=StorageSettings(data_dir=str(tmp_path / "data"), **(storage or {})),
        )
        engine = await trio.to_thread.run_sync(LocalEngine.open, settings.storage)
        doors = Doors()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(serve, settings, engine, doors.listening, doors.stop, started=doors.started))
                yield doors
                doors.stop.set()
        finally:
            await doors.close()
            engine.close()

    return opened
