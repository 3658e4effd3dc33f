"""Cases 7 and 8: HTTP, JSON lines, and consumer groups with a handler that parses."""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    BenchmarkOptions,
    PeerMissing,
    Server,
    case_name,
    cpu_seconds,
    free_port,
    judge,
    median_ratio,
    qb_server,
    report_rate,
    scratch,
    significant,
    skipped,
)
from benchmarks.work.brokers import Redis
from benchmarks.work.orders import PARSERS, PARTITIONS, orders
from qb import BrokerClient, Consumer

NAME = "real"
CONNECTIONS = 8
MOST_LINES = 100_000  # that the HTTP door takes in one request


def run(options: BenchmarkOptions) -> None:
    """Print the rates of each door."""
    ports = {"QB_HTTP_PORT": str(free_port()), "QB_JSON_PORT": str(free_port())}
    with (
        scratch(options) as directory,
        qb_server(directory / "qb", **ports) as server,
        BrokerClient(port=server.port) as client,
    ):
        client.create_topic("http")
        client.create_topic("lines")
        _http(server, int(ports["QB_HTTP_PORT"]), options)
        _lines(int(ports["QB_JSON_PORT"]), options)
        _groups(client, directory, options)


def _http(server: Server, port: int, options: BenchmarkOptions) -> None:
    seconds = 1.0 if options.quick else 4.0
    rates, costs, bulk = [], [], []
    for _ in range(options.rounds):
        before = cpu_seconds(server.pid)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            began = time.perf_counter()
            posted = sum(pool.map(lambda _: _post_for(seconds, port), range(CONNECTIONS)))
            rates.append(posted / (time.perf_counter() - began))
        costs.append((cpu_seconds(server.pid) - before) / posted)
        bulk.append(_post_lines(port, options.scaled(400_000)))
    cost = statistics.median(costs)
    case = case_name("qb", 240, f"http-post-{CONNECTIONS}-connections")
    report_rate(NAME, case, 240, rates, server_cpu_us=significant(cost * 1e6))
    report_rate(NAME, case_name("qb", 240, "http-ndjson"), 240, bulk)
    rate, many = statistics.median(rates), statistics.median(bulk)
    judge(NAME, "HTTP: one message a POST, at least 3,000 a second", rate, rate >= 3_000, "msg/s")
    judge(NAME, "HTTP: one message a POST, at most 250 µs of server CPU", cost * 1e6, cost <= 250e-6, "µs")
    judge(NAME, "HTTP: NDJSON, at least 300,000 msg/s", many, many >= 300_000, "msg/s")


def _post_for(seconds: float, port: int) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body, posted, until = orders(1)[0][0], 0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        connection.request("POST", "/topics/http/messages", body, {"Content-Type": "application/octet-stream"})
        answer = connection.getresponse()
        answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"HTTP {answer.status}")
        posted += 1
    connection.close()
    return posted


def _post_lines(port: int, count: int) -> float:
    """Return messages a second of POSTs with a message a line, as many lines in each as the door takes."""
    lines = [json.dumps({"value": body.decode()}).encode() + b"\n" for body in orders(count)[0]]
    bodies = [b"".join(lines[at : at + MOST_LINES]) for at in range(0, count, MOST_LINES)]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began = time.perf_counter()
    for body in bodies:
        connection.request("POST", "/topics/http/messages", body, {"Content-Type": "application/x-ndjson"})
        answer = connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"HTTP {answer.status}: {text[:200]!r}")
    seconds = time.perf_counter() - began
    connection.close()
    return count / seconds


