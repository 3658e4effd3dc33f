"""`spark.read.format("qb")`: what a topic holds between two offsets, with filters where Spark hands them over."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import datasource as ds

from pyspark_qb.arrow.bounds import LEAST, MOST, Bounds
from pyspark_qb.options.spark_options import SourceOptions
from pyspark_qb.read.broker_logs import BrokerSlice, connected
from pyspark_qb.read.fetches import Fetches
from pyspark_qb.read.filters import PushedFilters, push
from pyspark_qb.read.query_offsets import OffsetRange, TopicPartition
from qb import BrokerClient
from tests.spark.source_tools import bodies, values
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.support.brokers import BrokerProcess

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(180)]
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[BrokerClient]:
    with BrokerClient(port=broker.port) as connected:
        yield connected


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[SparkSession]:
    """Spark with its filter pushdown switched on."""
    spark.conf.set(PUSHDOWN, "true")
    yield spark
    spark.conf.unset(PUSHDOWN)


def read(spark: SparkSession, servers: str, **options: Any) -> DataFrame:
    return spark.read.format("qb").options(servers=servers, subscribe="events", **options).load()


def test_a_batch_reads_what_lies_between_two_offsets(spark: SparkSession, servers: str, client: BrokerClient) -> None:
    client.create_topic("events", 2)
    for partition in (0, 1):
        client.publish_many("events", bodies(10 * partition, 10 * partition + 10), partition=partition)
    assert values(read(spark, servers).collect()) == [*range(20)]
    some = read(spark, servers, startingOffsets='{"events": {"0": 4}}', endingOffsets='{"events": {"0": 6, "1": 1}}')
    assert values(some.collect()) == [4, 5, 10]
    none = read(spark, servers, startingOffsets="latest")
    assert none.collect() == []


def test_a_batch_reads_what_was_appended_between_two_times(
    spark: SparkSession, servers: str, client: BrokerClient
) -> None:
    client.create_topic("events")
    client.publish_many("events", bodies(3), timestamp_ms=1)  # the publisher's time does not matter
    first = client.publish("events", b"3").timestamp
    wait_until(lambda: client.publish("events", b"100").timestamp > first)
    second = client.publish("events", b"4").timestamp
    wait_until(lambda: client.publish("events", b"100").timestamp > second)
    client.publish("events", b"101")
    since = read(spark, servers, startingTimestamp=str(first + 1)).collect()
    assert 3 not in values(since)
    assert 4 in values(since)
    start, end = (datetime.fromtimestamp(ms / 1000, UTC).isoformat() for ms in (first + 1, second + 1))
    between = values(read(spark, servers, startingTimestamp=start, endingTimestamp=end).collect())
    assert 4 in between
    assert 101 not in between
    assert values(read(spark, servers, endingTimestamp=str(first + 1)).collect())[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"endingOffsets": '{"events": {"0": 9}}'}, "holds the offsets from 0 up to 3, and 9 was asked for"),
        ({"startingOffsets": '{"events": {"5": 0}}'}, "offsets are given for events/5"),
        ({"subscribe": "evnets"}, "there is no topic 'evnets'; create it with"),
        ({"maxRowsPerTrigger": "5"}, "is for streams"),
        ({"startingOfsets": "earliest"}, "did you mean startingOffsets"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(
    spark: SparkSession, servers: str, client: BrokerClient, options: dict[str, str], problem: str
) -> None:
    client.create_topic("events")
    client.publish_many("events", bodies(3))
    with pytest.raises(PySparkException, match=problem):
        spark.read.format("qb").options(**{"servers": servers, "subscribe": "events"} | options).load().collect()


def test_only_the_columns_of_the_users_schema_are_read(spark: SparkSession, servers: str, client: BrokerClient) -> None:
    client.create_topic("events")
    client.publish("events", b"v", key="k")
    reader = spark.read.format("qb").options(servers=servers, subscribe="events")
    assert [row.asDict() for row in reader.schema("offset bigint, key string").load().collect()] == [
        {"offset": 0, "key": "k"}
    ]
    with pytest.raises((PySparkException, AnalysisException), match="column value is read as binary"):
        reader.schema("value string").load().collect()
    with pytest.raises((PySparkException, AnalysisException), match="no column 'price' to read; there are key, value"):
        reader.schema("price double").load().collect()


def test_properties_are_left_out_on_request(spark: SparkSession, servers: str, client: BrokerClient) -> None:
    client.create_topic("events")
    client.publish("events", b"v", color="red")
    assert read(spark, servers).columns[-1] == "properties"
    frame = read(spark, servers, includeProperties="false")
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp"]
    assert values([{"value": len(row["value"])} for row in frame.collect()]) == [1]


def test_filters_give_the_same_rows_with_and_without_pushdown(
    pushing: SparkSession, servers: str, client: BrokerClient
) -> None:
    client.create_topic("events", 3)
    for partition in range(3):
        for number in range(4):
            at = 1_700_000_000_000 + 1000 * number
            client.publish("events", b"%d" % (10 * partition + number), partition=partition, timestamp_ms=at)
    for condition, expected in {
        "partition = 1": [10, 11, 12, 13],
        "partition in (0, 2) and offset >= 3": [3, 23],
        "offset > 0 and offset <= 2 and partition < 1": [1, 2],
        "timestamp >= timestamp'2023-11-14 22:13:22Z' and partition > 1": [22, 23],
        "timestamp = timestamp'2023-11-14 22:13:21Z'": [1, 11, 21],
        "topic = 'events' and offset = 0 and value is not null": [0, 10, 20],
        "topic = 'other'": [],
        "offset in (0, 3) and not partition = 1": [0, 3, 20, 23],
        "key is not null": [],
    }.items():
        assert values(read(pushing, servers).where(condition).collect()) == expected, condition
    pushing.conf.set(PUSHDOWN, "false")
    assert values(read(pushing, servers).where("partition = 1 and offset > 1").collect()) == [12, 13]


def test_a_pushed_filter_decides_what_is_read_at_all(pushing: SparkSession, servers: str, client: BrokerClient) -> None:
    client.create_topic("events", 3)
    for partition in range(3):
        client.publish_many("events", bodies(4), partition=partition)
    assert read(pushing, servers).rdd.getNumPartitions() == 3
    assert read(pushing, servers).where("partition = 1").rdd.getNumPartitions() == 1
    assert read(pushing, servers).where("partition < 2 and offset > 1").rdd.getNumPartitions() == 2


MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
MICROS = int(MOMENT.timestamp()) * 1_000_000


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ds.EqualTo(("offset",), 7), PushedFilters(offsets=Bounds(7, 8))),
        (ds.GreaterThan(("offset",), 7), PushedFilters(offsets=Bounds(8, MOST))),
        (ds.LessThanOrEqual(("offset",), 7), PushedFilters(offsets=Bounds(LEAST, 8))),
        (ds.GreaterThanOrEqual(("timestamp",), MOMENT), PushedFilters(times=Bounds(MICROS, MOST))),
        (
            ds.LessThan(("timestamp",), MOMENT + timedelta(microseconds=1)),
            PushedFilters(times=Bounds(LEAST, MICROS + 1)),
        ),
        (ds.IsNotNull(("value",)), PushedFilters()),
        (ds.IsNotNull(("key",)), None),
        (ds.EqualTo(("key",), "a"), None),
        (ds.EqualTo(("properties", "topic"), "a"), None),
        (ds.LessThan(("timestamp",), MOMENT.replace(tzinfo=None)), None),
        (ds.In(("offset",), (1, 5)), None),
        (ds.Not(ds.EqualTo(("partition",), 1)), None),
    ],
)
def test_a_filter_is_taken_over_exactly_or_left_to_spark(given: ds.Filter, expected: PushedFilters | None) -> None:
    pushed, left = push([given])
    assert (pushed, left) == ((PushedFilters(), [given]) if expected is None else (expected, []))


def sized(sizes: list[int]) -> list[bytes]:
    return [b"%d" % number + b"." * size for number, size in enumerate(sizes)]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_messages_that_grow_and_shrink_are_all_fetched(
    broker: BrokerProcess, client: BrokerClient, compression: str | None
) -> None:
    sent = sized([10] * 30_000 + [400_000] * 25 + [0] * 5_000 + [9_000_000, 3])
    client.create_topic("events")
    client.publish_many("events", sent)
    whole = OffsetRange(TopicPartition("events", 0), 0, len(sent))
    found: list[bytes] = []
    options = SourceOptions((f"127.0.0.1:{broker.port}",), topics=("events",), compression=compression)
    for batch in BrokerSlice(whole, options).read(("value",), Bounds()):
        found += batch.column(0).to_pylist()
    assert found == sent


def test_a_restart_of_the_broker_amid_a_range_is_no_failure(broker: BrokerProcess, client: BrokerClient) -> None:
    sent = sized([1000] * 20_000)
    client.create_topic("events")
    client.publish_many("events", sent)
    reading = connected(SourceOptions((f"127.0.0.1:{broker.port}",)))
    offset, fetches = 0, 0
    for got in Fetches(reading, OffsetRange(TopicPartition("events", 0), 0, len(sent)), fail_on_data_loss=True):
        assert got.offset == offset
        offset, fetches = got.next_offset, fetches + 1
        if fetches in (1, 4):
            broker.restart()
    reading.disconnect()
    assert offset == len(sent)
    assert fetches > 4
