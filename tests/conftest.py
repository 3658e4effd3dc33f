"""Shared fixtures: a real broker, in a process of its own or in this one."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import trio
from dealing import Dealer, turn_of
from http_peers import HttpPeer
from line_peers import LinePeer
from peers import TrioPeer

from core.broker import MessageBroker
from core.config import ServerSettings, Settings, StorageSettings
from core.listening import Doorway, FrameDoor, listen
from gateways.json_lines import JsonDoor
from server import http_door, serve
from storage.local import LocalEngine

ROOT = Path(__file__).parent.parent

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


WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
FIRST_PORT = 10_000 + WORKER % 10 * 2_000
PORTS = itertools.cycle(random.Random().sample(range(FIRST_PORT, FIRST_PORT + 2_000), 2_000))


def free_port() -> int:
    """Return a port that nobody listens on, and that nobody is given while a broker on it is down.

    The system hands out higher ones, and each worker has ports of its own.
    """
    while True:
        port = next(PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            pass


class BrokerProcess:
    """`python server.py` on a free port, with a data directory of its own; other doors only if they are asked for."""

    def __init__(self, directory: Path, prefix: tuple[str, ...] = (), **settings: object) -> None:
        self.data_dir = directory / "data"
        self.log_file = directory / "server.log"
        self.port = free_port()
        self.banner = ""
        self._prefix = prefix
        self._settings = {name: str(value) for name, value in settings.items()}
        self.start()

    def start(self) -> None:
        """Start, and return when it listens."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
        environment |= {"QB_DATA_DIR": str(self.data_dir), "QB_SERVER_PORT": str(self.port)}
        environment |= {"QB_JSON_PORT": "0", "QB_HTTP_PORT": "0"}
        environment |= {f"QB_{name.upper()}": value for name, value in self._settings.items()}
        with self.log_file.open("ab") as errors:
            self.process = subprocess.Popen(
                [*self._prefix, sys.executable, str(ROOT / "server.py")],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        self.banner = ""
        for line in self.process.stdout:
            self.banner += line
            if line.endswith("recovered\n"):
                break
        found = re.search(r"listens on [^\s,]*:(\d+)", self.banner)
        assert found, f"the server did not start: {self.banner}\n{self.log_file.read_text()}"
        self.port = int(found.group(1))

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def stop(self) -> int:
        """Ask it to stop; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        code = self.process.wait(timeout=30)
        if self.process.stdout:
            self.process.stdout.close()
        return code

    def restart(self) -> None:
        """kill -9 and start again on the same port and data."""
        if self.process.poll() is None:
            self.kill()
        self.start()


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


class Doors:
    """Connects peers to a broker in this process: `await connect()` speaks frames, `await connect.lines()` JSON,
    `await connect.http()` HTTP."""

    broker: MessageBroker

    def __init__(self) -> None:
        self.doorways = [
            Doorway("frames", FrameDoor, listen("127.0.0.1", 0)),
            Doorway("JSON lines", JsonDoor, listen("127.0.0.1", 0)),
            Doorway("HTTP", http_door, listen("127.0.0.1", 0)),
        ]
        self.stop = trio.Event()  # tells the broker to stop
        self._streams: list[trio.SocketStream] = []

    async def __call__(self) -> TrioPeer:
        return TrioPeer(await self._connect(0))

    async def lines(self) -> LinePeer:
        return LinePeer(await self._connect(1))

    async def http(self) -> HttpPeer:
        return HttpPeer(await self._connect(2))

    def started(self, broker: MessageBroker) -> None:
        self.broker = broker

    async def _connect(self, number: int) -> trio.SocketStream:
        port = self.doorways[number].listeners[0].getsockname()[1]
        self._streams.append(await trio.open_tcp_stream("127.0.0.1", port))
        return self._streams[-1]

    async def close(self) -> None:
        for stream in self._streams:
            await trio.aclose_forcefully(stream)
        for doorway in self.doorways:
            for listener in doorway.listeners:
                listener.close()


@pytest.fixture
def a_broker(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Doors]]:
    """Opens a broker in this process, on this test's clock, and gives out peers."""

    @asynccontextmanager
    async def opened(storage: dict[str, Any] | None = None, **server: Any) -> AsyncIterator[Doors]:
        settings = Settings(
            server=ServerSettings(port=0, **server),
            storage=StorageSettings(data_dir=str(tmp_path / "data"), **(storage or {})),
        )
        engine = await trio.to_thread.run_sync(LocalEngine.open, settings.storage)
        doors = Doors()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(serve, settings, engine, doors.doorways, doors.stop, started=doors.started))
                yield doors
                doors.stop.set()
        finally:
            await doors.close()
            engine.close()

    return opened


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    """A clock that jumps only when nothing happens for a while: threads and sockets are real and take their time."""
    return trio.testing.MockClock(autojump_threshold=0.02)
