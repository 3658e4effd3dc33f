"""Rows of any DataFrame reach their topics, each once, or the query fails with the reason and nothing is published."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from qb.core.wire.frames import Frame
from tests.support.brokers import BrokerProcess
from tests.support.peers import Peer

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(120)]


class Topics:
    """The topics of a real broker, and what they hold."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.servers = f"127.0.0.1:{broker.port}"
        self._broker = broker
        self._partitions: dict[str, int] = {}

    def create(self, topic: str, partitions: int = 1) -> None:
        with Peer(self._broker.port) as peer:
            peer.create_topic(topic, partitions=str(partitions))
        self._partitions[topic] = partitions

    def partitions(self, topic: str) -> list[list[Frame]]:
        with self._fast_peer() as peer:
            return [peer.messages(topic, partition) for partition in range(self._partitions[topic])]

    def bodies(self, topic: str) -> list[str]:
        """Every body of a topic as text, sorted."""
        return sorted(message.body.decode() for messages in self.partitions(topic) for message in messages)

    def open_stages(self) -> list[dict[str, Any]]:
        with self._fast_peer() as peer:
            stages: list[dict[str, Any]] = peer.call("list_transactions")["stages"]
            return stages

    def _fast_peer(self) -> Peer:
        peer = Peer(self._broker.port)
        peer.hello()
        return peer


@pytest.fixture
def topics(broker: BrokerProcess) -> Topics:
    return Topics(broker)


@pytest.fixture(scope="module")
def shared_topics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topics]:
    """A broker that takes messages of 1,000 bytes, for many tests that leave its topic empty."""
    broker = BrokerProcess(tmp_path_factory.mktemp("shared"), max_message_size=1000)
    topics = Topics(broker)
    topics.create("events", 2)
    yield topics
    broker.kill()


def save(df: DataFrame, servers: str, **options: Any) -> None:
    df.write.format("qb").option("servers", servers).options(**options).mode("append").save()


def numbers(spark: SparkSession, count: int, tasks: int = 2) -> DataFrame:
    return spark.range(0, count, 1, tasks).selectExpr("cast(id as string) AS value")


def texts(count: int) -> list[str]:
    return sorted(map(str, range(count)))


