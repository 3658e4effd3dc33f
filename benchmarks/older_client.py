"""Is the async client on trio as quick as that of an older checkout (`--before DIRECTORY`)?

Each round is a process of its own, which takes the clients from one of the two checkouts and does the works of
async_clients, each for one to two seconds. The broker is the same for both, and they take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from benchmarks.async_clients import BODIES, SIZE, WORKS, QBSide, Setting, one_round
from benchmarks.harness import (
    PROJECT,
    BenchmarkOptions,
    case_name,
    judge,
    median_ratio,
    qb_server,
    report_rate,
    scratch,
    skipped,
)

NAME = "older_client"
TARGET = 0.9  # of the older client's rate


class LongSide(QBSide):
    """The same with more messages: a round of 0.2 s says more of the moment than of the client."""

    counts = 2_000_000, 4_000, 48_000, 1_600_000

    @classmethod
    @asynccontextmanager
    async def opened(cls, port: int, topic: str) -> AsyncIterator[QBSide]:
        async with super().opened(port, topic) as side:
            yield side
            await side._client.delete_subscription(topic)
            await side._client.delete_topic(topic)

    async def publish_all(self, count: int, depth: int) -> None:
        for start in range(0, count, len(BODIES)):
            await super().publish_all(min(len(BODIES), count - start), depth)


def run(options: BenchmarkOptions) -> None:
    """Let both checkouts take turns, then print each and the ratio."""
    if options.before is None:
        skipped(NAME, case_name("qb-trio", SIZE, "all"), "no --before")
        return
    checkouts = {"qb-trio-now": PROJECT, "qb-trio-before": options.before}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    with scratch(options) as directory, qb_server(directory / "qb") as broker:
        for number in range(options.rounds):
            for name, checkout in checkouts.items():
                topic = f"{name}-{number}"
                rounds[name].append(_round_of(checkout, broker.port, topic, options.quick))
    for work in WORKS:
        now, before = ([each[work] for each in rounds[name]] for name in checkouts)
        for name, rates in zip(checkouts, (now, before), strict=True):
            report_rate(NAME, case_name(name, SIZE, work), SIZE, rates)
        ratio = median_ratio(now, before)
        judge(NAME, f"{work}: at least {TARGET} of the older client", ratio, ratio >= TARGET)


def _round_of(checkout: Path, port: int, topic: str, quick: bool) -> dict[str, float]:
    """Return the rate of each work with the clients of a checkout."""
    command = [sys.executable, "-m", "benchmarks.older_client", str(port), topic, "quick" if quick else "full"]
    environment = os.environ | {"PYTHONPATH": f"{checkout / 'src'}"}
    done = subprocess.run(command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    rates: dict[str, float] = json.loads(done.stdout)
    return rates


def main() -> None:
    """Do one round with the clients that are found first, and print the rates."""
    port, topic, size = sys.argv[1:]
    options = BenchmarkOptions(PROJECT, size == "quick", 1)
    figures = trio.run(partial(one_round, partial(LongSide.opened, int(port)), topic, Setting(0, 0), options))
    print(json.dumps({work: figure.rate for work, figure in figures.items()}))


if __name__ == "__main__":
    main()
