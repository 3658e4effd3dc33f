"""Case 4: many connections that publish one message at a time, in several processes, and one lone publisher."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    BenchmarkOptions,
    PeerMissing,
    bare_appends,
    case_name,
    cpu_seconds,
    judge,
    qb_server,
    redis_server,
    report,
    scratch,
    significant,
    skipped,
)
from benchmarks.work.orders import orders

NAME = "real"
PROCESSES = 4
Publish = Callable[[bytes], object]
Connect = Callable[[int], tuple[Publish, Callable[[], None]]]


def connect_qb(port: int) -> tuple[Publish, Callable[[], None]]:
    """Return how to publish on a connection of its own, and how to close it."""
    from qb import BrokerClient

    client = BrokerClient(port=port)
    client.connect()
    return partial(client.publish, "bench"), client.disconnect


def connect_redis(port: int) -> tuple[Publish, Callable[[], None]]:
    """Return how to publish on a connection of its own, and how to close it."""
    import redis

    client = redis.Redis(port=port, protocol=2)
    client.ping()
    return lambda body: client.xadd("bench", {"body": body}), client.close


def run(options: BenchmarkOptions) -> None:
    """Print medians and the server's CPU for each message, brokers in turn."""
    with scratch(options) as directory, ExitStack() as stack:
        servers: dict[str, tuple[Any, Connect]] = {"qb": (stack.enter_context(qb_server(directory / "qb")), connect_qb)}
        try:
            import redis  # noqa: F401

            servers["redis"] = stack.enter_context(redis_server(directory)), connect_redis
        except (ImportError, PeerMissing) as missing:
            skipped(NAME, "redis, one at a time", str(missing))
        from qb import BrokerClient

        with BrokerClient(port=servers["qb"][0].port) as client:
            client.create_topic("bench")
        for connections in (32, 256):
            _compare(servers, connections, options)
        _lone(servers["qb"][0], directory, options)


def _compare(servers: dict[str, tuple[Any, Connect]], connections: int, options: BenchmarkOptions) -> None:
    seconds = 1.0 if options.quick else 5.0
    medians: dict[str, list[float]] = {name: [] for name in servers}
    costs: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(options.rounds):
        for name, (server, connect) in servers.items():
            before = cpu_seconds(server.pid)
            latencies = _publish_for(seconds, connections, connect, server.port)
            costs[name].append((cpu_seconds(server.pid) - before) / len(latencies))
            medians[name].append(statistics.median(latencies))
    for name in servers:
        case = case_name(name, 240, f"{connections}-connections-in-{PROCESSES}-processes")
        median, cost = statistics.median(medians[name]), statistics.median(costs[name])
        figures = {"median_ms": significant(median * 1e3), "server_cpu_us": significant(cost * 1e6)}
        report(NAME, case, **figures)
    if "redis" in servers:
        for what, figures_of in (("median", medians), ("server CPU a message", costs)):
            ratio = statistics.median([a / b for a, b in zip(figures_of["qb"], figures_of["redis"], strict=True)])
            judge(
                NAME, f"{connections} connections, one at a time: {what} at most 1.2 times redis", ratio, ratio <= 1.2
            )


def _publish_for(seconds: float, connections: int, connect: Connect, port: int) -> list[float]:
    """Return the seconds of each publish of all connections."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    start = context.Barrier(PROCESSES)
    each = connections // PROCESSES
    workers = [
        context.Process(target=_work, args=(seconds, each, connect, port, start, results)) for _ in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    latencies = [latency for _ in workers for latency in results.get(timeout=seconds + 120)]
    for worker in workers:
        worker.join()
    return latencies


def _work(seconds: float, connections: int, connect: Connect, port: int, start: Any, results: Any) -> None:
    """Publish from a thread for each connection; one process of several."""
    bodies, _ = orders(1_000)
    latencies: list[float] = []
    opened = [connect(port) for _ in range(connections)]
    start.wait()
    until = time.perf_counter() + seconds

    def publish_on(publish: Publish) -> None:
        number = 0
        while (began := time.perf_counter()) < until:
            publish(bodies[number % len(bodies)])
            latencies.append(time.perf_counter() - began)
            number += 1

    threads = [threading.Thread(target=publish_on, args=(publish,)) for publish, _ in opened]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, close in opened:
        close()
    results.put(latencies)


def _lone(server: Any, directory: Path, options: BenchmarkOptions) -> None:
    """One publisher, one message at a time, against a bare append and sync of as many bytes."""
    seconds = 1.0 if options.quick else 5.0
    bodies, _ = orders(1_000)
    publish, close = connect_qb(server.port)
    ratios, shares, medians = [], [], []
    for _ in range(options.rounds):
        before, began = cpu_seconds(server.pid), time.perf_counter()
        latencies: list[float] = []
        while time.perf_counter() - began < seconds:
            at = time.perf_counter()
            publish(bodies[len(latencies) % 1_000])
            latencies.append(time.perf_counter() - at)
        shares.append((cpu_seconds(server.pid) - before) / (time.perf_counter() - began))
        bare = statistics.median(bare_appends(directory, 400, max(50, len(latencies) // 4)))
        medians.append(statistics.median(latencies))
        ratios.append(medians[-1] / bare)
    close()
    median, share, ratio = (statistics.median(each) for each in (medians, shares, ratios))
    figures = {"median_ms": significant(median * 1e3), "server_cores": significant(share)}
    report(NAME, case_name("qb", 240, "lone-publisher-one-at-a-time"), **figures)
    judge(NAME, "lone publisher: median at most 2.5 times the bare append", ratio, ratio <= 2.5)
    judge(NAME, "lone publisher: at most 0.35 of a core for the broker", share, share <= 0.35, "cores")
