"""Do 256 publishers that each wait for their ack share the cost of a sync?

One process holds all connections with plain sockets and epoll, so that the client is not what limits; its share of a
processor is printed. One such connection, driven by the same code, is the measure.
"""

from __future__ import annotations

import select
import socket
import statistics
import time
from contextlib import ExitStack

from benchmarks.harness import (
    BenchmarkOptions,
    case_name,
    cpu_seconds,
    judge,
    median_ratio,
    qb_server,
    report_rate,
    scratch,
    significant,
)
from qb import BrokerClient
from qb.core.wire.frames import MessageType, encode_frame

NAME = "publish_connections"
SIZE = 100
MANY = 256
TARGET = 10


def run(options: BenchmarkOptions) -> None:
    """Print both rates and their ratio."""
    seconds = 1.0 if options.quick else 4.0
    rates: dict[int, list[float]] = {1: [], MANY: []}
    shares: dict[int, list[tuple[float, float]]] = {1: [], MANY: []}
    with scratch(options) as directory, qb_server(directory / "qb") as server:
        with BrokerClient(port=server.port) as client:
            client.create_topic("bench")
        for _ in range(options.rounds):
            for connections in (1, MANY):
                cpu = time.process_time(), cpu_seconds(server.pid)
                rates[connections].append(_publish_for(seconds, connections, server.port))
                used = time.process_time() - cpu[0], cpu_seconds(server.pid) - cpu[1]
                shares[connections].append((used[0] / seconds, used[1] / seconds))
    for connections, measured in rates.items():
        client_share, server_share = (
            significant(statistics.median(each)) for each in zip(*shares[connections], strict=True)
        )
        name = case_name("qb", SIZE, f"{connections}-connections-one-at-a-time")
        report_rate(NAME, name, SIZE, measured, client_cores=client_share, server_cores=server_share)
    ratio = median_ratio(rates[MANY], rates[1])
    judge(NAME, f"{MANY} connections: at least {TARGET} times the rate of one", ratio, ratio >= TARGET)


def _publish_for(seconds: float, connections: int, port: int) -> float:
    """Return acks a second while each connection has one publish in flight; the first ack of each is not counted."""
    request = encode_frame(MessageType.PUBLISH, 1, 0, {"topic": "bench"}, b"x" * SIZE)
    with ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(connections)]
        poll = stack.enter_context(select.epoll())
        by_fd = {peer.fileno(): peer for peer in peers}
        for peer in peers:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            poll.register(peer, select.EPOLLIN)
            peer.sendall(request)
        for peer in peers:
            _expect_success(peer.recv(4096))
            peer.sendall(request)
        started = time.perf_counter()
        acked = 0
        while (now := time.perf_counter()) - started < seconds:
            for fd, _ in poll.poll():
                _expect_success(by_fd[fd].recv(4096))
                acked += 1
                by_fd[fd].sendall(request)
        return acked / (now - started)


def _expect_success(ack: bytes) -> None:
    """One publish is in flight a connection, and its ACK is far smaller than a segment: it comes whole."""
    if len(ack) != int.from_bytes(ack[:4]) or b"status=success\0" not in ack:
        raise RuntimeError(f"not a whole ACK of success: {ack!r}")
