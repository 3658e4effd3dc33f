"""A real cluster on this machine: `server.py cluster`, and harm done to its processes."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qb.clients.credentials import Credentials
from tests.support.brokers import FIRST_PORT, ROOT
from tests.support.running_cell import RunningCell

PORTS = 70


class LocalClusterProcess(RunningCell):
    """Three brokers and three NATS servers, and the process that starts and ends them."""

    def __init__(self, directory: Path, *flags: str, program: Sequence[str] = ()) -> None:
        """`program` starts it, if it is not the one of this checkout."""
        self.directory, self._scheme = directory, "qbs://" if "--secure" in flags else ""
        if self._scheme:
            self.credentials = Credentials(token_file=str(directory / "operator.token"), ca_file=self.ca_file)
        self.base_port = free_base_port()
        command = [*(program or [sys.executable, str(ROOT / "server.py"), "cluster"]), "--data-dir", str(directory)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
        clean["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), clean.get("PATH", "")])  # nats-server is there
        self._errors = (directory / "cluster.err").open("ab")
        self.process = subprocess.Popen(
            [*command, "--base-port", str(self.base_port), *flags],
            env=clean,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        assert self.process.stdout is not None
        self.banner = self.process.stdout.readline()

    @property
    def description(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads((self.directory / "cluster.json").read_text())
        return described

    @property
    def servers(self) -> list[str]:
        return [f"{self._scheme}127.0.0.1:{self.base_port + number}" for number in range(3)]

    @property
    def ca_file(self) -> str:
        """The authority of the brokers of a secure cluster."""
        return str(self.directory / "tls" / "ca.pem")

    @property
    def lines(self) -> list[str]:
        """The doors for JSON lines."""
        return [f"127.0.0.1:{self.base_port + 10 + number}" for number in range(3)]

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def pid(self, name: str) -> int:
        return int(next(each["pid"] for each in self.description["processes"] if each["name"] == name))

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def pids(self) -> list[int]:
        return [int(each["pid"]) for each in self.description["processes"]]

    def stop(self) -> int:
        """End it in good order; returns its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(50)
        self._close()
        return code

    def kill(self) -> None:
        """End all of it, however it is: the processes end with the one that started them."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._close()

    def _close(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._errors.close()


def is_running(pid: int) -> bool:
    """Say whether a process is there, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_base_port() -> int:
    """Return the first of 70 ports of which none is in use, among those that this worker has for itself."""
    firsts = list(range(FIRST_PORT, FIRST_PORT + 2_000 - PORTS, PORTS))
    random.shuffle(firsts)
    return next(first for first in firsts if all(map(_is_free, range(first, first + PORTS))))


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False
