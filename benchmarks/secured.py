"""What do TLS and users cost, and what does a noisy user cost the others?

TLS against plain and users against none: publish_many of 1 KiB, the sides in turn. A noisy user publishes without a
pause from another process while another user publishes 1 KiB messages one by one: alone, beside it, and beside it with
a quota for its rate. As a control the noisy user publishes to another broker process, with a data directory of its own:
it takes as much of the processors and of the disk then, so what is left is what sharing one broker costs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.harness import (
    BenchmarkOptions,
    judge,
    median_ratio,
    qb_server,
    report,
    report_latency,
    report_rate,
    scratch,
    significant,
    timed,
)
from qb import BrokerClient
from qb.cli.main import main
from qb.core.rights.users_file import hash_of, parse_user, write_users

NAME = "secured"
SIZE = 1 << 10
TLS_TARGET, USERS_TARGET, FAIR = 0.5, 0.95, 0.5
QUOTA = "rate:20MiB/s"
# What the noisy user does; in each case two brokers run.
ALONE, ELSEWHERE = "alone", "beside-noise/another-broker"
FULL_SPEED, LIMITED = "beside-noise/full-speed", f"beside-noise/{QUOTA}"
NOISE = """
import sys
from qb import BrokerClient
with BrokerClient(port=int(sys.argv[1]), token="qb_noisy") as client:
    client.create_topic("noise")
    print("ready", flush=True)
    while True:
        client.publish_many("noise", [bytes(1024)] * 5_000)
"""


def run(options: BenchmarkOptions) -> None:
    """Compare the ways to connect, then measure fairness."""
    with scratch(options) as directory, ExitStack() as stack:
        secured = {"QB_USERS_FILE": _users(directory), "QB_AUDIT_FILE": str(directory / "audit")}
        plain = stack.enter_context(qb_server(directory / "plain"))
        users = stack.enter_context(qb_server(directory / "users", **secured))
        main(["tls", "make-dev", "--dir", str(directory / "tls")])
        tls = {"QB_TLS_CERT": str(directory / "tls/cert.pem"), "QB_TLS_KEY": str(directory / "tls/key.pem")}
        encrypted = stack.enter_context(qb_server(directory / "encrypted", **tls))
        ca_file = str(directory / "tls/ca.pem")
        clients = {
            "plain": BrokerClient(port=plain.port),
            "users": BrokerClient(port=users.port, token="qb_quiet"),
            "tls": BrokerClient(f"qbs://127.0.0.1:{encrypted.port}", ca_file=ca_file),
        }
        _compare({name: stack.enter_context(client) for name, client in clients.items()}, options)
    _fairness(options)


def _users(directory: Path) -> str:
    path = str(directory / "users-file")
    lines = [["quiet", "qb_quiet"], ["noisy", "qb_noisy"], ["limited", "qb_limited"]]
    rights = ["publish:*", "manage:*"]
    write_users(path, [parse_user(["user", name, f"sha256:{hash_of(token)}", *rights]) for name, token in lines])
    return path


def _compare(clients: dict[str, BrokerClient], options: BenchmarkOptions) -> None:
    rates: dict[str, list[float]] = {name: [] for name in clients}
    lone: dict[str, list[float]] = {name: [] for name in clients}
    bodies = [b"x" * SIZE] * options.scaled(50_000)
    for client in clients.values():
        client.create_topic("t")
        client.publish_many("t", bodies[: len(bodies) // 10])
    for number in range(options.rounds):
        order = list(clients.items())
        for name, client in order if number % 2 else reversed(order):
            rates[name].append(len(bodies) / timed(partial(client.publish_many, "t", bodies)))
            lone[name].append(statistics.median([timed(partial(client.publish, "t", bodies[0])) for _ in range(100)]))
    for name, each in rates.items():
        report_rate(NAME, f"{name}/1KiB/publish_many/fsync-before-ack", SIZE, each)
        ratio = median_ratio(lone[name], lone["plain"])
        report(
            NAME, f"{name}/1KiB/one-at-a-time", median_ms=[significant(each * 1e3) for each in lone[name]], ratio=ratio
        )
    for name, target in (("tls", TLS_TARGET), ("users", USERS_TARGET)):
        ratio = median_ratio(rates[name], rates["plain"])
        judge(NAME, f"publish_many 1 KiB: {name} at least {target} of plain without users", ratio, ratio >= target)


@contextmanager
def _noise(port: int) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", NOISE, str(port)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def _fairness(options: BenchmarkOptions) -> None:
    latencies: dict[str, list[float]] = {ALONE: [], ELSEWHERE: [], FULL_SPEED: [], LIMITED: []}
    for number in range(options.rounds):
        order = list(latencies.items())
        for case, each in order if number % 2 else reversed(order):
            with scratch(options) as directory:
                each += _quiet_user(directory, case, options)
    for case, each in latencies.items():
        report_latency(NAME, f"quiet-user/{case}/1KiB/one-at-a-time", each)
        report(NAME, f"quiet-user/{case}/1KiB/rate", messages_per_second=round(1 / statistics.mean(each)))
    means = {case: statistics.mean(each) for case, each in latencies.items()}
    ratio = means[ELSEWHERE] / means[FULL_SPEED]
    target = f"a user beside a noisy one: at least {FAIR} of its rate beside one in another broker"
    judge(NAME, target, ratio, ratio >= FAIR)
    for case in (ELSEWHERE, FULL_SPEED, LIMITED):
        ratio = means[ALONE] / means[case]
        judge(NAME, f"a user {case}: at least {FAIR} of its rate alone", ratio, ratio >= FAIR)


def _quiet_user(directory: Path, case: str, options: BenchmarkOptions) -> Sequence[float]:
    """Return how long each publish of the quiet user took."""
    path = _users(directory)
    if case == LIMITED:
        text = Path(path).read_text().replace(f"sha256:{hash_of('qb_noisy')}", f"sha256:{hash_of('qb_noisy')} {QUOTA}")
        Path(path).write_text(text)
    latencies: list[float] = []
    with ExitStack() as stack:
        server = stack.enter_context(qb_server(directory / "own", QB_USERS_FILE=path))
        other = stack.enter_context(qb_server(directory / "other", QB_USERS_FILE=path))
        client = stack.enter_context(BrokerClient(port=server.port, token="qb_quiet"))
        client.create_topic("quiet")
        if case != ALONE:
            stack.enter_context(_noise(other.port if case == ELSEWHERE else server.port))
        until = time.perf_counter() + (0.5 if options.quick else 4.0)
        while time.perf_counter() < until:
            latencies.append(timed(lambda: client.publish("quiet", b"x" * SIZE)))
    return latencies
