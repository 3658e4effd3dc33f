"""How late is the latest message, beside a subscriber that catches up?

Every 10 ms keyed JSON is published by `publish_many`, at 30 % of the rate that it reaches here. A subscriber in a
process of its own handles it. A third process handles a backlog again and again meanwhile. In every other second the
publisher is silent, and bare appends + fdatasync are timed beside the same catching up. The time of a message begins
when it was to be sent, so a publisher that is held up counts against the broker; how late it began to send is printed
too. That moment is the timestamp of the message, in ms.

Publisher, broker, handler and the one that catches up share the processors. So the same load is measured without the
one that catches up, and while it consumes from another broker process: what is later beside it in the same broker is
the broker's part. Each of the three takes a third of the time.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event as ProcessEvent
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    BenchmarkOptions,
    bare_append_times,
    judge,
    qb_server,
    report,
    scratch,
    significant,
    timed,
)
from benchmarks.work.orders import PARTITIONS, orders
from qb import BrokerClient, Message

NAME = "tails"
BACKLOG = 10_000_000
SHARE = 0.3  # of the rate of publish_many
TICK = 0.01  # seconds from one batch to the next
MOST = 5.0  # times the p99 of the bare append
PATIENCE = 120.0  # seconds
# Where the one that catches up has its backlog.
ALONE, ELSEWHERE, HERE = "nothing-else", "catching-up-in-another-broker", "catching-up-in-the-same-broker"


def run(options: BenchmarkOptions) -> None:
    """Print the percentiles of publish to handler, and of the bare append beside it."""
    with ExitStack() as stack:
        directory = stack.enter_context(scratch(options))
        full = stack.enter_context(qb_server(directory / "full"))
        empty = stack.enter_context(qb_server(directory / "empty"))
        client = stack.enter_context(BrokerClient(port=full.port))
        elsewhere = stack.enter_context(BrokerClient(port=empty.port))
        rate = _backlog(client, options)
        for each in (client, elsewhere):
            each.create_topic("live", partitions=PARTITIONS)
            each.create_subscription("live", "live", start_offset="latest")
        cases: dict[str, tuple[BrokerClient, int, int | None]] = {
            ALONE: (client, full.port, None),
            ELSEWHERE: (elsewhere, empty.port, full.port),
            HERE: (client, full.port, full.port),
        }
        p99: dict[str, float] = {}
        for case, (publisher, port, old) in cases.items():
            late, held_up, appends = _measure(publisher, port, old, rate * SHARE, options.seconds / 3, directory)
            p99[case] = _report(case, rate, late, held_up, appends)
        ratios = {f"times_{case}": significant(p99[HERE] / p99[case]) for case in (ALONE, ELSEWHERE)}
        report(NAME, f"p99-of-publish-to-handler/{HERE}", **ratios)


def _backlog(client: BrokerClient, options: BenchmarkOptions) -> float:
    """Make the backlog; return how many messages a second publish_many reaches."""
    client.create_topic("old", partitions=PARTITIONS)
    bodies, keys = orders(options.scaled(400_000))
    publish = partial(client.publish_many, "old", bodies, keys=keys)
    times = [timed(publish) for _ in range(max(3, options.scaled(BACKLOG) // len(bodies)))]
    return len(bodies) / statistics.median(times)


def _measure(
    client: BrokerClient, port: int, old: int | None, rate: float, seconds: float, directory: Path
) -> tuple[list[float], list[float], list[float]]:
    """Return how late messages were handled, how late batches were begun, and the times of bare appends.

    They are published to the broker at `port`, while a process catches up with the backlog of the one at `old`.
    """
    processes = multiprocessing.get_context("spawn")
    stop = processes.Event()
    receiving, sending = processes.Pipe(duplex=False)
    workers = [processes.Process(target=handle, args=(port, stop, sending, min(1.0, seconds / 30)))]
    if old is not None:
        workers.append(processes.Process(target=catch_up, args=(old, stop)))
    for worker in workers:
        worker.start()
    try:
        _received(receiving)  # it has joined
        held_up, appends = _publish(client, rate, seconds, directory)
        _wait_until_handled(client)
        stop.set()
        return _received(receiving), held_up, appends
    finally:
        stop.set()
        for worker in workers:
            worker.join(30)
            worker.kill()


def _publish(client: BrokerClient, rate: float, seconds: float, directory: Path) -> tuple[list[float], list[float]]:
    """Publish in every second second and time bare appends in the others.

    Returns how late each batch began to be sent, and the times of the appends.
    """
    bodies, keys = orders(max(1, int(rate * TICK)))
    held_up, appends = list[float](), list[float]()
    wall_clock = time.time() - time.monotonic()
    began = time.monotonic()
    while (second := time.monotonic() - began) < seconds or not appends:
        if int(second) % 2 or second >= seconds:
            appends += bare_append_times(directory, 200, until=began + int(second) + 1)
            continue
        due = began + int(second)
        while due < began + int(second) + 1 and due < began + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            held_up.append(time.monotonic() - due)
            client.publish_many("live", bodies, keys=keys, timestamp_ms=round((due + wall_clock) * 1e3))
            due += TICK
    return held_up, appends


def _received(receiving: Connection) -> Any:
    if not receiving.poll(PATIENCE):
        raise TimeoutError("the subscriber does not answer")
    return receiving.recv()


def _wait_until_handled(client: BrokerClient) -> None:
    deadline = time.monotonic() + PATIENCE
    while client.describe_subscription("live").lag:
        if time.monotonic() > deadline:
            raise TimeoutError("the subscriber does not get to the end of what was published")
        time.sleep(0.05)


def handle(port: int, stop: ProcessEvent, sending: Connection, settling: float) -> None:
    """Handle what is published, and send how late each message was; those of the first seconds are not counted."""
    late: list[float] = []
    counts_from = 0.0

    def batch_handler(messages: list[Message]) -> None:
        nonlocal counts_from
        now = time.time()
        counts_from = counts_from or now + settling
        if now >= counts_from:
            late.extend(now - message.timestamp / 1e3 for message in messages)

    with BrokerClient(port=port) as client, client.subscribe_to_subscription("live", batch_handler=batch_handler):
        sending.send("joined")
        stop.wait()
    sending.send(late)


def catch_up(port: int, stop: ProcessEvent) -> None:
    """Handle the whole backlog, and again from its beginning, until the event is set."""
    number = 0
    with BrokerClient(port=port) as client:
        while not stop.is_set():
            number += 1
            name, handled = f"old-{number}", _Handled()
            client.create_subscription(name, "old", start_offset="earliest")
            backlog = client.describe_subscription(name).lag
            with client.subscribe_to_subscription(name, batch_handler=handled.note):
                while not stop.is_set() and handled.count < backlog:
                    handled.changed.wait(1.0)
                    handled.changed.clear()
            client.delete_subscription(name)


class _Handled:
    def __init__(self) -> None:
        self.count = 0
        self.changed = threading.Event()

    def note(self, messages: list[Message]) -> None:
        self.count += len(messages)
        self.changed.set()


def percentile(times: list[float], share: float) -> float:
    """Return the time that this share of all does not exceed."""
    return sorted(times)[int(len(times) * share)]


def _report(case: str, rate: float, late: list[float], held_up: list[float], appends: list[float]) -> float:
    """Print the figures of a case; returns the p99 of publish to handler."""
    sides = ("qb-publish-to-handler", late), ("qb-publisher-held-up", held_up), ("bare-append+fdatasync/200B", appends)
    for who, times in sides:
        figures = {f"p{share * 100:g}_ms": significant(percentile(times, share) * 1e3) for share in (0.5, 0.99, 0.999)}
        report(NAME, f"{who}/{case}", **figures, samples=len(times), messages_per_second=round(rate * SHARE))
    for share in (0.99, 0.999) if case == HERE else ():
        ratio = percentile(late, share) / percentile(appends, 0.99)
        target = f"p{share * 100:g} of publish to handler: at most {MOST:g} times the p99 of a bare append"
        judge(NAME, target, ratio, ratio <= MOST)
    return percentile(late, 0.99)
