"""What do exactly-once writing and reading cost a Spark query?

The same streaming query into `format("qb")`, exactly-once and fsynced, and into a Python Arrow sink that drops its
rows; the same rows read from the broker, from its files, and from a Python Arrow reader that has them in memory. Spark
and the broker share two cores, as on any small machine.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import (
    BenchmarkOptions,
    case_name,
    judge,
    median_ratio,
    qb_server,
    report_latency,
    report_rate,
    scratch,
    skipped,
    timed,
)
from qb import BrokerClient

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME = "spark"
SIZE = 100
CORES = 2
BATCHES = 5  # that count, of each query
SETTINGS = {"spark.ui.enabled": False, "spark.ui.showConsoleProgress": False, "spark.sql.shuffle.partitions": CORES}
SMALL_BATCH = 1_000  # rows, where the cost of a batch itself is measured


def run(options: BenchmarkOptions) -> None:
    """Print rows a second with their ratios, and what a micro-batch costs."""
    try:
        import pyspark_qb
        from benchmarks.spark_peers import NothingSource
    except ImportError as missing:
        skipped(NAME, case_name("qb", SIZE, "spark"), f"the extra `spark` is not installed: {missing}")
        return
    spark = pyspark_qb.session("benchmark", f"local[{CORES}]", **SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(NothingSource)
    try:
        with (
            scratch(options) as directory,
            qb_server(directory / "qb") as server,
            BrokerClient(port=server.port) as own,
        ):
            _sink(spark, own, directory, f"127.0.0.1:{server.port}", options)
            _source(spark, own, directory, f"127.0.0.1:{server.port}", options)
    finally:
        spark.stop()


# ---------------------------------------------------------------- writing


def _sink(spark: SparkSession, client: BrokerClient, directory: Path, servers: str, options: BenchmarkOptions) -> None:
    client.create_topic("sink", partitions=CORES)
    sinks = {"qb": {"servers": servers, "topic": "sink"}, "nothing": {}}
    rows = options.scaled(1_000_000)
    rates: dict[str, list[float]] = {name: [] for name in sinks}
    small: dict[str, list[float]] = {name: [] for name in sinks}
    for number in range(options.rounds):
        for name, settings in sinks.items():
            place = str(directory / f"checkpoint-{name}-{number}")
            rates[name].append(rows / statistics.median(batch_seconds(spark, name, settings, place, rows)))
            small[name] += batch_seconds(spark, name, settings, f"{place}-small", SMALL_BATCH)
    ratio = median_ratio(rates["qb"], rates["nothing"])
    report_rate(NAME, case_name("qb", SIZE, f"sink-exactly-once-{rows}-rows-a-batch"), SIZE, rates["qb"])
    report_rate(NAME, case_name("dropping-arrow-sink", SIZE, f"{rows}-rows-a-batch", "no"), SIZE, rates["nothing"])
    judge(NAME, "sink: at least 0.5 of the same query into a Python Arrow sink that drops", ratio, ratio >= 0.5)
    for name, seconds in small.items():
        report_latency(NAME, f"{name}/micro-batch of {SMALL_BATCH} rows", seconds)
    overhead = (statistics.median(small["qb"]) - statistics.median(small["nothing"])) * 1000
    judge(NAME, "micro-batch: at most 150 ms more than dropping", overhead, overhead <= 150, "ms")


def batch_seconds(spark: SparkSession, name: str, settings: dict[str, str], checkpoint: str, rows: int) -> list[float]:
    """Return how long each micro-batch took, but for the first, which starts the workers."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", CORES)
    values = source.load().selectExpr(f"lpad(cast(value AS string), {SIZE}, 'x') AS value")
    query = values.writeStream.format(name).options(**settings).option("checkpointLocation", checkpoint).start()
    try:
        while query.isActive and len(_full_batches(query, rows)) <= BATCHES:
            time.sleep(0.05)
        if error := query.exception():
            raise error
        return _full_batches(query, rows)[1 : BATCHES + 1]
    finally:
        query.stop()


def _full_batches(query: Any, rows: int) -> list[float]:
    return [
        progress["durationMs"]["triggerExecution"] / 1000
        for progress in query.recentProgress
        if progress["numInputRows"] == rows
    ]


# ---------------------------------------------------------------- reading


def _source(
    spark: SparkSession, client: BrokerClient, directory: Path, servers: str, options: BenchmarkOptions
) -> None:
    rows = options.scaled(2_000_000)
    client.create_topic("source", partitions=CORES)
    for partition in range(CORES):
        client.publish_many("source", [b"x" * SIZE] * (rows // CORES), partition=partition)
    from_memory = {"rows": str(rows), "size": str(SIZE), "splits": str(CORES)}
    tables: dict[str, Callable[[], DataFrame]] = {
        "qb": lambda: (
            spark.read.format("qb").options(servers=servers, subscribe="source", includeProperties="false").load()
        ),
        "memory": lambda: spark.read.format("nothing").options(**from_memory).load(),
    }
    rates: dict[str, list[float]] = {name: [] for name in tables}
    for _ in range(options.rounds + 1):
        for name, table in tables.items():
            rates[name].append(_rows_a_second(table, rows))
    ours, theirs = rates["qb"][1:], rates["memory"][1:]  # the first round starts the workers
    ratio = median_ratio(ours, theirs)
    report_rate(NAME, case_name("qb", SIZE, "source"), SIZE, ours)
    report_rate(NAME, case_name("arrow-reader-from-memory", SIZE, "source", "no"), SIZE, theirs)
    judge(NAME, "source: at least 0.5 of a Python Arrow reader from memory", ratio, ratio >= 0.5)
    _direct(spark, client, directory, rows, options)


def _direct(spark: SparkSession, client: BrokerClient, directory: Path, rows: int, options: BenchmarkOptions) -> None:
    """Read a copy of the data directory: the broker goes on with its own."""
    shutil.copytree(directory / "qb", directory / "copy")
    client.disconnect()

    def table() -> DataFrame:
        reader = spark.read.format("qb").option("path", str(directory / "copy")).option("subscribe", "source")
        return reader.option("includeProperties", "false").load()

    rates = [_rows_a_second(table, rows) for _ in range(options.rounds + 1)][1:]
    report_rate(NAME, case_name("qb", SIZE, f"direct-files-local[{CORES}]"), SIZE, rates)
    rate = statistics.median(rates)
    judge(NAME, "direct file reading: at least 800,000 rows/s", rate, rate >= 800_000, "rows/s")


def _rows_a_second(table: Callable[[], DataFrame], rows: int) -> float:
    """Return the rate at which Spark takes the whole table; Spark's own `noop` takes it from there."""
    return rows / timed(lambda: table().write.format("noop").mode("overwrite").save())
