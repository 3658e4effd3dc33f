"""benchmarks.pull: how fast are messages pulled, and what do many partitions cost a publisher?

May import: benchmarks.harness, client, redis, the standard library.
Never: the broker's own rooms.

A backlog of 100-byte messages read with `fetch` in the blocking client, against Redis XREAD through redis-py at the
count that suits it best; then the same bodies published to one partition and to sixteen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import (
    Options,
    PeerMissing,
    case_name,
    judge,
    median_ratio,
    qb_server,
    redis_server,
    report_rate,
    scratch,
    skipped,
    timed,
)
from client import BrokerClient

NAME = "pull"
SIZE = 100
FETCH_COUNT = 5_000
REDIS_COUNTS = (500, 2_000, 8_000)
PARTITIONS = 16


def run(options: Options) -> None:
    """Print the rates of pulling and their ratio, then the rates of publishing and theirs."""
    with scratch(options) as directory, ExitStack() as stack:
        server = stack.enter_context(qb_server(directory / "qb"))
        client = stack.enter_context(BrokerClient(port=server.port))
        _pull(client, stack, directory, options)
        _partitions(client, options)


def _pull(client: BrokerClient, stack: ExitStack, directory: Path, options: Options) -> None:
    count = options.scaled(1_000_000)
    client.create_topic("backlog")
    client.publish_many("backlog", [b"x" * SIZE] * count)
    theirs: Callable[[], float] | None = None
    try:
        theirs = _redis(stack, directory, min(count, 200_000))
    except PeerMissing as missing:
        skipped(NAME, case_name("redis-xread", SIZE, "best-count"), str(missing))
    ours, redis = [], []
    for _ in range(options.rounds):
        ours.append(_fetch_all(client, count))
        if theirs is not None:
            redis.append(theirs())
    report_rate(NAME, case_name("qb", SIZE, f"fetch-{FETCH_COUNT}"), SIZE, ours)
    rate = statistics.median(ours)
    judge(NAME, "fetch: at least 300,000 msg/s", rate, rate >= 300_000, "msg/s")
    if redis:
        report_rate(NAME, case_name("redis-xread", SIZE, "best-count"), SIZE, redis)
        ratio = median_ratio(ours, redis)
        judge(NAME, "fetch: at least 3 times redis XREAD", ratio, ratio >= 3)


def _fetch_all(client: BrokerClient, count: int) -> float:
    """Return messages a second, each of them looked at."""
    offset, size, started = 0, 0, time.perf_counter()
    while offset < count:
        messages = client.fetch("backlog", 0, offset, max_messages=FETCH_COUNT)
        for message in messages:
            size += len(message.body)
        offset = messages.next_offset
    seconds = time.perf_counter() - started
    if size != count * SIZE:
        raise RuntimeError(f"{size} bytes were read of {count * SIZE}")
    return count / seconds


def _redis(stack: ExitStack, directory: Path, count: int) -> Callable[[], float]:
    """Return a round of reading a backlog from Redis Streams, at its best count."""
    try:
        import redis
    except ImportError:
        raise PeerMissing("redis, the Python client, is not installed") from None
    server = stack.enter_context(redis_server(directory))
    client = stack.enter_context(redis.Redis(port=server.port))
    for _ in range(count // 1000):
        with client.pipeline(transaction=False) as pipeline:
            for _ in range(1000):
                pipeline.xadd("backlog", {"body": b"x" * SIZE})
            pipeline.execute()

    def read_all(portion: int) -> float:
        last, size, started = b"0", 0, time.perf_counter()
        while found := client.xread({"backlog": last}, count=portion):
            entries = found[0][1] if isinstance(found, list) else next(iter(found.values()))[0]
            for last, fields in entries:  # noqa: B007 - the last one is where the next portion begins
                size += len(fields[b"body"])
        return size / SIZE / (time.perf_counter() - started)

    best = max(REDIS_COUNTS, key=read_all)
    return lambda: read_all(best)


def _partitions(client: BrokerClient, options: Options) -> None:
    bodies = [b"x" * SIZE] * options.scaled(500_000)
    rates: dict[int, list[float]] = {1: [], PARTITIONS: []}
    for number in range(options.rounds):
        for partitions, measured in rates.items():
            topic = f"partitions-{partitions}-{number}"
            client.create_topic(topic, partitions=partitions)
            measured.append(len(bodies) / timed(lambda topic=topic: client.publish_many(topic, bodies)))  # type: ignore[misc]
            client.delete_topic(topic)
    for partitions, measured in rates.items():
        report_rate(NAME, case_name("qb", SIZE, f"publish_many-{partitions}-partitions"), SIZE, measured)
    ratio = median_ratio(rates[PARTITIONS], rates[1])
    judge(NAME, f"{PARTITIONS} partitions: at least 0.7 of one partition's rate", ratio, ratio >= 0.7)
