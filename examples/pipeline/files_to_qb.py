"""Orders from JSON files, tidied, into a topic; each of them once."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from examples.pipeline.running import carry_out, stream_arguments, trigger

NAME = "examples.pipeline.files_to_qb"
ORDER = "id bigint, customer string, item string, price double, time timestamp"


def messages(files: DataFrame) -> DataFrame:
    """Return what is published: lines that are orders, keyed by customer, with the order's own time."""
    orders = files.where("id IS NOT NULL AND customer IS NOT NULL AND price >= 0 AND time IS NOT NULL")
    return orders.selectExpr(
        "customer AS key",
        "to_json(struct(id, customer, lower(trim(item)) AS item, price, time)) AS value",
        "time AS timestamp",
        "map('file', _metadata.file_name) AS properties",
    )


def start(spark: SparkSession, arguments: Namespace) -> list[StreamingQuery]:
    """Start the query: a micro-batch is one transaction, whatever dies meanwhile."""
    files = spark.readStream.schema(ORDER).option("maxFilesPerTrigger", arguments.files_per_batch).json(arguments.input)
    writer = messages(files).writeStream.format("qb").options(servers=arguments.servers, topic=arguments.topic)
    writer = writer.option("checkpointLocation", arguments.checkpoint).trigger(**trigger(arguments))
    return [writer.queryName("files to qb").start()]


def parse(given: Sequence[str] | None = None) -> Namespace:
    """Return the arguments of the command line."""
    parser = stream_arguments(NAME, "Publish orders from JSON files, one a line, as the files come.")
    parser.add_argument("--input", required=True, help="directory of the files")
    parser.add_argument("--topic", required=True, help="where the orders go")
    parser.add_argument("--files-per-batch", type=int, default=100, help="at most (default: %(default)s)")
    return parser.parse_args(given)


if __name__ == "__main__":
    asked = parse()
    sys.exit(carry_out(start, asked, [asked.topic]))
