"""How fast is a cell of two brokers on JetStream with three replicas, and what does its follower cost?

`publish_many` of 100-byte bodies, into one partition and into 16, against nats-py with 1,000 in flight; one message at
a time against nats-py; and the processor time of the follower against that of the owner, while messages are published.
All wait for the quorum, and every node of NATS syncs before it answers. The sides take turns, round by round.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness import (
    BenchmarkOptions,
    PeerMissing,
    Server,
    case_name,
    cpu_seconds,
    judge,
    median_ratio,
    qb_server,
    report,
    report_latency,
    report_rate,
    scratch,
    significant,
    skipped,
    timed,
)
from benchmarks.journal import FSYNC, THEIR_WINDOW, nats_cluster, nats_py_figures
from qb import BrokerClient

NAME = "replicated"
BODY = b"x" * 100
RATE_TARGET = 300_000


def run(options: BenchmarkOptions) -> None:
    """Print the figures of both, and their ratios."""
    with scratch(options) as directory, ExitStack() as stack:
        try:
            servers = stack.enter_context(nats_cluster(directory))
            brokers = stack.enter_context(_cell(directory, servers))
            client = stack.enter_context(BrokerClient(port=brokers[0].port, connect_wait=60))
            _compare(options, servers, client, brokers)
        except PeerMissing as missing:
            skipped(NAME, "replicated", str(missing))


@contextmanager
def _cell(directory: Path, servers: list[str]) -> Iterator[list[Server]]:
    """Yield an owner and a follower."""
    settings = {"QB_STORAGE_ENGINE": "jetstream", "QB_NATS_SERVERS": ",".join(servers), "QB_CLUSTER_PORT": "0"}
    with ExitStack() as stack:
        yield [
            stack.enter_context(qb_server(directory / name, **settings, QB_NODE_NAME=name))
            for name in ("owner", "follower")
        ]


def _compare(options: BenchmarkOptions, servers: list[str], client: BrokerClient, brokers: list[Server]) -> None:
    client.create_topic("one")
    client.create_topic("sixteen", 16)
    count = options.scaled(1_000_000)
    client.publish_many("one", [BODY] * (count // 10))
    ours: dict[str, list[float]] = {"one": [], "sixteen": [], "times": []}
    theirs: dict[str, list[float]] = {"rates": [], "times": []}
    shares: list[float] = []
    for number in range(options.rounds):
        before = [cpu_seconds(broker.pid) for broker in brokers]
        for topic in ("one", "sixteen"):
            ours[topic].append(count / timed(lambda: client.publish_many(topic, [BODY] * count)))  # noqa: B023
        owner, follower = (cpu_seconds(broker.pid) - spent for broker, spent in zip(brokers, before, strict=True))
        shares.append(follower / owner)
        ours["times"] += [timed(lambda: client.publish("one", BODY)) for _ in range(options.scaled(2000))]
        rate, times = asyncio.run(nats_py_figures(options, servers, f"peer{number}"))
        theirs["rates"].append(rate)
        theirs["times"] += times
    _report(ours, theirs, shares)


def _report(ours: dict[str, list[float]], theirs: dict[str, list[float]], shares: list[float]) -> None:
    report_rate(NAME, case_name("qb", 100, "publish_many", FSYNC), 100, ours["one"])
    report_rate(NAME, case_name("qb", 100, "publish_many-16-partitions", FSYNC), 100, ours["sixteen"])
    report_rate(NAME, case_name("nats-py", 100, f"{THEIR_WINDOW}-in-flight", FSYNC), 100, theirs["rates"])
    rate, ratio = statistics.median(ours["one"]), median_ratio(ours["one"], theirs["rates"])
    judge(NAME, f"publish_many at least {RATE_TARGET:,} msg/s", rate, rate >= RATE_TARGET, "msg/s")
    judge(NAME, "publish_many at least 15 times nats-py", ratio, ratio >= 15)
    spread = median_ratio(ours["sixteen"], ours["one"])
    judge(NAME, "16 partitions at least 0.8 of one", spread, spread >= 0.8)
    report_latency(NAME, case_name("qb", 100, "one-at-a-time", FSYNC), ours["times"])
    report_latency(NAME, case_name("nats-py", 100, "one-at-a-time", FSYNC), theirs["times"])
    slower = statistics.median(ours["times"]) / statistics.median(theirs["times"])
    judge(NAME, "one message at a time at most 1.3 times nats-py", slower, slower <= 1.3)
    share = statistics.median(shares)
    report(NAME, "processor time of the follower by that of the owner", rounds=[significant(each) for each in shares])
    judge(NAME, "a follower costs at most a third of the owner", share, share <= 1 / 3)
