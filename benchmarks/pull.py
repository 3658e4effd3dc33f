"""How fast are messages pulled, and what do many partitions cost a publisher?

A backlog of 100-byte messages read with `fetch` in the blocking client, against Redis XREAD through redis-py, alone
and with hiredis, each at the count that suits it best; then the same bodies published to one partition and to sixteen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    BenchmarkOptions,
    PeerMissing,
    case_name,
    judge,
    median_ratio,
    qb_server,
    redis_server,
    report_rate,
    scratch,
    significant,
    skipped,
    timed,
)
from qb import BrokerClient

NAME = "pull"
SIZE = 100
COUNTS = (500, 2_000, 8_000)  # messages asked for at once
PARTITIONS = 16
PLAIN, FASTEST = "redis-py", "redis-py+hiredis"  # by itself, and with its parser in C


def run(options: BenchmarkOptions) -> None:
    """Print the rates of pulling and their ratio, then the rates of publishing and theirs."""
    with scratch(options) as directory, ExitStack() as stack:
        server = stack.enter_context(qb_server(directory / "qb"))
        client = stack.enter_context(BrokerClient(port=server.port))
        _pull(client, stack, directory, options)
        _partitions(client, options)


def _pull(client: BrokerClient, stack: ExitStack, directory: Path, options: BenchmarkOptions) -> None:
    count = options.scaled(1_000_000)
    client.create_topic("backlog")
    client.publish_many("backlog", [b"x" * SIZE] * count)
    readers: dict[str, Callable[[], float]] = {}
    try:
        readers = _redis(stack, directory, min(count, 200_000))
    except PeerMissing as missing:
        skipped(NAME, case_name(PLAIN, SIZE, "xread-best-count"), str(missing))
    best = max(COUNTS, key=partial(fetch_all, client, count))
    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(options.rounds):
        ours.append(fetch_all(client, count, best))
        for name, read in readers.items():
            theirs[name].append(read())
    report_rate(NAME, case_name("qb", SIZE, "fetch-best-count"), SIZE, ours)
    rate = statistics.median(ours)
    judge(NAME, "fetch: at least 300,000 msg/s", rate, rate >= 300_000, "msg/s")
    for name, rates in theirs.items():
        ratio = median_ratio(ours, rates)
        report_rate(NAME, case_name(name, SIZE, "xread-best-count"), SIZE, rates, qb_over_it=significant(ratio))
        judge(NAME, f"fetch: at least 3 times redis XREAD through {name}", ratio, ratio >= 3)


def fetch_all(client: BrokerClient, count: int, portion: int) -> float:
    """Return messages a second, each of them looked at."""
    offset, size, started = 0, 0, time.perf_counter()
    while offset < count:
        messages = client.fetch("backlog", 0, offset, max_messages=portion)
        for message in messages:
            size += len(message.body)
        offset = messages.next_offset
    seconds = time.perf_counter() - started
    if size != count * SIZE:
        raise RuntimeError(f"{size} bytes were read of {count * SIZE}")
    return count / seconds


def _redis(stack: ExitStack, directory: Path, count: int) -> dict[str, Callable[[], float]]:
    """Return rounds of reading a backlog from Redis Streams, each at its best count."""
    try:
        import redis
        from redis._parsers import _RESP2Parser
    except ImportError:
        raise PeerMissing("redis, the Python client, is not installed") from None
    server = stack.enter_context(redis_server(directory))
    alone = redis.ConnectionPool(port=server.port, protocol=2, parser_class=_RESP2Parser)
    clients = {PLAIN: redis.Redis(connection_pool=alone), FASTEST: redis.Redis(port=server.port, protocol=2)}
    for client in clients.values():
        stack.enter_context(client)
    _fill(clients[PLAIN], count)
    rounds: dict[str, Callable[[], float]] = {}
    for name, client in clients.items():
        best = max(COUNTS, key=partial(_read_all, client))
        rounds[name] = partial(_read_all, client, best)
    return rounds


def _fill(client: Any, count: int) -> None:
    for _ in range(count // 1000):
        with client.pipeline(transaction=False) as pipeline:
            for _ in range(1000):
                pipeline.xadd("backlog", {"body": b"x" * SIZE})
            pipeline.execute()


def _read_all(client: Any, portion: int) -> float:
    """Return messages a second, each of them looked at."""
    last, size, started = b"0", 0, time.perf_counter()
    while found := client.xread({"backlog": last}, count=portion):
        entries = found[0][1] if isinstance(found, list) else next(iter(found.values()))[0]
        size += sum([len(fields[b"body"]) for _, fields in entries])
        last = entries[-1][0]
    return size / SIZE / (time.perf_counter() - started)


def _partitions(client: BrokerClient, options: BenchmarkOptions) -> None:
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
