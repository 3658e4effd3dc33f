"""Topics into Parquet files, by topic, date and partition; each message once.

A batch makes one file a partition and day, so few and long batches make few and large files: hence `--every`.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from examples.pipeline.running import carry_out, read_topics, stream_arguments, trigger

NAME = "examples.pipeline.archive"
FOLDERS = ("topic", "date", "partition")
COLUMNS = (
    "key string, value binary, offset bigint, timestamp timestamp, properties map<string,string>, "
    "topic string, date date, partition int"
)


def dated(topics: DataFrame) -> DataFrame:
    """Return the messages with the day, in UTC, on which their publishers say that they were published."""
    return topics.selectExpr("*", "to_date(timestamp) AS date")


def start(spark: SparkSession, arguments: Namespace) -> list[StreamingQuery]:
    """Start the query. The directory's own log shows readers which files count, so that none counts twice."""
    topics = read_topics(spark, arguments, arguments.topic, "archive", maxRowsPerTrigger=arguments.rows_per_batch)
    writer = dated(topics).writeStream.format("parquet").partitionBy(*FOLDERS).trigger(**trigger(arguments))
    writer = writer.option("compression", "zstd").option("checkpointLocation", arguments.checkpoint)
    return [writer.queryName("archive").start(arguments.archive)]


def parse(given: Sequence[str] | None = None) -> Namespace:
    """Return the arguments of the command line."""
    parser = stream_arguments(NAME, "Archive topics as Parquet files.", every=60)
    parser.add_argument("--topic", required=True, help="the topic, or several with commas between them")
    parser.add_argument("--archive", required=True, help="directory of the Parquet files")
    parser.add_argument("--rows-per-batch", type=int, default=2_000_000, help="at most (default: %(default)s)")
    return parser.parse_args(given)


if __name__ == "__main__":
    asked = parse()
    sys.exit(carry_out(start, asked, asked.topic.split(",")))
