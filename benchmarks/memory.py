"""How much memory does the server hold while 2 GB go through it?"""

from __future__ import annotations

from benchmarks.harness import (
    BenchmarkOptions,
    case_name,
    judge,
    memory_megabytes,
    qb_server,
    report,
    scratch,
    significant,
    timed,
)
from qb import BrokerClient

NAME = "memory"
SIZE = 1024
MESSAGES = 2_000_000
AT_ONCE = 50_000  # a call of publish_many: what the client holds, not the server
TARGET_MB = 150


def run(options: BenchmarkOptions) -> None:
    """Print the server's memory before and at its peak."""
    bodies = [b"x" * SIZE] * AT_ONCE
    calls = options.scaled(MESSAGES) // AT_ONCE
    with scratch(options) as directory, qb_server(directory / "qb") as server:
        before = memory_megabytes(server.pid, "VmRSS")
        with BrokerClient(port=server.port) as client:
            client.create_topic("bench")
            seconds = timed(lambda: [client.publish_many("bench", bodies) for _ in range(calls)])
        peak = memory_megabytes(server.pid, "VmHWM")
    report(
        NAME,
        case_name("qb", SIZE, "publish_many"),
        gigabytes=calls * AT_ONCE * SIZE / 1e9,
        seconds=significant(seconds),
        before_mb=significant(before),
        peak_mb=significant(peak),
    )
    judge(NAME, f"resident memory below {TARGET_MB} MB while 2 GB go through", peak, peak < TARGET_MB, "MB")
