"""Orders from a topic, summed up by item and span of time, into Parquet and another topic.

A span is done when the newest order is later than its end by what `--late` allows; only then it is written, once.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from examples.pipeline.files_to_qb import ORDER
from examples.pipeline.running import carry_out, read_topics, stream_arguments, trigger

NAME = "examples.pipeline.windows"


def totals(topic: DataFrame, window: str, late: str) -> DataFrame:
    """Return a row for each item and span of time that is over: how many orders there were, and their sum."""
    orders = topic.select(f.from_json(f.col("value").cast("string"), ORDER).alias("order")).select("order.*")
    spans = orders.withWatermark("time", late).groupBy(f.window("time", window), "item")
    summed = spans.agg(f.count("*").alias("orders"), f.round(f.sum("price"), 2).alias("total"))
    return summed.selectExpr("window.start AS since", "window.end AS until", "item", "orders", "total")


def messages(totals: DataFrame) -> DataFrame:
    """Return the rows as they are published."""
    return totals.selectExpr("item AS key", "to_json(struct(*)) AS value", "until AS timestamp")


def start(spark: SparkSession, arguments: Namespace) -> list[StreamingQuery]:
    """Start two queries. Each is exactly-once by itself and has a checkpoint of its own."""

    def begin(name: str, format: str, rows: DataFrame, **options: str) -> StreamingQuery:
        writer = rows.writeStream.format(format).options(**options).trigger(**trigger(arguments))
        return writer.option("checkpointLocation", f"{arguments.checkpoint}/{format}").queryName(name).start()

    def summed(group: str) -> DataFrame:
        return totals(read_topics(spark, arguments, arguments.topic, group), arguments.window, arguments.late)

    return [
        begin("totals to parquet", "parquet", summed("totals-to-parquet"), path=arguments.output),
        begin("totals to qb", "qb", messages(summed("totals-to-qb")), servers=arguments.servers, topic=arguments.into),
    ]


def parse(given: Sequence[str] | None = None) -> Namespace:
    """Return the arguments of the command line."""
    parser = stream_arguments(NAME, "Sum up the orders of a topic by item and span of time.")
    parser.add_argument("--topic", required=True, help="where the orders are")
    parser.add_argument("--output", required=True, help="directory of the Parquet files")
    parser.add_argument("--into", required=True, help="the topic for the totals")
    parser.add_argument("--window", default="1 minute", help="how long a span is (default: %(default)s)")
    parser.add_argument("--late", default="30 seconds", help="how late an order may come (default: %(default)s)")
    return parser.parse_args(given)


if __name__ == "__main__":
    asked = parse()
    sys.exit(carry_out(start, asked, [asked.topic, asked.into]))
