"""How long after a publish does a handler see the message?

One message at a time, from the call of publish() in one client to the handler in another, beside the time that the
publish itself takes until its ack; both from the same messages.
"""

from __future__ import annotations

import statistics
import threading
import time

from benchmarks.harness import BenchmarkOptions, case_name, judge, qb_server, report_latency, scratch
from qb import BrokerClient

NAME = "deliver_latency"
SIZE = 100


def run(options: BenchmarkOptions) -> None:
    """Print both latencies and their difference."""
    count = options.scaled(4_000)
    with (
        scratch(options) as directory,
        qb_server(directory / "qb") as server,
        BrokerClient(port=server.port) as publisher,
        BrokerClient(port=server.port) as subscriber,
    ):
        publisher.create_topic("live")
        acked, seen = _measure(publisher, subscriber, count)
    report_latency(NAME, case_name("qb-publish-to-ack", SIZE, "one-at-a-time"), acked)
    report_latency(NAME, case_name("qb-publish-to-handler", SIZE, "one-at-a-time"), seen)
    extra_ms = (statistics.median(seen) - statistics.median(acked)) * 1e3
    judge(NAME, "publish to handler: at most the publish latency + 1 ms", extra_ms, extra_ms <= 1.0, "ms more")


def _measure(publisher: BrokerClient, subscriber: BrokerClient, count: int) -> tuple[list[float], list[float]]:
    handled = threading.Semaphore(0)
    at: list[float] = []

    def handler(message: object) -> None:
        at.append(time.perf_counter())
        handled.release()

    joined = subscriber.create_and_subscribe("live", "live", handler=handler)
    acked, seen = [], []
    for _ in range(count):
        started = time.perf_counter()
        publisher.publish("live", b"x" * SIZE)
        acked.append(time.perf_counter() - started)
        handled.acquire()
        seen.append(at[-1] - started)
    joined.unsubscribe()
    return acked, seen
