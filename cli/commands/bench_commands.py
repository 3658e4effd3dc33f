"""How fast is this broker, seen from here?"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, repeat
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

from qb.cli.terminal.command import Command, Outcome, broker, counted, of_kind
from qb.clients.blocking.client import BrokerClient
from qb.core.wire.value_kinds import INTEGER, SIZE

T = TypeVar("T")

DEFAULT_COUNT = {"many": 200_000, "1": 2_000}  # about a second, or a few
LATENCY_COUNT = 500  # published one at a time after many at once: in a crowd a message has no latency of its own


def _arguments(parser: argparse.ArgumentParser) -> None:
    at_least_one = of_kind(INTEGER.within(1))
    parser.add_argument("--count", metavar="N", type=at_least_one, help="messages in all (200000; 2000 at depth 1)")
    parser.add_argument("--size", metavar="SIZE", type=of_kind(SIZE), default=100, help="bytes of each message (100)")
    parser.add_argument("--topic", metavar="TOPIC", help="publish to this one (a topic of its own, deleted afterwards)")
    parser.add_argument(
        "--depth",
        choices=["1", "many"],
        default="many",
        help="publishes in flight a connection (many); after many, up to 500 more one at a time show the latency",
    )
    parser.add_argument("--connections", metavar="N", type=at_least_one, default=1, help="publishers at once (1)")


def _bench_publish(args: argparse.Namespace) -> Outcome:
    count = args.count or DEFAULT_COUNT[args.depth]
    with ExitStack() as stack:
        client = stack.enter_context(broker(args))
        durability = client.server_info()["durability"]
        topic = args.topic or _own_topic(client, stack)
        seconds, latencies = _measure(args, topic, count, args.depth)
        alone = min(count, LATENCY_COUNT)
        if args.depth == "many":
            _, latencies = _measure(args, topic, alone, "1")
    data = {
        "count": count,
        "size": args.size,
        "depth": args.depth,
        "connections": args.connections,
        "durability": durability,
        "seconds": round(seconds, 6),
        "messages_per_second": round(count / seconds, 1),
        "megabytes_per_second": round(count * args.size / seconds / 1e6, 3),
        "latency_ms": _percentiles(latencies),
        "latency_of": "all" if args.depth == "1" else f"{counted(alone, 'message')} more, one at a time",
    }
    return Outcome(data, _sentences(data))


def _measure(args: argparse.Namespace, topic: str, count: int, depth: str) -> tuple[float, list[float]]:
    """Publish from all connections at once; returns the seconds it took and the latencies, if any, sorted."""
    body = os.urandom(args.size)
    publish = _one_at_a_time if depth == "1" else _pipelined
    shares = _shares(count, args.connections)
    with ExitStack() as stack:
        clients = [stack.enter_context(broker(args)) for _ in shares]
        jobs = [partial(publish, client, topic, body, share) for client, share in zip(clients, shares, strict=True)]
        started = time.perf_counter()
        results = list(_all_at_once(jobs))
        seconds = time.perf_counter() - started
    return seconds, sorted(chain.from_iterable(results))


def _all_at_once(jobs: Sequence[Callable[[], T]]) -> Iterator[T]:
    """Do each job in a thread and yield what they return; raises what the first to fail raised, leaving the others."""
    done: SimpleQueue[T | Exception] = SimpleQueue()

    def work(job: Callable[[], T]) -> None:
        try:
            done.put(job())
        except Exception as error:
            done.put(error)

    for job in jobs:
        Thread(target=work, args=(job,), daemon=True).start()  # a daemon, so that Ctrl-C need not wait for it
    for _ in jobs:
        result = done.get()
        if isinstance(result, Exception):
            raise result
        yield result


def _own_topic(client: BrokerClient, stack: ExitStack) -> str:
    """Make a topic that is deleted when the stack unwinds."""
    topic = f"bench-{os.urandom(6).hex()}"
    client.create_topic(topic)
    stack.callback(client.delete_topic, topic)
    return topic


def _shares(count: int, parts: int) -> list[int]:
    """Divide the messages as evenly as whole numbers allow."""
    each, left = divmod(count, parts)
    return [each + (index < left) for index in range(parts)]


def _one_at_a_time(client: BrokerClient, topic: str, body: bytes, count: int) -> list[float]:
    """Publish, wait, publish; returns how long each took, in seconds."""
    latencies = []
    for _ in range(count):
        started = time.perf_counter()
        client.publish(topic, body)
        latencies.append(time.perf_counter() - started)
    return latencies


def _pipelined(client: BrokerClient, topic: str, body: bytes, count: int) -> list[float]:
    """Publish without waiting for each; there is no latency to speak of one message."""
    client.publish_many(topic, repeat(body, count))
    return []


def _percentiles(latencies: Sequence[float]) -> dict[str, float]:
    """Return percentiles, in ms, of sorted seconds."""
    ranks = {"p50": 0.50, "p90": 0.90, "p99": 0.99, "max": 1.0}
    last = len(latencies) - 1
    return {name: round(latencies[round(rank * last)] * 1000, 3) for name, rank in ranks.items()}


def _sentences(data: dict[str, Any]) -> str:
    what = f"{counted(data['count'], 'message')} of {counted(data['size'], 'byte')}, {data['durability']}"
    how = f"{counted(data['connections'], 'connection')}, {data['depth']} in flight"
    rate = f"{data['messages_per_second']:,.0f} msg/s, {data['megabytes_per_second']:,.2f} MB/s"
    latency = f"latency of {data['latency_of']}: "
    latency += ", ".join(f"{name} {time:.3f} ms" for name, time in data["latency_ms"].items())
    return "\n".join([f"{what}; {how}", rate, latency])


def _deliver_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", metavar="N", type=of_kind(INTEGER.within(1)), default=200_000, help="(200000)")
    parser.add_argument("--size", metavar="SIZE", type=of_kind(SIZE), default=100, help="bytes of each message (100)")
    parser.add_argument("--batch", action="store_true", help="hand messages over in lists")


def _bench_deliver(args: argparse.Namespace) -> Outcome:
    """Store a backlog, then measure how fast one subscriber handles and acks it."""
    with ExitStack() as stack:
        client = stack.enter_context(broker(args))
        topic = _own_topic(client, stack)
        client.publish_many(topic, repeat(os.urandom(args.size), args.count))
        seconds = _handle_all(client, topic, args.count, args.batch)
    data = {
        "count": args.count,
        "size": args.size,
        "handed_over": "in lists" if args.batch else "one by one",
        "seconds": round(seconds, 6),
        "messages_per_second": round(args.count / seconds, 1),
        "megabytes_per_second": round(args.count * args.size / seconds / 1e6, 3),
    }
    what = f"{counted(args.count, 'message')} of {counted(args.size, 'byte')}, handled {data['handed_over']} and acked"
    return Outcome(data, f"{what}\n{data['messages_per_second']:,.0f} msg/s, {data['megabytes_per_second']:,.2f} MB/s")


def _handle_all(client: BrokerClient, topic: str, count: int, batch: bool) -> float:
    handled, done = 0, Event()

    def handle(number: int) -> None:
        nonlocal handled
        handled += number
        if handled >= count:
            done.set()

    started = time.perf_counter()
    if batch:
        subscriber = client.subscribe(topic, batch_handler=lambda messages: handle(len(messages)))
    else:
        subscriber = client.subscribe(topic, handler=lambda message: handle(1))
    while not done.wait(0.2):
        subscriber.wait(0)  # raises, should the subscription have ended
    seconds = time.perf_counter() - started
    subscriber.unsubscribe()
    return seconds


COMMANDS = (
    Command(
        "bench publish",
        "measure how fast messages are stored",
        "bench publish --depth 1 --size 1KiB",
        _arguments,
        _bench_publish,
    ),
    Command(
        "bench deliver",
        "measure how fast messages are pushed, handled and acked",
        "bench deliver --batch",
        _deliver_arguments,
        _bench_deliver,
    ),
)
