"""Cases 5 and 6: narrow windows, and transactions of two messages, counted in bare syncs."""

from __future__ import annotations

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import (
    BenchmarkOptions,
    bare_appends,
    case_name,
    judge,
    qb_server,
    report,
    report_rate,
    scratch,
    significant,
)
from benchmarks.work.brokers import handle_backlog
from benchmarks.work.orders import orders
from qb import BrokerClient

NAME = "real"
WINDOWS = {1: (2.5, 1_000), 10: (0.3, 5_000), 100: (0.04, 50_000), 1_000: (None, 200_000)}  # target, messages
CLIENTS = 32


def run(options: BenchmarkOptions) -> None:
    """Print what each message or transaction costs."""
    with (
        scratch(options) as directory,
        qb_server(directory / "qb") as server,
        BrokerClient(port=server.port) as client,
    ):
        _windows(client, directory, options)
        _transactions(client, directory, options)


def _bare_sync(directory: Path) -> float:
    return statistics.median(bare_appends(directory, 400, 200))


def _windows(client: BrokerClient, directory: Path, options: BenchmarkOptions) -> None:
    for window, (target, count) in WINDOWS.items():
        count = max(200, options.scaled(count))
        topic = f"window-{window}"
        client.create_topic(topic)
        client.publish_many(topic, orders(count)[0])
        rates, syncs = [], []
        for _ in range(options.rounds):
            seconds = handle_backlog(client, topic, count, len, max_in_flight=window)
            rates.append(count / seconds)
            syncs.append(seconds / count / _bare_sync(directory))
        cost = statistics.median(syncs)
        report_rate(NAME, case_name("qb", 240, f"window-{window}"), 240, rates, bare_syncs_a_message=significant(cost))
        if target is not None:
            judge(NAME, f"window {window}: at most {target} bare syncs a message", cost, cost <= target, "syncs")


def _transactions(client: BrokerClient, directory: Path, options: BenchmarkOptions) -> None:
    for topic in ("payments", "ledger"):
        client.create_topic(topic)
    seconds = 1.0 if options.quick else 4.0
    alone, together, syncs = [], [], []
    for number in range(options.rounds):
        alone.append(_transact_for(seconds, [client], f"alone-{number}"))
        syncs.append(1 / alone[-1] / _bare_sync(directory))
        with ExitStack() as stack:
            clients = [stack.enter_context(BrokerClient(port=client.port)) for _ in range(CLIENTS)]
            together.append(_transact_for(seconds, clients, f"together-{number}"))
    cost = statistics.median(syncs)
    ratio = statistics.median([a / b for a, b in zip(together, alone, strict=True)])
    what = case_name("qb", 240, "transaction-of-two-messages")
    report(NAME, what, a_second=round(statistics.median(alone)), bare_syncs=significant(cost))
    report(NAME, f"{what}-{CLIENTS}-clients", a_second=round(statistics.median(together)))
    judge(NAME, "a transaction of two messages: at most 5 bare syncs", cost, cost <= 5, "syncs")
    judge(NAME, f"transactions of {CLIENTS} clients: at least 4 times one", ratio, ratio >= 4)


def _transact_for(seconds: float, clients: list[BrokerClient], name: str) -> float:
    """Return transactions a second, each of one message in two topics, each client one after another."""
    done, lock, until = 0, threading.Lock(), time.perf_counter() + seconds
    body = orders(1)[0][0]

    def work(number: int) -> None:
        nonlocal done
        made = 0
        while time.perf_counter() < until:
            with clients[number].transaction(f"{name}-{number}-{made}") as transaction:
                transaction.publish("payments", body)
                transaction.publish("ledger", body)
            made += 1
        with lock:
            done += made

    with ThreadPoolExecutor(len(clients)) as pool:
        began = time.perf_counter()
        list(pool.map(work, range(len(clients))))
        return done / (time.perf_counter() - began)
