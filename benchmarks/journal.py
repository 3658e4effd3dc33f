"""How fast is the journal alone on JetStream with three replicas, against nats-py on the same cluster?

Ours: sealed batches of 1,000 messages, as a broker under load makes them, one record each, at most 64 in flight.
Theirs: a message each, at most 1,000 in flight. And one message at a time, each waiting for the answer before. Both
sides wait for the quorum, and every node syncs before it answers. And how long does a takeover take that knows the
journal up to its end, as a follower does?
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import trio

from benchmarks.harness import (
    BenchmarkOptions,
    PeerMissing,
    Server,
    case_name,
    free_port,
    judge,
    median_ratio,
    nats_node,
    report_latency,
    report_rate,
    scratch,
    skipped,
)
from qb.core.wire.frames import MessageType, encode_frame
from qb.replication.jetstream.jetstream_store import JetStreamStore
from qb.replication.journal.journal import START, Journal
from qb.replication.journal.journal_store import JournalError
from qb.replication.journal.trio_timers import TrioTimers
from qb.replication.nats.nats_client import NatsClient
from qb.storage.commit.batch_commit import assemble
from qb.storage.engine import AppendRun

NAME = "journal"
BODY = b"x" * 100
IN_BATCH = 1000
THEIR_WINDOW = 1000
FSYNC = "R3/fsync-before-ack"


def run(options: BenchmarkOptions) -> None:
    """Print the rates and the medians of both, and their ratios."""
    with scratch(options) as directory:
        try:
            with nats_cluster(directory) as servers:
                _compare(options, servers)
        except PeerMissing as missing:
            skipped(NAME, "journal", str(missing))


@contextmanager
def nats_cluster(directory: Path) -> Iterator[list[str]]:
    """Yield the addresses of three nodes."""
    with nats_nodes(directory) as nodes:
        yield [f"nats://127.0.0.1:{server.port}" for server in nodes.values()]


@contextmanager
def nats_nodes(directory: Path) -> Iterator[dict[str, Server]]:
    """Yield three nodes of a cluster by name."""
    routes = [free_port() for _ in range(3)]
    listed = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
    with ExitStack() as stack:
        yield {
            f"node{number}": stack.enter_context(
                nats_node(
                    directory,
                    f"node{number}",
                    f'cluster {{ name: bench, listen: "127.0.0.1:{route}", routes: [{listed}] }}',
                )
            )
            for number, route in enumerate(routes)
        }


def _compare(options: BenchmarkOptions, servers: list[str]) -> None:
    report_latency(NAME, "journal/takeover-of-a-follower/R3/fsync-before-ack", trio.run(_takeovers, options, servers))
    ours: dict[str, list[float]] = {"rates": [], "times": []}
    theirs: dict[str, list[float]] = {"rates": [], "times": []}
    for number in range(options.rounds):
        for figures, measured in (
            (ours, trio.run(_journal, options, servers, f"bench{number}")),
            (theirs, asyncio.run(nats_py_figures(options, servers, f"peer{number}"))),
        ):
            figures["rates"].append(measured[0])
            figures["times"] += measured[1]
    report_rate(NAME, case_name("journal", 100, "batches-of-1000/64-in-flight", FSYNC), 100, ours["rates"])
    report_rate(NAME, case_name("nats-py", 100, f"{THEIR_WINDOW}-in-flight", FSYNC), 100, theirs["rates"])
    ratio = median_ratio(ours["rates"], theirs["rates"])
    judge(NAME, "messages through the journal at least 15 times nats-py", ratio, ratio >= 15)
    report_latency(NAME, case_name("journal", 100, "one-at-a-time", FSYNC), ours["times"])
    report_latency(NAME, case_name("nats-py", 100, "one-at-a-time", FSYNC), theirs["times"])
    slower = statistics.median(ours["times"]) / statistics.median(theirs["times"])
    judge(NAME, "one message at a time at most 1.3 times nats-py", slower, slower <= 1.3)


def sealed_batch(count: int) -> bytes:
    """Return a sealed batch, as the broker stores it."""
    frames = [encode_frame(MessageType.DATA, number, 0, b"", BODY) for number in range(count)]
    size = len(frames[0])
    batch, _ = assemble([AppendRun(b"".join(frames), range(0, size * count, size), 0)], 0)
    return b"".join(batch.parts)


async def _journal(options: BenchmarkOptions, servers: list[str], cell: str) -> tuple[float, list[float]]:
    client, timers = NatsClient(servers), TrioTimers()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        nursery.start_soon(timers.run)
        store = JetStreamStore(client, timers, cell)
        await store.open()
        journal = Journal(store, timers, "benchmark")
        await journal.take_over()
        single, batch, count = sealed_batch(1), sealed_batch(IN_BATCH), options.scaled(400)
        await _append_all(journal, single, 50)
        started = time.perf_counter()
        await _append_all(journal, batch, count)
        rate = count * IN_BATCH / (time.perf_counter() - started)
        times = []
        for _ in range(options.scaled(2000)):
            started = time.perf_counter()
            await _append_all(journal, single, 1)
            times.append(time.perf_counter() - started)
        nursery.cancel_scope.cancel()
    return rate, times


async def _takeovers(options: BenchmarkOptions, servers: list[str]) -> list[float]:
    """Return how long each of some takeovers took."""
    client, timers = NatsClient(servers), TrioTimers()
    times = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        nursery.start_soon(timers.run)
        store = JetStreamStore(client, timers, "takeovers")
        await store.open()
        point = START
        for _ in range(options.scaled(400)):
            journal = Journal(store, timers, "benchmark")
            started = time.perf_counter()
            point = (await journal.take_over(point)).point
            times.append(time.perf_counter() - started)
            await _append_all(journal, b"x" * 200, 5)
        nursery.cancel_scope.cancel()
    return times


async def _append_all(journal: Journal, payload: bytes, count: int) -> None:
    """Append the payload so often, and return when all are committed."""
    left, done = count, trio.Event()

    def committed(outcome: int | JournalError) -> None:
        nonlocal left
        if isinstance(outcome, JournalError):
            raise outcome
        left -= 1
        if not left:
            done.set()

    for _ in range(count):
        journal.append(payload, committed)
    await done.wait()


async def nats_py_figures(options: BenchmarkOptions, servers: list[str], name: str) -> tuple[float, list[float]]:
    """Return the rate of nats-py with its window full, and the seconds of messages one at a time."""
    try:
        import nats
    except ImportError:
        raise PeerMissing("nats-py is not installed") from None
    connection: Any = await nats.connect(servers)
    stream = connection.jetstream(publish_async_max_pending=THEIR_WINDOW)
    await stream.add_stream(name=name, subjects=[name], num_replicas=3)
    count = options.scaled(20_000)
    started = time.perf_counter()
    acks = [await stream.publish_async(name, BODY) for _ in range(count)]
    await asyncio.gather(*acks)
    rate = count / (time.perf_counter() - started)
    times = []
    for _ in range(options.scaled(2000)):
        started = time.perf_counter()
        await stream.publish(name, BODY)
        times.append(time.perf_counter() - started)
    await connection.close()
    return rate, times
