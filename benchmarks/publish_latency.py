"""How long does one publish at a time wait for its ack, and how much of that is the disk?

Our publish, a bare append + fdatasync of the bytes that it stores, and a Redis XADD take turns in short rounds, so
that a slow minute of the disk slows all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import (
    BenchmarkOptions,
    PeerMissing,
    bare_appends,
    case_name,
    judge,
    median_ratio,
    qb_server,
    report,
    report_latency,
    scratch,
    skipped,
    timed,
)
from benchmarks.peers import RedisStreams
from qb import BrokerClient

NAME = "publish_latency"
BODY = b"x" * 100
TARGET = 2.5


def run(options: BenchmarkOptions) -> None:
    """Print each side's latencies, then our median beside the disk's."""
    count = options.scaled(2000)
    rounds = options.rounds * 2
    with scratch(options) as directory, ExitStack() as stack:
        publish, stored_bytes = _qb(directory, stack)
        sides: dict[str, Callable[[], list[float]]] = {
            "qb": lambda: [timed(publish) for _ in range(count // rounds)],
            "bare": lambda: bare_appends(directory, stored_bytes, count // rounds),
        }
        try:
            redis = stack.enter_context(RedisStreams.started(directory))
            sides["redis"] = lambda: [timed(lambda: redis.publish_one(BODY)) for _ in range(count // rounds)]
        except PeerMissing as missing:
            skipped(NAME, case_name("redis-xadd", len(BODY), "one-at-a-time"), str(missing))
        _compare(sides, rounds, stored_bytes)


def _compare(sides: dict[str, Callable[[], list[float]]], rounds: int, stored_bytes: int) -> None:
    samples = [{name: side() for name, side in sides.items()} for _ in range(rounds)]
    flat = {name: [seconds for sample in samples for seconds in sample[name]] for name in sides}
    medians = {name: [statistics.median(sample[name]) for sample in samples] for name in sides}
    report_latency(NAME, case_name("qb", len(BODY), "one-at-a-time"), flat["qb"])
    report_latency(NAME, case_name("bare-append+fdatasync", stored_bytes, "one-at-a-time"), flat["bare"])
    ratio = median_ratio(medians["qb"], medians["bare"])
    target = f"median ack at most {TARGET} times a bare append + fdatasync of the same bytes"
    judge(NAME, target, ratio, ratio <= TARGET)
    if "redis" in sides:
        report_latency(NAME, case_name("redis-xadd", len(BODY), "one-at-a-time"), flat["redis"])
        report(NAME, "qb over redis-xadd, median", ratio=round(median_ratio(medians["qb"], medians["redis"]), 2))


def _qb(directory: Path, stack: ExitStack) -> tuple[Callable[[], object], int]:
    """Return a publish, and the bytes that one publish adds to the log."""
    server = stack.enter_context(qb_server(directory / "qb"))
    client = stack.enter_context(BrokerClient(port=server.port))
    client.create_topic("bench")

    def publish() -> object:
        return client.publish("bench", BODY)

    publish()
    before: int = client.describe_topic("bench")["bytes"]
    publish()
    after: int = client.describe_topic("bench")["bytes"]
    return publish, after - before
