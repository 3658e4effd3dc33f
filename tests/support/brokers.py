"""Real brokers for tests: processes of their own, and doors of one in this process."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import trio

from qb.core.broker.message_broker import MessageBroker
from qb.doors.json_lines.json_door import JsonDoor
from qb.doors.listening import BinaryDoor, ListeningDoor, listen
from qb.server import http_door
from tests.support.http_peers import HttpPeer
from tests.support.line_peers import LinePeer
from tests.support.peers import TrioPeer

ROOT = Path(__file__).resolve().parent.parent.parent

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
FIRST_PORT = 10_000 + WORKER % 10 * 2_000
PORTS = itertools.cycle(random.Random().sample(range(FIRST_PORT, FIRST_PORT + 2_000), 2_000))


def free_port() -> int:
    """Return a port that is free, and that the system gives to no other process while a broker on it is down.

    The system hands out higher ones, and each worker has ports of its own.
    """
    while True:
        port = next(PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            pass


def server_command(data_dir: Path) -> list[str]:
    """Return the command of a server with the binary door alone, on any free port."""
    ports = [word for door in ("", "json-", "http-") for word in (f"--{door}port", "0")]
    return [sys.executable, str(ROOT / "server.py"), *ports, "--data-dir", str(data_dir)]


def run_server(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to end by itself."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
    return subprocess.run(
        [sys.executable, str(ROOT / "server.py"), *flags],
        env=clean | {"QB_JSON_PORT": "0", "QB_HTTP_PORT": "0"} | environment,
        capture_output=True,
        text=True,
        timeout=30,
    )


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


class Doors:
    """Connects peers to a broker in this process: `await connect()` speaks frames, `await connect.lines()` JSON,
    `await connect.http()` HTTP."""

    broker: MessageBroker

    def __init__(self) -> None:
        self.listening = [
            ListeningDoor("frames", BinaryDoor, listen("127.0.0.1", 0)),
            ListeningDoor("JSON lines", JsonDoor, listen("127.0.0.1", 0)),
            ListeningDoor("HTTP", http_door, listen("127.0.0.1", 0)),
        ]
        self.stop = trio.Event()  # set to stop the broker
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
        port = self.listening[number].listeners[0].getsockname()[1]
        self._streams.append(await trio.open_tcp_stream("127.0.0.1", port))
        return self._streams[-1]

    async def close(self) -> None:
        for stream in self._streams:
            await trio.aclose_forcefully(stream)
        for door in self.listening:
            for listener in door.listeners:
                listener.close()
