"""What do 1,000 connections cost that do nothing?

First a stretch without heartbeats, then a stretch with exactly one heartbeat for each connection, answered by it.
"""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack

from benchmarks.harness import (
    BenchmarkOptions,
    allow_files,
    cpu_seconds,
    greeted,
    judge,
    memory_megabytes,
    qb_server,
    report,
    scratch,
    significant,
)

NAME = "idle_connections"
CONNECTIONS = 1000
QUIET_SECONDS = 10
HEARTBEAT_INTERVAL = 20  # longer than connecting and the quiet stretch together
MEMORY_TARGET_MB = 30
CPU_TARGET_CORES = 0.01


def run(options: BenchmarkOptions) -> None:
    """Print the memory and the processor time of idle connections."""
    allow_files(CONNECTIONS + 200)
    settings = {"QB_HEARTBEAT_INTERVAL": str(HEARTBEAT_INTERVAL), "QB_MAX_CONNECTIONS": str(CONNECTIONS + 100)}
    with scratch(options) as directory, qb_server(directory / "qb", **settings) as server, ExitStack() as stack:
        greeted(server.port).close()  # whatever the first connection makes the server load is not the others' cost
        before = memory_megabytes(server.pid, "VmRSS")
        peers = [stack.enter_context(greeted(server.port)) for _ in range(CONNECTIONS)]
        grown = memory_megabytes(server.pid, "VmRSS") - before
        used = cpu_seconds(server.pid)
        time.sleep(QUIET_SECONDS)
        cores = (cpu_seconds(server.pid) - used) / QUIET_SECONDS
        report(
            NAME, f"qb/{CONNECTIONS}-connections/quiet", grown_mb=significant(grown), server_cores=significant(cores)
        )
        _judge(grown, cores)
        if not options.quick:
            used = cpu_seconds(server.pid)
            _answer_one_heartbeat_each(peers)
            cost = significant(cpu_seconds(server.pid) - used)
            report(NAME, f"qb/{CONNECTIONS}-connections/one-heartbeat-each", server_cpu_seconds=cost)


def _judge(grown: float, cores: float) -> None:
    idle = f"{CONNECTIONS:,} idle connections"
    judge(NAME, f"{idle}: less than {MEMORY_TARGET_MB} MB", grown, grown < MEMORY_TARGET_MB, "MB")
    judge(NAME, f"{idle}: no measurable CPU (below 1 % of a core)", cores, cores < CPU_TARGET_CORES, "cores")


def _answer_one_heartbeat_each(peers: list[socket.socket]) -> None:
    """Send each peer's first heartbeat back to the broker."""
    waiting = {peer.fileno(): peer for peer in peers}
    with select.epoll() as poll:
        for fd in waiting:
            poll.register(fd, select.EPOLLIN)
        while waiting:
            for fd, _ in poll.poll(2 * HEARTBEAT_INTERVAL):
                peer = waiting.pop(fd)
                peer.sendall(peer.recv(4096))
                poll.unregister(fd)
