"""How many messages a second does one subscriber handle and ack?

A backlog of 100-byte messages to a counting handler in the blocking client, one message at a time and in batches,
against Redis XREADGROUP + XACK (count 500) through redis-py; then to raw readers, one and four, to see the broker's
own limit. The processor time of both sides is printed. The windows are wide (max_in_flight 10,000), as for any backlog
of small messages; the first case is repeated with the default of 1,000 for comparison.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from benchmarks.harness import (
    BenchmarkOptions,
    PeerMissing,
    Server,
    case_name,
    cpu_seconds,
    judge,
    median_ratio,
    qb_server,
    redis_server,
    report_rate,
    scratch,
    significant,
    skipped,
)
from benchmarks.raw_subscribers import RawSubscriber, drain
from qb import BrokerClient

NAME = "deliver"
SIZE = 100
REDIS_COUNT = 500
WINDOW = 10_000
DEFAULT_WINDOW = 1_000


def run(options: BenchmarkOptions) -> None:
    """Print the rates, the ratios, and who spends the processor time."""
    count = options.scaled(500_000)
    with scratch(options) as directory, ExitStack() as stack:
        server = stack.enter_context(qb_server(directory / "qb"))
        client = stack.enter_context(BrokerClient(port=server.port))
        client.create_topic("backlog")
        client.publish_many("backlog", [b"x" * SIZE] * count)
        redis: Callable[[], float] | None = None
        try:
            redis = _redis(stack, directory, count)
        except PeerMissing as missing:
            skipped(NAME, case_name("redis-xreadgroup+xack", SIZE, f"count-{REDIS_COUNT}"), str(missing))
        _handlers(client, server, count, redis, options)
        _raw(client, server, count, options)


def _handlers(
    client: BrokerClient, server: Server, count: int, redis: Callable[[], float] | None, options: BenchmarkOptions
) -> None:
    rates: dict[str, list[float]] = {"handler": [], "batch_handler": [], "default window": [], "redis": []}
    shares: list[float] = []
    for number in range(options.rounds):
        for kind in ("handler", "batch_handler"):
            before = time.process_time(), cpu_seconds(server.pid)
            rates[kind].append(handle(client, f"{kind}-{number}", kind, count, WINDOW))
            used = time.process_time() - before[0], cpu_seconds(server.pid) - before[1]
            if kind == "handler":
                shares.append(used[1] / used[0])
        rates["default window"].append(handle(client, f"default-{number}", "handler", count, DEFAULT_WINDOW))
        if redis is not None:
            rates["redis"].append(redis())
    share = statistics.median(shares)
    report_rate(
        NAME,
        case_name("qb", SIZE, f"handler-window-{WINDOW}"),
        SIZE,
        rates["handler"],
        server_cpu_per_client_cpu=significant(share),
    )
    report_rate(NAME, case_name("qb", SIZE, f"batch_handler-window-{WINDOW}"), SIZE, rates["batch_handler"])
    report_rate(NAME, case_name("qb", SIZE, f"handler-window-{DEFAULT_WINDOW}"), SIZE, rates["default window"])
    judge(NAME, "server CPU a message at most a third of the client's", share, share <= 1 / 3)
    if redis is not None:
        report_rate(NAME, case_name("redis-xreadgroup+xack", SIZE, f"count-{REDIS_COUNT}"), SIZE, rates["redis"])
        for kind, target in (("handler", 2.5), ("batch_handler", 4.0)):
            ratio = median_ratio(rates[kind], rates["redis"])
            judge(NAME, f"{kind}: at least {target} times redis XREADGROUP+XACK", ratio, ratio >= target)


def handle(client: BrokerClient, subscription: str, kind: str, count: int, window: int) -> float:
    """Return handled messages a second, from joining to the last one."""
    client.create_subscription(subscription, "backlog", max_in_flight=window)
    seen, done = 0, threading.Event()

    def handler(message: object) -> None:
        nonlocal seen
        seen += 1
        if seen == count:
            done.set()

    def batch_handler(messages: list[object]) -> None:
        nonlocal seen
        seen += len(messages)
        if seen >= count:
            done.set()

    chosen = {"handler": handler} if kind == "handler" else {"batch_handler": batch_handler}
    started = time.perf_counter()
    joined = client.subscribe_to_subscription(subscription, **chosen)
    if not done.wait(120):
        raise TimeoutError(f"{seen} of {count} messages were handled")
    seconds = time.perf_counter() - started
    joined.unsubscribe()
    lag = client.describe_subscription(subscription)["lag"]
    if lag:
        raise RuntimeError(f"{lag} messages were handled and not acked")
    client.delete_subscription(subscription)
    return count / seconds


def _redis(stack: ExitStack, directory: object, count: int) -> Callable[[], float]:
    """Return a round of reading and acking the same backlog from Redis Streams."""
    try:
        import redis
    except ImportError:
        raise PeerMissing("redis, the Python client, is not installed") from None
    server = stack.enter_context(redis_server(directory))  # type: ignore[arg-type]
    client = stack.enter_context(redis.Redis(port=server.port))
    backlog = min(count, 100_000)
    for _ in range(backlog // 1000):
        with client.pipeline(transaction=False) as pipeline:
            for _ in range(1000):
                pipeline.xadd("backlog", {"body": b"x" * SIZE})
            pipeline.execute()

    def one_round() -> float:
        client.xgroup_create("backlog", "group", "0")
        handled, started = 0, time.perf_counter()
        while handled < backlog:
            (_, entries), *_ = client.xreadgroup("group", "worker", {"backlog": ">"}, count=REDIS_COUNT)
            handled += len(entries)
            client.xack("backlog", "group", *[entry for entry, _ in entries])
        seconds = time.perf_counter() - started
        client.xgroup_destroy("backlog", "group")
        return handled / seconds

    return one_round


def _raw(client: BrokerClient, server: Server, count: int, options: BenchmarkOptions) -> None:
    rates: dict[int, list[float]] = {1: [], 4: []}
    for number in range(options.rounds):
        for readers in rates:
            subscription = f"raw-{readers}-{number}"
            client.create_subscription(subscription, "backlog", max_in_flight=WINDOW)
            subscribers = [RawSubscriber(server.port, subscription) for _ in range(readers)]
            rates[readers].append(count / drain(subscribers, count))
            for each in subscribers:
                each.socket.close()
            client.delete_subscription(subscription)
    for readers, measured in rates.items():
        report_rate(NAME, case_name("qb", SIZE, f"{readers}-raw-readers"), SIZE, measured)
    ratio = median_ratio(rates[4], rates[1])
    judge(NAME, "4 raw subscribers in turn: at least 0.8 of one subscriber's rate", ratio, ratio >= 0.8)
