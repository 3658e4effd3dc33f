"""How fast does a cell of two brokers take messages, and what does its follower cost?

`publish_many` of 100-byte bodies, into one partition and into 16, against nats-py with 1,000 in flight; one message at
a time against nats-py; and the processor time of the follower against that of the owner, while messages are published.
All wait for the quorum, and every node of NATS syncs before it answers. The sides take turns, round by round.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

from benchmarks.cluster.cell import NAME, Cell
from benchmarks.harness import (
    BenchmarkOptions,
    Server,
    case_name,
    exact_cpu_seconds,
    judge,
    median_ratio,
    report,
    report_latency,
    report_rate,
    significant,
    timed,
)
from benchmarks.journal import FSYNC, THEIR_WINDOW, nats_py_figures
from qb import BrokerClient

SETTLED = 0.5  # seconds
BODY = b"x" * 100
RATE_TARGET = 300_000


def compare(options: BenchmarkOptions, directory: Path, cell: Cell) -> None:
    """Print the figures of both, and their ratios; the cell has an owner and a follower."""
    with cell.client() as client:
        owner = cell.owner()
        followers = [name for name in cell.brokers if name != owner]
        _compare(options, cell.urls, client, [cell.brokers[name] for name in (owner, *followers)])


def _compare(options: BenchmarkOptions, servers: list[str], client: BrokerClient, brokers: list[Server]) -> None:
    client.create_topic("one")
    client.create_topic("sixteen", 16)
    count = options.scaled(1_000_000)
    client.publish_many("one", [BODY] * (count // 10))
    ours: dict[str, list[float]] = {"one": [], "sixteen": [], "times": []}
    theirs: dict[str, list[float]] = {"rates": [], "times": []}
    spent: list[list[float]] = []  # seconds of each broker for a message of `publish_many`, round by round
    alone: list[list[float]] = []  # the same for a message that is published by itself
    for number in range(options.rounds):
        before = [exact_cpu_seconds(broker.pid) for broker in brokers]
        for topic in ("one", "sixteen"):
            ours[topic].append(count / timed(lambda: client.publish_many(topic, [BODY] * count)))  # noqa: B023
        time.sleep(SETTLED)  # the follower comes behind
        after = [exact_cpu_seconds(broker.pid) for broker in brokers]
        spent.append([(now - then) / (2 * count) for now, then in zip(after, before, strict=True)])
        before = [exact_cpu_seconds(broker.pid) for broker in brokers]
        times = [timed(lambda: client.publish("one", BODY)) for _ in range(options.scaled(2000))]
        ours["times"] += times
        after = [exact_cpu_seconds(broker.pid) for broker in brokers]
        alone.append([(now - then) / len(times) for now, then in zip(after, before, strict=True)])
        rate, times = asyncio.run(nats_py_figures(options, servers, f"peer{number}"))
        theirs["rates"].append(rate)
        theirs["times"] += times
    _report(ours, theirs)
    _report_costs(spent, alone)


def _report(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> None:
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


def _report_costs(spent: list[list[float]], alone: list[list[float]]) -> None:
    """Print the processor time of owner and follower for a message."""
    for kind, rounds in (("publish_many", spent), ("one-at-a-time", alone)):
        owner, follower = (statistics.median(each) * 1e6 for each in zip(*rounds, strict=True))
        figures = {"owner_us": significant(owner), "follower_us": significant(follower)}
        report(NAME, f"processor time a message/{kind}", **figures)
    share = statistics.median([follower / owner for owner, follower in spent])
    judge(NAME, "a follower costs at most a third of the owner", share, share <= 1 / 3)
