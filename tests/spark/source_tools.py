"""What the tests of the source share: publishing, reading with Spark, and reading with the reader alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark_qb.arrow.bounds import Bounds
from pyspark_qb.read.logs import Slice
from pyspark_qb.read.source import stream_reader
from pyspark_qb.read.source_columns import COLUMNS, full_schema
from pyspark_qb.read.stream_reader import StreamReader
from qb import BrokerClient
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def bodies(*numbers: int) -> list[bytes]:
    """Return bodies that say where they belong: bodies(3) is 0, 1, 2, bodies(3, 5) is 3, 4."""
    return [b"%d" % number for number in range(*numbers)]


@contextmanager
def stream(servers: str, **options: Any) -> Iterator[StreamReader]:
    """Lend a stream reader as Spark makes it, without Spark."""
    texts = {"servers": servers, "subscribe": "events", **{name: str(value) for name, value in options.items()}}
    if "subscribePattern" in texts:
        del texts["subscribe"]
    reader = stream_reader(texts, full_schema(True))
    assert isinstance(reader, StreamReader)
    try:
        yield reader
    finally:
        reader.stop()


def offsets_in(slices: Iterable[Any]) -> list[tuple[str, int, int]]:
    """Return topic, partition and offset of every row that tasks would read."""
    found = []
    for each in slices:
        assert isinstance(each, Slice)
        for batch in each.read(tuple(COLUMNS), Bounds()):
            found += [(row["topic"], row["partition"], row["offset"]) for row in batch.to_pylist()]
    return found


def read_stream(spark: SparkSession, servers: str, **options: Any) -> DataFrame:
    """Return a streaming DataFrame of the topic `events`, unless the options say otherwise."""
    reader = spark.readStream.format("qb").option("servers", servers)
    if "subscribePattern" not in options:
        reader = reader.option("subscribe", "events")
    return reader.options(**options).load()


def run_available(spark: SparkSession, servers: str, directory: Path, **options: Any) -> StreamingQuery:
    """Read what there is into Parquet files in the directory, going on from its checkpoint; return when it is done."""
    return run_into(read_stream(spark, servers, **options), directory)


def run_into(frame: DataFrame, directory: Path) -> StreamingQuery:
    """Write what a stream has now into Parquet files; return when it is done. Raises what the query failed with."""
    query = (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(directory / "rows"))
    )
    try:
        assert query.awaitTermination(90), "the query did not end by itself"
    finally:
        query.stop()
    return query


def written(spark: SparkSession, directory: Path) -> list[Any]:
    """Return the rows that run_available() has written so far."""
    return spark.read.parquet(str(directory / "rows")).collect()


def values(rows: Iterable[Any]) -> list[int]:
    """Return the numbers in the bodies, sorted."""
    return sorted(int(row["value"]) for row in rows)


def drop_oldest(client: BrokerClient, topic: str, body: bytes = b"x" * 500) -> int:
    """Publish until retention has dropped something, for brokers with small segments; return the first offset left."""
    before = client.offsets(topic).first

    def dropped() -> bool:
        client.publish_many(topic, [body] * 20)
        return client.offsets(topic).first > before

    wait_until(dropped)
    return client.offsets(topic).first
