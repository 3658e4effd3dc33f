"""What the tasks and the driver of a write do to each other, in every order that Spark may call them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import WriterCommitMessage

from pyspark_qb.arrow.row_columns import Columns
from pyspark_qb.options.spark_errors import NoBatch
from pyspark_qb.options.spark_options import SinkOptions, sink_options
from pyspark_qb.write import sink
from pyspark_qb.write.row_publisher import RowPublisher
from pyspark_qb.write.sink import Sink, StreamSink, TaskDone
from pyspark_qb.write.tasks import StagedRows, connected
from qb import BrokerClient, UnknownStage
from tests.support.brokers import BrokerProcess

pytestmark = pytest.mark.process


class Write:
    """One write of a Spark query, step by step."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.options: SinkOptions = sink_options({"servers": f"127.0.0.1:{broker.port}", "topic": "events"})
        self.sink = Sink(self.options, Columns(value=0))
        with BrokerClient(port=broker.port) as client:
            client.create_topic("events")

    def attempt(self, *values: str, number: int = 0) -> TaskDone:
        """What a task does, and then reports to the driver."""
        batches = iter([pa.record_batch([pa.array(values, pa.string())], names=["value"])])
        with connected(self.options) as client:
            publisher = RowPublisher(client, self.options, self.sink.columns, turn=0)
            return TaskDone("spark:query", number, publisher.stage(batches, "spark:query", number))

    def published(self) -> list[bytes]:
        with connected(self.options) as client:
            return [message.body for message in client.fetch("events")]


@pytest.fixture
def write(broker: BrokerProcess) -> Write:
    return Write(broker)


def test_only_the_attempts_that_the_driver_heard_of_are_published(write: Write) -> None:
    chosen, speculative = write.attempt("a", "b"), write.attempt("a", "b")
    assert chosen.staged.stage != speculative.staged.stage
    write.sink.commit([chosen, write.attempt("c"), write.attempt()])
    assert sorted(write.published()) == [b"a", b"b", b"c"]
    with connected(write.options) as client:
        assert client.list_transactions()["stages"] == [], "the commit ended what it did not name"


def test_what_was_committed_is_not_staged_again_and_not_aborted(write: Write) -> None:
    done = write.attempt("a")
    write.sink.commit([done])
    write.sink.abort([done])
    again = write.attempt("a")
    assert again.staged == StagedRows(replayed=True)
    write.sink.commit([again, write.attempt()])
    write.sink.commit([done])
    assert write.published() == [b"a"]
    write.sink.commit([write.attempt("b", number=1)])
    assert write.published() == [b"a", b"b"]


def test_a_commit_after_an_abort_is_refused_and_publishes_nothing(write: Write) -> None:
    done, late = write.attempt("a"), write.attempt("b")
    write.sink.abort([done, None])
    with pytest.raises(UnknownStage):
        write.sink.commit([done, late])
    assert write.published() == []
    write.sink.commit([write.attempt("a"), late])
    assert sorted(write.published()) == [b"a", b"b"]


def test_a_batch_that_one_task_found_committed_is_left_alone(write: Write) -> None:
    early = write.attempt("a")
    write.sink.commit([write.attempt("a")])  # by a driver that was thought dead
    write.sink.commit([early, write.attempt("b")])
    assert write.published() == [b"a"]


@pytest.mark.parametrize("messages", [[], [None], [TaskDone("spark:query", 0, StagedRows())]])
def test_where_nothing_was_staged_no_broker_is_asked(messages: list[WriterCommitMessage | None]) -> None:
    unreachable = Sink(
        sink_options({"servers": "127.0.0.1:1", "topic": "events", "requestTimeout": "0.1"}), Columns(value=0)
    )
    unreachable.commit(messages)
    unreachable.abort(messages)


def test_an_abort_that_reaches_no_broker_does_not_hide_what_went_wrong(write: Write, broker: BrokerProcess) -> None:
    done = write.attempt("a")
    broker.kill()
    write.sink.abort([done])


def test_tasks_of_two_batches_are_never_committed_together(write: Write) -> None:
    with pytest.raises(NoBatch, match="the tasks of one write name several transactions"):
        write.sink.commit([write.attempt("a"), write.attempt("b", number=1)])
    assert write.published() == []


def test_without_query_and_batch_a_stream_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Task:
        def getLocalProperty(self, name: str) -> Any:
            return None

    monkeypatch.setattr(sink, "_task", Task)
    unreachable = Sink(sink_options({"servers": "127.0.0.1:1", "topic": "events"}), Columns(value=0))
    with pytest.raises(NoBatch, match="Spark does not say which query and batch this is"):
        StreamSink(unreachable).write(iter([]))
