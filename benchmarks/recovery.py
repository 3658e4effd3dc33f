"""How long after kill -9 does a broker with 5 million messages serve again, and one with 10,000 partitions?

The clock runs from the start of the process to its first answer to a peer, with the files in the page cache, and
again after they were evicted from it.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.harness import BenchmarkOptions, judge, memory_megabytes, qb_server, report, scratch, significant
from qb import BrokerClient

NAME = "recovery"
SIZE = 100
MESSAGES = 5_000_000
AT_ONCE = 250_000
TOPICS, PARTITIONS = 10, 1_000
TARGET_SECONDS = 60


def run(options: BenchmarkOptions) -> None:
    """Fill a data directory, kill its broker, and print the seconds to serve again, warm and cold."""
    messages = options.scaled(MESSAGES)
    with scratch(options) as directory:
        data_dir = directory / "qb"
        bodies = [b"x" * SIZE] * AT_ONCE
        with qb_server(data_dir) as server, BrokerClient(port=server.port) as client:
            client.create_topic("bench")
            for _ in range(messages // AT_ONCE):
                client.publish_many("bench", bodies)
            server.process.kill()
        warm = _open(data_dir, messages, "warm")
        _evict(data_dir)
        slower = max(warm, _open(data_dir, messages, "cold"))
        _open_partitions(directory / "wide", max(1, options.scaled(TOPICS)))
    judge(NAME, f"{messages:,} messages: seconds, not minutes", slower, slower < TARGET_SECONDS, "seconds")


def _open(data_dir: Path, messages: int, cache: str) -> float:
    """Start a broker on the directory; returns the seconds until it serves every message."""
    with qb_server(data_dir) as server, BrokerClient(port=server.port) as client:
        described = client.describe_topic("bench")
    if described["messages"] != messages:
        raise RuntimeError(f"{messages} messages were acked and {described['messages']} recovered")
    case = f"qb/{SIZE}B/{messages}-messages/after-kill-9/{cache}-page-cache"
    report(NAME, case, seconds=significant(server.seconds_to_ready), log_bytes=described["bytes"])
    return server.seconds_to_ready


def _open_partitions(data_dir: Path, topics: int) -> None:
    """Print how long a broker with many partitions takes to serve again, and its memory then."""
    with qb_server(data_dir) as server, BrokerClient(port=server.port) as client:
        for number in range(topics):
            client.create_topic(f"topic-{number}", partitions=PARTITIONS)
            client.publish_many(f"topic-{number}", [b"x" * SIZE] * PARTITIONS)
        server.process.kill()
    with qb_server(data_dir) as server, BrokerClient(port=server.port) as client:
        client.describe_topic("topic-0")
        memory = memory_megabytes(server.process.pid, "VmRSS")
    case = f"qb/{topics * PARTITIONS}-partitions/after-kill-9/warm-page-cache"
    report(NAME, case, seconds=significant(server.seconds_to_ready), memory_mb=significant(memory))


def _evict(data_dir: Path) -> None:
    """Drop the directory's files from the page cache."""
    os.sync()
    for path in (each for each in data_dir.rglob("*") if each.is_file()):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
