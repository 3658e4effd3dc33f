"""What does the HTTP door carry, and what do 500 open streams cost native publishing?

Small POSTs go over keep-alive connections with plain sockets, one request in flight each. The streams are open
Server-Sent Events whose peers read all that comes; native publishing is the blocking client's publish_many. Rounds with
and without streams alternate on the same server.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event

from benchmarks.harness import (
    BenchmarkOptions,
    case_name,
    free_port,
    judge,
    median_ratio,
    qb_server,
    report_rate,
    scratch,
)
from qb import BrokerClient

NAME = "http"
SIZE = 100
CONNECTIONS = 8
STREAMS = 500
BATCH = 10_000


def run(options: BenchmarkOptions) -> None:
    """Print the rates and the ratios."""
    port = free_port()
    with (
        scratch(options) as directory,
        qb_server(directory / "qb", QB_HTTP_PORT=str(port)) as server,
        BrokerClient(port=server.port) as client,
    ):
        client.create_topic("bench")
        client.create_topic("watched")
        _post_once(port, "/subscriptions", {"subscription_id": "watching", "topic": "watched"})
        _requests(options, port)
        _streams(options, port, client)


def _requests(options: BenchmarkOptions, port: int) -> None:
    """Print the rates of publishing over HTTP."""
    seconds = 1.0 if options.quick else 4.0
    single = _request("/topics/bench/messages", json.dumps({"value": "x" * SIZE}).encode(), "application/json")
    rates = [_post_for(seconds, port, single) for _ in range(options.rounds)]
    report_rate(NAME, case_name("http", SIZE, f"{CONNECTIONS}-connections-one-at-a-time"), SIZE, rates)
    lines = json.dumps({"value": "x" * SIZE}).encode() + b"\n"
    batch = _request("/topics/bench/messages", lines * BATCH, "application/x-ndjson")
    rates = [_post_for(seconds, port, batch, connections=1) * BATCH for _ in range(options.rounds)]
    report_rate(NAME, case_name("http", SIZE, f"batches-of-{BATCH}-lines"), SIZE, rates)


def _streams(options: BenchmarkOptions, port: int, client: BrokerClient) -> None:
    """Print native publishing with and without streams, and the ratios."""
    count = options.scaled(1_000_000)
    cases = {
        "of another subscription": "/subscriptions/watching/stream?auto_ack=true",
        "that follow the topic": "/topics/bench/tail",
    }
    for what, path in cases.items():
        alone, beside = [], []
        for _ in range(options.rounds):
            alone.append(_publish(client, count))
            with _open_streams(port, path):
                beside.append(_publish(client, count))
        report_rate(NAME, case_name("native", SIZE, f"beside-{STREAMS}-streams-{what.replace(' ', '-')}"), SIZE, beside)
        ratio = median_ratio(beside, alone)
        target = f"native publishing beside {STREAMS} streams {what}: at least half the rate without"
        judge(NAME, target, ratio, ratio >= 0.5)


def _publish(client: BrokerClient, count: int) -> float:
    started = time.perf_counter()
    client.publish_many("bench", [b"x" * SIZE] * count)
    return count / (time.perf_counter() - started)


def _request(path: str, body: bytes, kind: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _post_for(seconds: float, port: int, request: bytes, connections: int = CONNECTIONS) -> float:
    """Return answers a second while each connection has one request in flight."""
    with ExitStack() as stack:
        chosen = stack.enter_context(selectors.DefaultSelector())
        for _ in range(connections):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            chosen.register(peer, selectors.EVENT_READ, bytearray())
            peer.sendall(request)
        started, answered = time.perf_counter(), 0
        while (now := time.perf_counter()) - started < seconds:
            for key, _ in chosen.select():
                received = key.data
                received += key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                if _is_whole(received):
                    answered += 1
                    received.clear()
                    key.fileobj.sendall(request)  # type: ignore[union-attr]
        return answered / (now - started)


def _is_whole(received: bytearray) -> bool:
    """Say whether an answer, which must be a success, has come completely."""
    head, end, _ = bytes(received[:2_000]).partition(b"\r\n\r\n")
    if not end:
        return False
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"not a success: {bytes(received[:500])!r}")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    return len(received) == len(head) + len(end) + length


def _post_once(port: int, path: str, body: object) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    if status >= 300:
        raise RuntimeError(f"{path} was answered with {status}")


@contextmanager
def _open_streams(port: int, path: str) -> Iterator[None]:
    """Keep streams open whose peers, in a process of their own, read everything and throw it away."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    reader = context.Process(target=_read_streams, args=(port, path, ready))
    reader.start()
    try:
        if not ready.wait(60):
            raise RuntimeError("the streams did not open")
        yield
    finally:
        reader.kill()
        reader.join()


def _read_streams(port: int, path: str, ready: Event) -> None:
    chosen = selectors.DefaultSelector()
    for _ in range(STREAMS):
        peer = socket.create_connection(("127.0.0.1", port))
        peer.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n".encode())
        received = b""
        while b"joined" not in received:
            received += peer.recv(4_096)
        chosen.register(peer, selectors.EVENT_READ)
    ready.set()
    while True:
        for key, _ in chosen.select():
            key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
