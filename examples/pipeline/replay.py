"""The messages of an archive, in their order, into a topic again; each of them once.

A stream cannot be sorted, but each of its batches can: foreachBatch writes it as a transaction that has the names of
query and batch, as the sink of a stream would, so that a batch which is repeated is recognised.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from examples.pipeline.archive import COLUMNS
from examples.pipeline.running import carry_out, stream_arguments, trigger

NAME = "examples.pipeline.replay"


def ordered(batch: DataFrame) -> DataFrame:
    """Return the messages so that one task has all of a partition, in the order of their offsets."""
    return batch.repartition("partition").sortWithinPartitions("partition", "offset")


def start(spark: SparkSession, arguments: Namespace) -> list[StreamingQuery]:
    """Start the query. It goes on with what is archived meanwhile, unless it is to end."""
    columns = ["key", "value", "timestamp", "properties", *([] if arguments.by_key else ["partition"])]

    def publish(batch: DataFrame, number: int) -> None:
        query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        writer = ordered(batch).select(*columns).write.format("qb").mode("append")
        writer = writer.options(servers=arguments.servers, topic=arguments.into)
        writer.options(txnId=f"replay:{query}", txnVersion=number).save()

    files = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", arguments.files_per_batch)
    rows = files.parquet(arguments.archive).where(f.col("topic") == arguments.topic)
    rows = rows.where(f.col("date").between(arguments.since, arguments.until))
    writer = rows.writeStream.foreachBatch(publish).trigger(**trigger(arguments))
    return [writer.option("checkpointLocation", arguments.checkpoint).queryName("replay").start()]


def parse(given: Sequence[str] | None = None) -> Namespace:
    """Return the arguments of the command line."""
    parser = stream_arguments(NAME, "Publish the archived messages of a topic again.")
    parser.add_argument("--archive", required=True, help="directory of the Parquet files")
    parser.add_argument("--topic", required=True, help="whose messages to take")
    parser.add_argument("--into", required=True, help="the topic that gets them")
    parser.add_argument("--since", default="1970-01-01", help="the first day")
    parser.add_argument("--until", default="9999-12-31", help="the last day")
    parser.add_argument("--by-key", action="store_true", help="let keys choose the partition: the topic has other ones")
    parser.add_argument("--files-per-batch", type=int, default=1000, help="at most (default: %(default)s)")
    return parser.parse_args(given)


if __name__ == "__main__":
    asked = parse()
    sys.exit(carry_out(start, asked, [asked.into]))
