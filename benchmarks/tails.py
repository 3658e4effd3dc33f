"""How late is the latest message, beside a subscriber that catches up?

A producer sends keyed JSON at 30 % of the rate that `publish_many` reaches here, some every 10 ms and without waiting
for what is on its way. A subscriber in a process of its own handles it. A third process handles a backlog again and
again meanwhile. In every other second the producer is silent, and bare appends + fdatasync are timed beside the same
catching up. The time of a message begins when it was to be sent, so a producer that is held up counts against the
broker; how late it began to send is printed too. That moment is the timestamp of the message, in ms.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
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


def run(options: BenchmarkOptions) -> None:
    """Print the percentiles of publish to handler, and of the bare append beside it."""
    processes = multiprocessing.get_context("spawn")
    stop = processes.Event()
    receiving, sending = processes.Pipe(duplex=False)
    with scratch(options) as directory, qb_server(directory / "qb") as server, BrokerClient(port=server.port) as client:
        rate = _prepare(client, options)
        workers = [
            processes.Process(target=catch_up, args=(server.port, stop)),
            processes.Process(target=handle, args=(server.port, stop, sending, min(1.0, options.seconds / 100))),
        ]
        for worker in workers:
            worker.start()
        try:
            _received(receiving)  # it has joined
            held_up, appends = _publish(client, rate * SHARE, options.seconds, directory)
            _wait_until_handled(client)
            stop.set()
            late = _received(receiving)
        finally:
            stop.set()
            for worker in workers:
                worker.join(30)
                worker.kill()
    _report(rate, late, held_up, appends)


def _prepare(client: BrokerClient, options: BenchmarkOptions) -> float:
    """Make the topics and the backlog; return how many messages a second publish_many reaches."""
    for topic in ("live", "old"):
        client.create_topic(topic, partitions=PARTITIONS)
    client.create_subscription("live", "live", start_offset="latest")
    bodies, keys = orders(options.scaled(400_000))
    publish = partial(client.publish_many, "old", bodies, keys=keys)
    times = [timed(publish) for _ in range(max(3, options.scaled(BACKLOG) // len(bodies)))]
    return len(bodies) / statistics.median(times)


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
        with client.producer("live", linger_ms=0) as producer:  # whose end waits for what is on its way
            while due < began + int(second) + 1 and due < began + seconds:
                time.sleep(max(0.0, due - time.monotonic()))
                held_up.append(time.monotonic() - due)
                timestamp_ms = round((due + wall_clock) * 1e3)
                for body, key in zip(bodies, keys, strict=True):
                    producer.send(body, key, timestamp=timestamp_ms)
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


def _report(rate: float, late: list[float], held_up: list[float], appends: list[float]) -> None:
    sides = ("qb-publish-to-handler", late), ("qb-publisher-held-up", held_up), ("bare-append+fdatasync/200B", appends)
    for who, times in sides:
        figures = {f"p{share * 100:g}_ms": significant(percentile(times, share) * 1e3) for share in (0.5, 0.99, 0.999)}
        report(NAME, who, **figures, samples=len(times), messages_per_second=round(rate * SHARE))
    for share in (0.99, 0.999):
        ratio = percentile(late, share) / percentile(appends, 0.99)
        target = f"p{share * 100:g} of publish to handler: at most {MOST:g} times the p99 of a bare append"
        judge(NAME, target, ratio, ratio <= MOST)
