"""What does a message cost when there is more of something else?

One thing grows at a time: the partitions of the topic, all topics, idle subscriptions of the topic, idle connections,
the backlog, the joined subscriptions, the body. Each size has a broker of its own; the brokers are measured in turn,
round by round. The cost is the processor time of broker and client together, a message. Publish is `publish_many` of
bodies of 50 to 150 bytes, push a counting batch handler at default options.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import (
    BenchmarkOptions,
    Server,
    allow_files,
    exact_cpu_seconds,
    greeted,
    judge,
    qb_server,
    report,
    scratch,
    significant,
    skipped,
)
from benchmarks.work.orders import lines
from qb import BrokerClient, Message

NAME = "growth"
MESSAGES = 200_000  # a measurement
MESSAGES_EACH = 40_000  # of a measurement, pushed to each joined subscription
MOST = 1.5  # times the cost of the cheapest smaller size
PATIENCE = 600.0
MAKERS = 16  # connections that prepare a size
BYTES_A_MESSAGE = 75  # of a backlog on disk, for bodies of 10 bytes: it takes 70


@dataclass
class Point:
    """One size of what grows: a broker that has it, and what messages cost there, round by round."""

    size: int
    server: Server
    client: BrokerClient
    topic: str = "measured"
    messages: int = MESSAGES  # of a measurement
    body: int = 0  # bytes; 0: different lengths
    joined: int = 1  # subscriptions that each get every message
    from_start: bool = False  # is the backlog pushed, or what was just published?
    publish_us: list[float] = field(default_factory=list)
    push_us: list[float] = field(default_factory=list)


Prepare = Callable[[Point, ExitStack], None]


class Dimension(NamedTuple):
    """Something that grows."""

    name: str
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]
    prepare: Prepare
    linear: bool = False  # may a message cost as much as there is of it? Then the cost of each one is compared


# What is there beside the message


def _partitions(point: Point, stack: ExitStack) -> None:
    point.client.create_topic(point.topic, partitions=point.size)


def _topics(point: Point, stack: ExitStack) -> None:
    point.client.create_topic(point.topic)
    _make_many(point, lambda client, number: client.create_topic(f"other-{number}"))


def _idle_subscriptions(point: Point, stack: ExitStack) -> None:
    point.client.create_topic(point.topic)
    _make_many(point, lambda client, number: client.create_subscription(f"idle-{number}", point.topic))


def _make_many(point: Point, make: Callable[[BrokerClient, int], object]) -> None:
    """Make all but one, by several connections at once: each waits for syncs most of the time."""

    def make_some(first: int) -> None:
        with BrokerClient(port=point.server.port) as client:
            for number in range(first, point.size - 1, MAKERS):
                make(client, number)

    with ThreadPoolExecutor(MAKERS) as pool:
        list(pool.map(make_some, range(min(MAKERS, point.size - 1))))


def _idle_connections(point: Point, stack: ExitStack) -> None:
    point.client.create_topic(point.topic)
    for _ in range(point.size - 1):
        stack.enter_context(greeted(point.server.port))


def _backlog(point: Point, stack: ExitStack) -> None:
    point.client.create_topic(point.topic)
    point.from_start = True
    point.body = 10
    bodies = [b"x" * point.body] * min(point.size, 1_000_000)
    for _ in range(point.size // len(bodies)):
        point.client.publish_many(point.topic, bodies)


def _joined(point: Point, stack: ExitStack) -> None:
    point.client.create_topic(point.topic)
    point.joined = point.size
    point.messages = MESSAGES_EACH  # at every size, or joining would be shared by fewer messages


def _body(point: Point, stack: ExitStack) -> None:
    point.client.create_topic(point.topic)
    point.body = point.size


DIMENSIONS = (
    Dimension("partitions", (1, 16, 256, 1_024), (1, 16), _partitions),
    Dimension("topics", (1, 100, 1_000, 10_000), (1, 20), _topics),
    Dimension("idle subscriptions", (1, 10, 100, 1_000), (1, 20), _idle_subscriptions),
    Dimension("idle connections", (1, 100, 1_000, 5_000), (1, 20), _idle_connections),
    Dimension("backlog", (10**4, 10**5, 10**6, 10**7, 10**8), (10**3, 10**4), _backlog),
    Dimension("joined subscriptions", (1, 10, 100), (1, 2), _joined, linear=True),
    Dimension("bytes of the body", (10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000), (10, 1_000), _body, True),
)


def run(options: BenchmarkOptions) -> None:
    """Print the cost of a message at every size of everything that grows."""
    allow_files(12_000)
    for dimension in DIMENSIONS:
        with scratch(options) as directory, ExitStack() as stack:
            points = []
            for size in dimension.quick_sizes if options.quick else dimension.sizes:
                if dimension.name == "backlog" and not _fits(size, shutil.disk_usage(directory).free):
                    skipped(NAME, f"qb/{dimension.name}/{size}", "the disk is too small")
                    continue
                point = stack.enter_context(_point(size, directory / f"broker-{size}"))
                dimension.prepare(point, stack)
                points.append(point)
            for _ in range(options.rounds):
                for point in points:
                    _measure(point, options)
        _report(dimension, points)


def _fits(size: int, free: int) -> bool:
    return size * BYTES_A_MESSAGE < free / 2


@contextmanager
def _point(size: int, directory: Path) -> Iterator[Point]:
    settings = {"QB_HEARTBEAT_INTERVAL": "3600", "QB_MAX_SUBSCRIPTIONS": "20000", "QB_MAX_CONNECTIONS": "12000"}
    with qb_server(directory, **settings) as server, BrokerClient(port=server.port) as client:
        yield Point(size, server, client)


# Measuring


def _measure(point: Point, options: BenchmarkOptions) -> None:
    """Add one round to both costs."""
    messages = options.scaled(point.messages)
    count = max(10, min(messages, options.scaled(200_000_000) // max(1, point.body)))
    names = [f"push-{time.monotonic_ns()}-{number}" for number in range(point.joined)]
    for name in names:
        point.client.create_subscription(name, point.topic, start_offset="earliest" if point.from_start else "latest")
    bodies = [b"x" * point.body] * count if point.body else lines(count)
    publish = partial(point.client.publish_many, point.topic, bodies)
    point.publish_us.append(_cost(point, publish) / count)
    pushed = point.size if point.from_start else count
    times = max(1, count // pushed)
    point.push_us.append(_cost(point, partial(_handle, point, names, min(pushed, count))) / min(pushed, count))
    for number in range(1, times):  # a small backlog is read several times in a round
        again = f"{names[0]}-again-{number}"
        point.client.create_subscription(again, point.topic, start_offset="earliest")
        names.append(again)
        point.push_us[-1] += _cost(point, partial(_handle, point, [again], pushed)) / pushed
    point.push_us[-1] /= times
    for name in names:
        point.client.delete_subscription(name)


def _cost(point: Point, action: Callable[[], object]) -> float:
    """Return the microseconds of processor time that broker and client spend on it."""
    before = exact_cpu_seconds(point.server.pid) + time.process_time()
    action()
    return (exact_cpu_seconds(point.server.pid) + time.process_time() - before) * 1e6


def _handle(point: Point, subscriptions: list[str], count: int) -> None:
    """Return when each subscription has handled so many messages."""
    left, done, lock = count * len(subscriptions), threading.Event(), threading.Lock()

    def batch_handler(messages: list[Message]) -> None:
        nonlocal left
        with lock:
            left -= len(messages)
            if left <= 0:
                done.set()

    joined = [point.client.subscribe_to_subscription(name, batch_handler=batch_handler) for name in subscriptions]
    if not done.wait(PATIENCE):
        raise TimeoutError(f"{left} messages were not handled")
    for each in joined:
        each.unsubscribe()


# Reporting


def _report(dimension: Dimension, points: list[Point]) -> None:
    for point in points:
        report(
            NAME,
            f"qb/{dimension.name}/{point.size}",
            dimension=dimension.name,
            size=point.size,
            publish_us=significant(statistics.median(point.publish_us)),
            push_us=significant(statistics.median(point.push_us)),
            rounds=[significant(each) for each in (*point.publish_us, *point.push_us)],
        )
    if dimension.linear:
        _judge_linear(dimension, points)
        return
    for what in ("publish", "push"):
        costs = [statistics.median(getattr(point, f"{what}_us")) for point in points]
        ratio = costs[-1] / max(min(costs[:-1]), 1e-9)  # a small size may be dear for reasons of its own, such as joins
        target = f"{what}, {points[0].size:,} to {points[-1].size:,} {dimension.name}: at most {MOST:g} times the cost"
        judge(NAME, target, ratio, ratio <= MOST)


def _judge_linear(dimension: Dimension, points: list[Point]) -> None:
    """The cost of each one may not grow: of the largest size, compared with the cheapest smaller one."""
    for what in ("publish", "push"):
        if what == "publish" and dimension.name == "joined subscriptions":
            continue  # none is joined while messages are published
        each = [statistics.median(getattr(point, f"{what}_us")) / point.size for point in points]
        ratio = each[-1] / max(min(each[:-1]), 1e-9)
        target = f"{what}, up to {points[-1].size:,} {dimension.name}: each at most {MOST:g} times what it cost before"
        judge(NAME, target, ratio, ratio <= MOST)