class Files:
    """A stream that a test feeds file by file: each is one micro-batch of lines."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self._spark, self._input, self.checkpoint = spark, directory / "input", directory / "checkpoint"
        self._input.mkdir()

    def add(self, *lines: str) -> None:
        name = f"{len(list(self._input.iterdir())):03}"
        (self._input / f".{name}").write_text("".join(f"{line}\n" for line in lines))
        (self._input / f".{name}").rename(self._input / name)

    def read(self) -> DataFrame:
        return self._spark.readStream.option("maxFilesPerTrigger", 1).text(str(self._input))

    def run(self, df: DataFrame, servers: str, **options: Any) -> None:
        """Publish all that is there, and return. Raises what the query fails with."""
        writer = df.writeStream.format("qb").option("servers", servers).options(**options)
        query = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()

    def forget_commit(self) -> None:
        """Have Spark run the last batch again, as after a crash between the sink's commit and Spark's own."""
        commits = self.checkpoint / "commits"
        last = max((path for path in commits.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
        (commits / f".{last.name}.crc").unlink()
        last.unlink()


@pytest.fixture
def files(spark: SparkSession, tmp_path: Path) -> Files:
    return Files(spark, tmp_path)


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_batch_write_publishes_every_row_once(spark: SparkSession, topics: Topics, delivery: str) -> None:
    topics.create("events", 3)
    save(numbers(spark, 1000, tasks=4), topics.servers, topic="events", delivery=delivery)
    assert topics.bodies("events") == texts(1000)
    assert all(topics.partitions("events")), "no partition is left empty"
    assert topics.open_stages() == []


def test_every_column_says_what_its_name_says(spark: SparkSession, topics: Topics) -> None:
    topics.create("one", 2)
    topics.create("two", 2)
    df = spark.sql("""
        SELECT * FROM VALUES
            (X'61', 'k1', 1, timestamp'2026-01-31 12:00:00.123456', map('colour', 'red', 'size', null), 'one'),
            (X'00ff', null, 0, null, null, 'two'),
            (X'63', 'k2', null, null, map(), null)
        AS (value, key, partition, timestamp, properties, topic)
    """)
    save(df, topics.servers, topic="two")
    (no_messages, (first,)), second_topic = topics.partitions("one"), topics.partitions("two")
    assert no_messages == []
    assert (first.body, first.timestamp) == (b"a", 1_769_860_800_123)
    assert first.properties == {"topic": "one", "key": "k1", "colour": "red"}
    messages = {message.body: message for messages in second_topic for message in messages}
    assert messages.keys() == {b"\x00\xff", b"c"}
    assert messages[b"\x00\xff"] in second_topic[0]
    assert messages[b"\x00\xff"].properties == {"topic": "two"}
    assert messages[b"\x00\xff"].timestamp > 1_769_860_800_123, "the time of publishing"
    assert messages[b"c"].properties == {"topic": "two", "key": "k2"}


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_key_goes_where_every_other_client_would_send_it(
    spark: SparkSession, topics: Topics, broker: BrokerProcess, delivery: str
) -> None:
    topics.create("keyed", 5)
    keyed = spark.range(100).selectExpr("cast(id as string) AS value", "concat('k', id % 20) AS key")
    save(keyed, topics.servers, topic="keyed", delivery=delivery)
    with Peer(broker.port) as peer:
        for number in range(100):
            peer.publish("keyed", b"", key=f"k{number % 20}")
    partitions_of: dict[str, set[int]] = {}
    for place, messages in enumerate(topics.partitions("keyed")):
        for message in messages:
            partitions_of.setdefault(message.properties["key"], set()).add(place)
    assert len(partitions_of) == 20
    assert all(len(where) == 1 for where in partitions_of.values())
    assert topics.bodies("keyed") == sorted([""] * 100 + texts(100))


def test_without_a_value_column_whole_rows_are_published_as_json(spark: SparkSession, topics: Topics) -> None:
    topics.create("json")
    df = spark.sql("SELECT id, id * 1.5 AS price, null AS nothing, named_struct('a', array(id)) AS deep FROM range(2)")
    save(df, topics.servers, topic="json")
    rows = [msgspec.json.decode(body) for body in topics.bodies("json")]
    assert rows == [
        {"id": 0, "price": 0, "nothing": None, "deep": {"a": [0]}},
        {"id": 1, "price": 1.5, "nothing": None, "deep": {"a": [1]}},
    ]
    save(numbers(spark, 1), topics.servers, topic="json", valueFormat="json")
    assert '{"value":"0"}' in topics.bodies("json")


def test_an_empty_dataframe_publishes_nothing(spark: SparkSession, topics: Topics) -> None:
    topics.create("events")
    save(numbers(spark, 10).where("value = 'x'"), topics.servers, topic="events")
    save(spark.createDataFrame([], "value string"), topics.servers, topic="events")
    assert topics.bodies("events") == []


def test_a_named_write_is_published_once_however_often_it_is_repeated(spark: SparkSession, topics: Topics) -> None:
    topics.create("events")
    for _ in range(2):
        save(numbers(spark, 10), topics.servers, topic="events", txnId="load-2026-01")
    assert topics.bodies("events") == texts(10)
    save(numbers(spark, 10), topics.servers, topic="events", txnId="load-2026-02")
    assert len(topics.bodies("events")) == 20


def test_a_stream_publishes_each_batch_once_and_goes_on_after_a_restart(files: Files, topics: Topics) -> None:
    topics.create("events", 2)
    files.add("a", "b")
    files.add("c")
    files.run(files.read().repartition(2), topics.servers, topic="events")
    files.add("d")
    files.run(files.read(), topics.servers, topic="events")
    assert topics.bodies("events") == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("delivery", "times"), [("exactly-once", 1), ("at-least-once", 2)])
def test_a_replayed_batch_is_recognised_unless_delivery_is_at_least_once(
    files: Files, topics: Topics, delivery: str, times: int
) -> None:
    topics.create("events", 2)
    lines = [f"row {number}" for number in range(20)]
    files.add(*lines)
    files.run(files.read(), topics.servers, topic="events", delivery=delivery)
    files.forget_commit()
    files.run(files.read().repartition(3), topics.servers, topic="events", delivery=delivery)
    assert topics.bodies("events") == sorted(lines * times)
    assert topics.open_stages() == []


def test_several_writes_in_one_foreach_batch_are_each_published_once(files: Files, topics: Topics) -> None:
    topics.create("all")
    topics.create("long")
    attempts = []

    def publish(batch: DataFrame, number: int) -> None:
        attempts.append(number)
        save(batch, topics.servers, topic="all", txnId="words-all", txnVersion=number)
        save(batch.where("length(value) > 3"), topics.servers, topic="long", txnId="words-long", txnVersion=number)
        if len(attempts) == 1:
            raise RuntimeError("killed before Spark heard of it")

    def run() -> None:
        writer = files.read().writeStream.foreachBatch(publish).option("checkpointLocation", str(files.checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    files.add("tea", "coffee")
    files.add("cocoa")
    with pytest.raises(PySparkException, match="killed before Spark heard of it"):
        run()
    run()
    assert attempts == [0, 0, 1]
    assert topics.bodies("all") == ["cocoa", "coffee", "tea"]
    assert topics.bodies("long") == ["cocoa", "coffee"]


@pytest.mark.parametrize(
    ("sql", "options", "words"),
    [
        ("SELECT id AS value FROM range(2)", {}, "column 'value' must be string or binary, not bigint"),
        ("SELECT 'x' AS value, 'y' AS colour", {}, "column 'colour' has no meaning beside value"),
        ("SELECT 'x' AS value, map('a', 1) AS properties", {}, "must be map<string,string>, not map<string,int>"),
        ("SELECT 'x' AS value", {"topik": "events"}, "there is no option 'topik' for writing; did you mean topic?"),
        ("SELECT 'x' AS value", {"delivery": "twice"}, "option delivery must be one of exactly-once, at-least-once"),
        ("SELECT 'x' AS value", {"txnVersion": "1"}, "give txnId too"),
        ("SELECT 'x' AS value", {"topic": "nowhere"}, "there is no topic 'nowhere'; create it with"),
        ("SELECT cast(null as string) AS value", {}, "column value is null"),
        ("SELECT 'x' AS value, 7 AS partition", {}, "topic 'events' has no partition 7; it has 0 to 1"),
        ("SELECT repeat('x', 2000) AS value", {}, "a body of 2000 bytes is over this broker's limit of 1000"),
    ],
)
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_what_cannot_be_published_fails_with_the_reason_and_publishes_nothing(
    spark: SparkSession,
    shared_topics: Topics,
    sql: str,
    options: dict[str, str],
    words: str,
    delivery: str,
) -> None:
    settings = {"topic": "events", "delivery": delivery} | options
    with pytest.raises(PySparkException) as failed:
        save(spark.sql(sql), shared_topics.servers, **settings)
    assert words in str(failed.value)
    assert shared_topics.bodies("events") == []
    assert shared_topics.open_stages() == []


def test_a_value_of_exactly_the_limit_is_published(
    spark: SparkSession, start_broker: Callable[..., BrokerProcess]
) -> None:
    topics = Topics(start_broker(max_message_size=1000))
    topics.create("events")
    for delivery in ("exactly-once", "at-least-once"):
        save(spark.sql("SELECT repeat('x', 1000) AS value"), topics.servers, topic="events", delivery=delivery)
    assert topics.bodies("events") == ["x" * 1000] * 2


def test_one_bad_row_among_many_tasks_publishes_nothing(spark: SparkSession, topics: Topics) -> None:
    topics.create("events")
    df = spark.range(0, 40_000, 1, 4).selectExpr("if(id = 39999, null, cast(id as string)) AS value")
    with pytest.raises(PySparkException, match="column value is null"):
        save(df, topics.servers, topic="events")
    assert topics.bodies("events") == []


def test_a_topic_cannot_be_overwritten(spark: SparkSession, topics: Topics) -> None:
    topics.create("events")
    writer = numbers(spark, 1).write.format("qb").options(servers=topics.servers, topic="events")
    with pytest.raises(PySparkException, match="a topic cannot be overwritten, only appended to"):
        writer.mode("overwrite").save()


def test_a_streaming_query_fails_in_the_words_of_the_broker(files: Files, topics: Topics) -> None:
    files.add("a")
    with pytest.raises(PySparkException, match="there is no topic 'nowhere'; create it with"):
        files.run(files.read(), topics.servers, topic="nowhere")
    with pytest.raises(PySparkException, match="option txnId is for batch writes"):
        files.run(files.read(), topics.servers, topic="nowhere", txnId="a")


def test_update_mode_is_refused_and_complete_mode_publishes_the_whole_result_again(
    files: Files, topics: Topics
) -> None:
    topics.create("counts")
    counts = files.read().groupBy("value").count().selectExpr("concat(value, ' ', count) AS value")

    def run(mode: str) -> None:
        writer = counts.writeStream.format("qb").options(servers=topics.servers, topic="counts").outputMode(mode)
        writer.option("checkpointLocation", str(files.checkpoint)).trigger(availableNow=True).start().awaitTermination()

    files.add("a", "a", "b")
    with pytest.raises(PySparkException, match="qb does not support Update mode"):
        run("update")
    run("complete")
    files.add("b")
    run("complete")
    assert topics.bodies("counts") == ["a 2", "a 2", "b 1", "b 2"]


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_without_a_broker_the_query_fails_with_the_address(
    spark: SparkSession, start_broker: Callable[..., BrokerProcess], delivery: str
) -> None:
    broker = start_broker()
    broker.stop()
    with pytest.raises(PySparkException, match=f"nothing listens on 127.0.0.1:{broker.port}; start the broker"):
        save(numbers(spark, 1), f"127.0.0.1:{broker.port}", topic="x", delivery=delivery, requestTimeout=0.2)
