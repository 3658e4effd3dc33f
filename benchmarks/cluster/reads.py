"""Is a cell's owner as fast as a local broker for those who read, and for Spark?

The same backlog delivered to a handler and fetched, and the same streaming query written exactly once, at a local
broker and at a cell. The sides take turns, round by round.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.cluster.cell import NAME, Cell
from benchmarks.deliver import WINDOW, handle
from benchmarks.harness import BenchmarkOptions, case_name, judge, median_ratio, qb_server, report_rate, skipped
from benchmarks.journal import FSYNC
from benchmarks.pull import fetch_all
from benchmarks.spark import CORES, SETTINGS, batch_seconds
from qb import BrokerClient

SIZE = 100
PORTION = 8_000  # messages asked for at once
LOCAL = "fsync-before-ack"
Rates = dict[str, list[float]]  # of the cell, and of the local broker


def compare(options: BenchmarkOptions, directory: Path, cell: Cell) -> None:
    """Print the rates of both sides, and their ratios."""
    with (
        qb_server(directory / "local") as server,
        BrokerClient(port=server.port) as local,
        cell.client() as replicated,
    ):
        clients = {"cell": replicated, "local": local}
        _read(options, clients)
        _spark(options, directory, clients, {"cell": ",".join(cell.addresses), "local": f"127.0.0.1:{server.port}"})


def _read(options: BenchmarkOptions, clients: dict[str, BrokerClient]) -> None:
    count = options.scaled(500_000)
    for client in clients.values():
        client.create_topic("backlog")
        client.publish_many("backlog", [b"x" * SIZE] * count)
    delivered: Rates = {name: [] for name in clients}
    fetched: Rates = {name: [] for name in clients}
    for number in range(options.rounds):
        for name, client in clients.items():
            delivered[name].append(handle(client, f"handler-{number}", "handler", count, WINDOW))
            fetched[name].append(fetch_all(client, count, PORTION))
    _report(delivered, f"handler-window-{WINDOW}", "deliver", 0.9)
    _report(fetched, f"fetch-{PORTION}", "fetch", 0.9)


def _spark(
    options: BenchmarkOptions, directory: Path, clients: dict[str, BrokerClient], servers: dict[str, str]
) -> None:
    try:
        import pyspark_qb
    except ImportError as missing:
        skipped(NAME, case_name("cell", SIZE, "spark-sink"), f"the extra `spark` is not installed: {missing}")
        return
    for client in clients.values():
        client.create_topic("sink", partitions=CORES)
    spark = pyspark_qb.session("benchmark", f"local[{CORES}]", **SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    rows = options.scaled(500_000)
    rates: Rates = {name: [] for name in clients}
    try:
        for number in range(options.rounds):
            for name in clients:
                sink = {"servers": servers[name], "topic": "sink"}
                place = str(directory / f"checkpoint-{name}-{number}")
                rates[name].append(rows / statistics.median(batch_seconds(spark, "qb", sink, place, rows)))
    finally:
        spark.stop()
    _report(rates, f"spark-sink-exactly-once-{rows}-rows-a-batch", "Spark sink", 0.3)


def _report(rates: Rates, case: str, what: str, least: float) -> None:
    report_rate(NAME, case_name("cell", SIZE, case, FSYNC), SIZE, rates["cell"])
    report_rate(NAME, case_name("local", SIZE, case, LOCAL), SIZE, rates["local"])
    ratio = median_ratio(rates["cell"], rates["local"])
    judge(NAME, f"{what} at least {least} of local", ratio, ratio >= least)
