"""Brokers in processes of their own, each with a data directory of its own and on a free port."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from qb.testing.durable_tree import restore
from qb.testing.fault_proxy import FaultProxy

START_TIMEOUT = 60.0  # seconds; a loaded machine may be many times slower than usual


class BrokerFactory:
    """Starts brokers. Not safe to share between threads.

    The first start loads the broker's code, in a process that every later start is a fork of.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """Kill what is left of the brokers."""
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()
            self._socket = self._process = None

    def fork(self, request: dict[str, Any], output: int, errors: int) -> int:
        """Start a broker and return its process id. It writes to these descriptors."""
        return int(self._ask({"what": "fork", **request}, output, errors)["pid"])

    def wait(self, pid: int) -> int:
        """Block until a broker has ended, and return its exit code; negative for a signal."""
        return int(self._ask({"what": "wait", "pid": pid})["code"])

    def _ask(self, request: dict[str, Any], *passed: int) -> dict[str, int]:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", "qb.testing.fork_server", str(theirs.fileno())]
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        socket.send_fds(self._socket, [json.dumps(request).encode()], passed)
        answer = self._socket.recv(1024)
        if not answer:
            raise RuntimeError("the process that starts brokers has ended; its standard error says why")
        answered: dict[str, int] = json.loads(answer)
        return answered


class RunningBroker:
    """A real broker, in a process of its own.

    Attributes:
        host: Where it listens.
        data_dir: Its data directory.
    """

    def __init__(
        self, factory: BrokerFactory, directory: Path, proxy: FaultProxy | None = None, **settings: object
    ) -> None:
        """Start it.

        Args:
            factory: Starts the process.
            directory: Where its data directory and its log are made.
            proxy: Clients connect to this one, whose port stays when the broker is restarted; cut_power() needs it.
            **settings: Settings of the broker, as `QB_*` environment variables name them: `fsync_on_write=False`.
        """
        self.host, self.data_dir = "127.0.0.1", directory / "data"
        self._factory, self._log_file, self._proxy = factory, directory / "broker.log", proxy
        self._journal = directory / "synced" if proxy is not None else None
        self._settings = {f"QB_{name.upper()}": str(value) for name, value in settings.items()}
        self._port = 0  # its own, another one after each start
        self._pid: int | None = None
        self.start()

    def __repr__(self) -> str:
        state = "not running" if self._pid is None else f"process {self._pid}"
        return f"<RunningBroker {self.address}, {state}, data in {self.data_dir}>"

    @property
    def port(self) -> int:
        """The port for binary frames that clients connect to."""
        return self._port if self._proxy is None else self._proxy.port

    @property
    def address(self) -> str:
        """Where clients connect to: `qb://127.0.0.1:40213`."""
        return f"qb://{self.host}:{self.port}"

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self._log_file.read_text()

    @property
    def running(self) -> bool:
        """Has it been started, and not stopped or killed?"""
        return self._pid is not None

    def start(self) -> None:
        """Start it, unless it runs, on the data that there is; returns when it listens."""
        if self._pid is not None:
            return
        environment = {"QB_JSON_PORT": "0", "QB_HTTP_PORT": "0"} | self._settings
        environment |= {"QB_SERVER_PORT": "0", "QB_DATA_DIR": str(self.data_dir)}
        request = {"environment": environment, "data_dir": str(self.data_dir), "journal": str(self._journal or "")}
        reading, writing = os.pipe()
        with open(reading, "rb", buffering=0) as output:
            try:
                with self._log_file.open("ab") as errors:
                    self._pid = self._factory.fork(request, writing, errors.fileno())
            finally:
                os.close(writing)
            self._port = self._listening(output.fileno())
        if self._proxy is not None:
            self._proxy.target = self._port

    def _listening(self, output: int) -> int:
        """Return the port when the broker has said that it serves."""
        deadline, said = time.monotonic() + START_TIMEOUT, b""
        while b" recovered\n" not in said:
            readable, _, _ = select.select([output], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(output, 4096) if readable else b""
            if not chunk:
                self.kill()
                raise RuntimeError(f"the broker did not start; its log:\n{self.log}")
            said += chunk
        found = re.search(rb"listens on [^\s,]*:(\d+)", said)
        assert found is not None
        return int(found[1])

    def stop(self) -> int:
        """Have it finish what it received, and return its exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self._end(signal.SIGKILL)

    def cut_power(self) -> None:
        """Kill it, and make it forget all that it had not synced. It must have a proxy."""
        assert self._journal is not None
        self.kill()
        restore(self._journal, self.data_dir)

    def _end(self, signal_number: signal.Signals) -> int:
        if self._pid is None:
            return 0
        os.kill(self._pid, signal_number)
        code, self._pid = self._factory.wait(self._pid), None
        return code