def _lines(port: int, options: BenchmarkOptions) -> None:
    count = options.scaled(60_000)
    produced, fetched = [], []
    for _ in range(options.rounds):
        produced.append(_produce_lines(port, count))
        fetched.append(_fetch_lines(port, count))
    report_rate(NAME, case_name("qb", 240, "json-lines-produce-pipelined"), 240, produced)
    report_rate(NAME, case_name("qb", 240, "json-lines-fetch"), 240, fetched)
    rate, records = statistics.median(produced), statistics.median(fetched)
    judge(NAME, "JSON lines: produce at least 30,000 a second pipelined", rate, rate >= 30_000, "msg/s")
    judge(NAME, "JSON lines: fetch at least 150,000 records a second", records, records >= 150_000, "msg/s")


def _produce_lines(port: int, count: int) -> float:
    bodies = orders(count)[0]
    text = b"".join(
        json.dumps({"type": "produce", "topic": "lines", "value": body.decode()}).encode() + b"\n" for body in bodies
    )
    with socket.create_connection(("127.0.0.1", port), timeout=120) as peer, ThreadPoolExecutor(1) as pool:
        answers = peer.makefile("rb")
        began = time.perf_counter()
        sending = pool.submit(peer.sendall, text)
        for _ in range(count):
            if not answers.readline().startswith(b'{"ok":true'):
                raise RuntimeError("a produce was refused")
        sending.result()
        return count / (time.perf_counter() - began)


def _fetch_lines(port: int, count: int) -> float:
    with socket.create_connection(("127.0.0.1", port), timeout=120) as peer:
        answers, offset, read, began = peer.makefile("rb"), 0, 0, time.perf_counter()
        while read < count:
            asked = {"type": "fetch", "topic": "lines", "partition": 0, "offset": offset, "max": 10_000}
            peer.sendall(json.dumps(asked).encode() + b"\n")
            records = PARSERS["msgspec"](answers.readline())["data"]["records"]
            read, offset = read + len(records), records[-1]["offset"] + 1
        return read / (time.perf_counter() - began)


def _groups(client: BrokerClient, directory: Path, options: BenchmarkOptions) -> None:
    """A consumer group, and fetch, with a handler that parses, beside redis-py with hiredis."""
    bodies, keys = orders(options.scaled(200_000))
    client.create_topic("groups", partitions=PARTITIONS)
    client.publish_many("groups", bodies, keys=keys)
    parse = PARSERS["msgspec"]
    rates: dict[str, list[float]] = {"consumer": [], "fetch": [], "redis": []}
    with ExitStack() as stack:
        redis: Any = None
        try:
            redis = stack.enter_context(Redis.started(directory))
            redis.publish(bodies, keys)
        except PeerMissing as missing:
            skipped(NAME, "redis, consumer groups", str(missing))
        for number in range(options.rounds):
            rates["consumer"].append(_consume(client, f"group-{number}", len(bodies)))
            rates["fetch"].append(_fetch(client, len(bodies)))
            if redis is not None:
                rates["redis"].append(len(bodies) / redis.handle(len(bodies), parse, batches=False))
    for name, measured in rates.items():
        report_rate(NAME, case_name(name, 240, "parsing-msgspec"), 240, measured)
    if redis is not None:
        for name, target in (("consumer", 2.5), ("fetch", 3.5)):
            ratio = median_ratio(rates[name], rates["redis"])
            judge(NAME, f"{name}: at least {target} times redis with hiredis", ratio, ratio >= target)


def _consume(client: BrokerClient, group: str, count: int) -> float:
    parse, handled = PARSERS["msgspec"], 0
    began = time.perf_counter()
    with Consumer(group, "groups", host=client.host, port=client.port) as consumer:
        while handled < count:
            messages = consumer.poll()
            for message in messages:
                parse(message.body)
            handled += len(messages)
    return count / (time.perf_counter() - began)


def _fetch(client: BrokerClient, count: int) -> float:
    parse, began = PARSERS["msgspec"], time.perf_counter()
    for partition in range(PARTITIONS):
        offset, end = 0, client.offsets("groups", partition).next
        while offset < end:
            messages = client.fetch("groups", partition, offset, max_messages=2_000)
            for message in messages:
                parse(message.body)
            offset = messages.next_offset
    return count / (time.perf_counter() - began)
