"""`spark.readStream.format("qb")`: what comes into topics becomes rows, each once, across restarts."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from pyspark_qb.options.spark_errors import BadOption, DataLost
from pyspark_qb.read.query_offsets import TopicPartition, from_json
from qb import BrokerClient
from qb.clients.protocol.client_errors import BrokerUnavailable
from tests.spark.source_tools import (
    bodies,
    drop_oldest,
    offsets_in,
    read_stream,
    run_available,
    stream,
    values,
    written,
)
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.support.brokers import BrokerProcess

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(180)]
ALL = ReadAllAvailable()
EVENTS = TopicPartition("events", 0)


@pytest.fixture
def client(broker: BrokerProcess) -> Any:
    with BrokerClient(port=broker.port) as connected:
        yield connected


def test_a_message_becomes_a_row_with_all_that_is_known_of_it(
    spark: SparkSession, servers: str, client: BrokerClient, tmp_path: Path
) -> None:
    client.create_topic("events", 2)
    client.publish("events", b"\x00\xff", partition=1)
    client.publish("events", b"two", partition=1, key="k", timestamp_ms=1_700_000_000_123, color="grün", size="9")
    run_available(spark, servers, tmp_path, startingOffsets="earliest")
    first, second = sorted(written(spark, tmp_path), key=lambda row: row["offset"])
    assert (first["key"], bytes(first["value"]), first["properties"]) == (None, b"\x00\xff", {})
    assert second["timestamp"].replace(tzinfo=UTC) == datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC)
    assert second.asDict() == {
        "key": "k",
        "value": bytearray(b"two"),
        "topic": "events",
        "partition": 1,
        "offset": 1,
        "timestamp": second["timestamp"],
        "properties": {"color": "grün", "size": "9"},
    }


def test_a_restart_from_the_checkpoint_neither_loses_nor_repeats(
    spark: SparkSession, servers: str, client: BrokerClient, tmp_path: Path
) -> None:
    client.create_topic("events", 3)
    client.publish_many("events", bodies(30))
    run_available(spark, servers, tmp_path, startingOffsets="earliest")
    assert values(written(spark, tmp_path)) == [*range(30)]
    client.publish_many("events", bodies(30, 50))
    run_available(spark, servers, tmp_path, startingOffsets="latest")
    run_available(spark, servers, tmp_path, startingOffsets="latest")
    assert values(written(spark, tmp_path)) == [*range(50)]


def test_a_batch_that_failed_is_repeated_and_nothing_else(
    spark: SparkSession, servers: str, client: BrokerClient, tmp_path: Path
) -> None:
    """With `latest` Spark does not remember where the first batch began: the source has to."""
    client.create_topic("events")
    client.publish_many("events", bodies(10))
    seen: list[int] = []

    def fail(frame: DataFrame, batch: int) -> None:
        raise ValueError(f"batch {batch} fails")

    def keep(frame: DataFrame, batch: int) -> None:
        seen.extend(values(frame.collect()))

    def run(handle: Callable[[DataFrame, int], None]) -> None:
        frame = read_stream(spark, servers, startingOffsets="latest")
        writer = frame.writeStream.foreachBatch(handle).option("checkpointLocation", str(tmp_path))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination(90)

    with pytest.raises(StreamingQueryException, match="batch 0 fails"):
        run(fail)
    client.publish_many("events", bodies(10, 20))
    run(keep)
    assert seen == [*range(10, 20)]


def test_a_first_batch_that_is_repeated_begins_where_it_began(servers: str, client: BrokerClient) -> None:
    client.create_topic("events")
    client.publish_many("events", bodies(5))
    with stream(servers, startingOffsets="latest") as reader:
        start = reader.initialOffset()
        client.publish_many("events", bodies(5, 9))
        assert reader.initialOffset() == start
        end = reader.latestOffset(start, ALL)
    client.publish_many("events", bodies(9, 12))
    with stream(servers, startingOffsets="latest") as reader:
        again = reader.initialOffset()
        assert from_json(again) == {("events", 0): 12}
        assert offsets_in(reader.partitions(again, end)) == [("events", 0, n) for n in range(5, 9)]
        following = reader.latestOffset(end, ALL)
        assert offsets_in(reader.partitions(end, following)) == [("events", 0, n) for n in range(9, 12)]
        assert reader.latestOffset(following, ALL) == following


def test_a_batch_has_no_more_rows_than_it_may_and_spark_shows_what_is_left(
    spark: SparkSession, servers: str, client: BrokerClient, tmp_path: Path
) -> None:
    client.create_topic("events", 3)
    for partition, numbers in enumerate([(0, 20), (20, 25), (25, 26)]):
        client.publish_many("events", bodies(*numbers), partition=partition)
    query = run_available(spark, servers, tmp_path, startingOffsets="earliest", maxRowsPerTrigger="10")
    assert values(written(spark, tmp_path)) == [*range(26)]
    batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
    assert [progress["numInputRows"] for progress in batches] == [10, 10, 6]
    sources = [progress["sources"][0] for progress in batches]
    assert {source["latestOffset"] for source in sources} == {'{"events": {"0": 20, "1": 5, "2": 1}}'}
    reached = [sum(json.loads(source["endOffset"])["events"].values()) for source in sources]
    assert reached == [10, 20, 26]


def test_what_comes_after_available_now_was_asked_for_is_left_for_the_next_run(
    servers: str, client: BrokerClient
) -> None:
    client.create_topic("events", 2)
    client.publish_many("events", bodies(6))
    with stream(servers, startingOffsets="earliest") as reader:
        reader.prepareForTriggerAvailableNow()
        client.publish_many("events", bodies(6, 8))
        client.add_partitions("events", 3)
        client.publish("events", b"8", partition=2)
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadMaxRows(4))
        assert len(offsets_in(reader.partitions(start, end))) == 4
        last = reader.latestOffset(end, ReadMaxRows(4))
        assert len(offsets_in(reader.partitions(end, last))) == 2
        assert reader.latestOffset(last, ReadMaxRows(4)) == last


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [4, 2]),
        ({"startingOffsets": "latest"}, [4, 2]),
        ({"startingOffsets": "earliest"}, [0, 0]),
        ({"startingOffsets": '{"events": {"0": 3, "1": -2}}'}, [3, 0]),
        ({"startingOffsets": '{"events": {"0": -1}}'}, [4, 2]),
        ({"startingTimestamp": "@{second}"}, [2, 1]),
        ({"startingTimestamp": "2001-01-01T00:00:00Z"}, [0, 0]),
    ],
)
def test_a_query_starts_where_its_options_say(
    servers: str, client: BrokerClient, options: dict[str, str], expected: list[int]
) -> None:
    client.create_topic("events", 2)
    client.publish_many("events", bodies(2), partition=0)
    first = client.publish("events", b"x", partition=1).timestamp
    # On a quick disk several may have the time of the first one: those are not the ones to start with.
    wait_until(lambda: client.publish("events", b"y", partition=1).timestamp > first)
    later = client.offsets("events", 1).next - 1
    at = {name: value.format(second=first + 1) if "{s" in value else value for name, value in options.items()}
    client.publish_many("events", bodies(2, 4), partition=0)
    ends = [client.offsets("events", partition).next for partition in (0, 1)]
    with stream(servers, **at) as reader:
        offsets = from_json(reader.initialOffset())
    expected = [ends[p] if place == [4, 2][p] else place for p, place in enumerate(expected)]
    expected = [expected[0], later if expected[1] == 1 else expected[1]]
    assert [offsets["events", partition] for partition in (0, 1)] == expected  # type: ignore[index]


@pytest.mark.parametrize(
    ("offsets", "problem"),
    [
        ('{"events": {"0": 9}}', DataLost),
        ('{"events": {"4": 0}}', BadOption),
        ('{"other": {"0": 0}}', BadOption),
    ],
)
def test_a_place_that_there_is_not_is_refused(
    servers: str, client: BrokerClient, offsets: str, problem: type[Exception]
) -> None:
    client.create_topic("events")
    client.publish_many("events", bodies(3))
    with stream(servers, startingOffsets=offsets) as reader, pytest.raises(problem, match=r"events/0|events/4|other/0"):
        reader.initialOffset()


def test_several_topics_are_one_stream(servers: str, client: BrokerClient) -> None:
    for topic in ("events", "orders", "other"):
        client.create_topic(topic)
        client.publish(topic, topic.encode())
    with stream(servers, subscribe="orders,events", startingOffsets="earliest") as reader:
        start = reader.initialOffset()
        slices = reader.partitions(start, reader.latestOffset(start, ALL))
        assert offsets_in(slices) == [("events", 0, 0), ("orders", 0, 0)]


def test_added_partitions_and_topics_are_picked_up(servers: str, client: BrokerClient) -> None:
    client.create_topic("events-a")
    client.create_topic("not-events")
    client.publish_many("events-a", bodies(5))
    with stream(servers, subscribePattern="events-.*", startingOffsets="latest") as reader:
        start = reader.initialOffset()
        client.add_partitions("events-a", 2)
        client.create_topic("events-b")
        client.publish_many("events-a", bodies(2), partition=1)
        client.publish_many("events-b", bodies(1))
        end = reader.latestOffset(start, ALL)
        assert offsets_in(reader.partitions(start, end)) == [("events-a", 1, 0), ("events-a", 1, 1), ("events-b", 0, 0)]


def test_dropped_messages_fail_the_query_or_are_skipped(start_broker: Callable[..., BrokerProcess]) -> None:
    broker = start_broker(segment_bytes=4096, retention_bytes=8192, retention_interval=0.05)
    start = {"events": {"0": 3}}
    with BrokerClient(port=broker.port) as client:
        client.create_topic("events")
        client.publish_many("events", bodies(3))
        drop_oldest(client, "events")
    broker.stop()  # so that nothing more is dropped while this reads
    servers = f"127.0.0.1:{start_broker(segment_bytes=4096).port}"
    with stream(servers) as reader:
        slices = reader.partitions(start, reader.latestOffset(start, ALL))
        with pytest.raises(DataLost, match=r"messages 3 to \d+ of events/0 are gone.*failOnDataLoss"):
            offsets_in(slices)
    with stream(servers, failOnDataLoss=False, rowsPerPartition=7) as reader:
        end = reader.latestOffset(start, ALL)
        offsets = [offset for _, _, offset in offsets_in(reader.partitions(start, end))]
        assert offsets == [*range(offsets[0], from_json(end)[EVENTS])]
        assert offsets[0] > 3


@pytest.mark.parametrize("remake", [True, False])
def test_a_topic_that_is_gone_fails_the_query_or_is_left_out(servers: str, client: BrokerClient, remake: bool) -> None:
    client.create_topic("events")
    client.publish_many("events", bodies(5))
    start = {"events": {"0": 5}}
    client.delete_topic("events")
    if remake:
        client.create_topic("events")
        client.publish_many("events", bodies(2))
    with stream(servers) as reader, pytest.raises(Exception, match=r"it was made anew|there is no topic 'events'"):
        reader.latestOffset(start, ALL)
    with stream(servers, failOnDataLoss=False) as reader:
        end = reader.latestOffset(start, ALL)
        expected = [("events", 0, 0), ("events", 0, 1)] if remake else []
        assert offsets_in(reader.partitions(start, end)) == expected
        assert from_json(end) == ({("events", 0): 2} if remake else {})


def test_the_broker_shows_how_far_a_query_has_come(
    spark: SparkSession, servers: str, client: BrokerClient, tmp_path: Path
) -> None:
    client.create_topic("events", 2)
    client.publish_many("events", bodies(4), partition=0)
    run_available(spark, servers, tmp_path, startingOffsets="earliest")
    client.publish_many("events", bodies(3), partition=1)
    known = {each["partition"]: each for each in client.describe_group("spark-events")["partitions"]}
    assert (known[0]["committed"], known[0]["lag"]) == (4, 0)
    assert (known[1]["committed"], known[1]["lag"]) == (0, 3)


@pytest.mark.parametrize(
    ("options", "group"),
    [
        ({"groupId": "billing"}, "billing"),
        ({"subscribe": "events,orders"}, "spark-events-orders"),
        ({"subscribePattern": "(events|orders)-?.*"}, "spark-_events_orders_-_._"),
    ],
)
def test_the_group_of_a_query_is_named_after_what_it_reads(
    servers: str, client: BrokerClient, options: dict[str, str], group: str
) -> None:
    client.create_topic("events")
    client.create_topic("orders")
    with stream(servers, **options) as reader:
        reader.latestOffset(reader.initialOffset(), ALL)
    assert [each["group"] for each in client.list_groups()] == [group]


def test_a_query_goes_on_when_the_broker_refuses_its_progress(servers: str, client: BrokerClient) -> None:
    client.create_topic("events")
    with stream(servers, groupId="a group?") as reader:
        reader.commit({"events": {"0": 0}})
        reader.commit({"events": {"7": 9}})
    assert client.list_groups() == []


def test_a_large_batch_is_read_by_several_tasks(servers: str, client: BrokerClient) -> None:
    client.create_topic("events", 2)
    client.publish_many("events", bodies(10), partition=0)
    client.publish_many("events", bodies(3), partition=1)
    for options, expected in (
        ({}, [("events", 0, 10), ("events", 1, 3)]),
        ({"rowsPerPartition": 5}, [("events", 0, 5), ("events", 0, 5), ("events", 1, 3)]),
        ({"rowsPerPartition": 4}, [("events", 0, 3), ("events", 0, 3), ("events", 0, 4), ("events", 1, 3)]),
    ):
        with stream(servers, startingOffsets="earliest", **options) as reader:
            start = reader.initialOffset()
            slices = reader.partitions(start, reader.latestOffset(start, ALL))
            assert [(*each.range.partition, each.range.rows) for each in slices] == expected  # type: ignore[attr-defined]
            assert len(set(offsets_in(slices))) == 13
    with stream(servers, startingOffsets="earliest", minPartitions=6) as reader:
        start = reader.initialOffset()
        slices = reader.partitions(start, reader.latestOffset(start, ALL))
        assert len(slices) >= 6
        assert len(set(offsets_in(slices))) == 13


def test_a_topic_that_there_is_not_fails_the_query_in_the_brokers_words(
    spark: SparkSession, servers: str, tmp_path: Path
) -> None:
    with pytest.raises(StreamingQueryException, match="there is no topic 'events'; create it with"):
        run_available(spark, servers, tmp_path)


def test_a_broker_that_is_down_fails_the_query_in_time(broker: BrokerProcess, servers: str) -> None:
    broker.kill()
    with stream(servers, requestTimeout=0.5) as reader, pytest.raises(BrokerUnavailable, match=str(broker.port)):
        reader.initialOffset()


def test_a_running_query_outlives_a_restart_of_the_broker(
    spark: SparkSession, broker: BrokerProcess, servers: str, tmp_path: Path
) -> None:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("events")
        query = (
            read_stream(spark, servers, startingOffsets="earliest")
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start(str(tmp_path / "rows"))
        )
        try:
            client.publish_many("events", bodies(10))
            query.processAllAvailable()
            broker.restart()
            client.publish_many("events", bodies(10, 20))
            query.processAllAvailable()
        finally:
            query.stop()
    assert values(written(spark, tmp_path)) == [*range(20)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"path": "/somewhere", "subscribe": "a"}, "a stream needs option servers"),
        ({"servers": "h:1", "subscribe": "a", "endingOffsets": "latest"}, "a stream has no end"),
        ({"servers": "h:1", "subscribe": "a", "startingOffsets": "first"}, "startingOffsets must be earliest, latest"),
        ({"servers": "h:1", "subscribe": "a", "maxRowsPerTriger": "5"}, "did you mean maxRowsPerTrigger"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options: dict[str, str], problem: str) -> None:
    from pyspark_qb.read.source import stream_reader
    from pyspark_qb.read.source_columns import full_schema

    with pytest.raises(BadOption, match=problem):
        stream_reader(options, full_schema(True))
