"""What Spark calls to publish the rows of a DataFrame.

Tasks stage their rows; the driver's commit makes all of them visible at once, under a name by which a repetition is
recognised: (query, batch) for a stream, a name of its own for a batch write. docs/TRANSACTIONS.md is the contract.

Spark makes a writer for the tasks and others for every commit and abort, in other processes: nothing is shared but
what was there when they were made, and the messages that tasks send back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pyspark_qb.arrow.row_columns import Columns, columns_of
from pyspark_qb.options.spark_errors import BadOption, NoBatch
from pyspark_qb.options.spark_options import SinkOptions, sink_options
from pyspark_qb.write.tasks import StagedRows, connected
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.staged_messages import ABORT_PATIENCE

if TYPE_CHECKING:
    import pyarrow as pa

QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"  # as Spark names them to its tasks
Messages = list[WriterCommitMessage | None]  # None: a task that failed


@dataclass(frozen=True)
class TaskDone(WriterCommitMessage):
    """What a task reports to the driver: the transaction, and what it staged for it."""

    transaction: str
    number: int | None
    staged: StagedRows


@dataclass(frozen=True)
class Sink:
    """What writers of streams and of batches have in common. Made on the driver, sent to the tasks."""

    options: SinkOptions
    columns: Columns

    def write(self, batches: Iterator[pa.RecordBatch], transaction: str, number: int | None) -> TaskDone:
        """Carry out one task: stage its rows, or publish them if delivery is at-least-once."""
        from pyspark_qb.write.row_publisher import (
            RowPublisher,  # with numpy and pyarrow, which no commit has to wait for
        )

        turn = _task().partitionId() + (number or 0)
        with connected(self.options) as client:
            publisher = RowPublisher(client, self.options, self.columns, turn)
            if self.options.delivery == "at-least-once":
                publisher.publish(batches)
                return TaskDone(transaction, number, StagedRows())
            return TaskDone(transaction, number, publisher.stage(batches, transaction, number))

    def commit(self, messages: Messages) -> None:
        """Make what the tasks staged visible, all of it at once; return when it is."""
        done = _heard(messages)
        stages = [(each.staged.stage, each.staged.messages) for each in done if each.staged.stage is not None]
        if stages and not any(each.staged.replayed for each in done):
            with connected(self.options) as client:
                client.commit_transaction(done[0].transaction, stages, done[0].number)

    def abort(self, messages: Messages) -> None:
        """End what the tasks staged, if the broker is there to hear it. What was committed stays."""
        done = _heard(messages)
        if stages := [each.staged.stage for each in done if each.staged.stage is not None]:
            with suppress(QBError), connected(replace(self.options, request_timeout=ABORT_PATIENCE)) as client:
                client.abort_transaction(done[0].transaction, done[0].number, stages)


def _task() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "write() runs in a task"
    return context


def _heard(messages: Messages) -> list[TaskDone]:
    """Return the results of the tasks that succeeded. Raises NoBatch if they belong to different transactions."""
    done = [message for message in messages if isinstance(message, TaskDone)]
    if len(named := {(each.transaction, each.number) for each in done}) > 1:
        raise NoBatch(f"the tasks of one write name several transactions: {sorted(map(str, named))}")
    return done


class StreamSink(DataSourceStreamArrowWriter):
    """A streaming query's sink: a transaction a micro-batch, named by query and batch."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskDone:
        """Stage the rows of one task."""
        query, batch = (_task().getLocalProperty(name) for name in (QUERY, BATCH))
        if not query or not batch:
            raise NoBatch(f"Spark does not say which query and batch this is: {QUERY}={query}, {BATCH}={batch}")
        return self._sink.write(iterator, f"spark:{query}", int(batch))

    def commit(self, messages: Messages, batchId: int) -> None:
        """Make the micro-batch visible; one that was committed before is left alone."""
        self._sink.commit(messages)

    def abort(self, messages: Messages, batchId: int) -> None:
        """Drop what was staged for the micro-batch."""
        self._sink.abort(messages)


class BatchSink(DataSourceArrowWriter):
    """The sink of one `df.write`: one transaction, whose name was chosen on the driver."""

    def __init__(self, sink: Sink, transaction: str, number: int | None) -> None:
        self._sink, self._transaction, self._number = sink, transaction, number

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskDone:
        """Stage the rows of one task."""
        return self._sink.write(iterator, self._transaction, self._number)

    def commit(self, messages: Messages) -> None:
        """Make all rows visible."""
        self._sink.commit(messages)

    def abort(self, messages: Messages) -> None:
        """Drop what was staged."""
        self._sink.abort(messages)


def stream_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSink:
    """Return the sink of a streaming query. Raises BadOption, BadColumns."""
    options = sink_options(given)
    if options.transaction_id is not None:
        raise BadOption("option txnId is for batch writes: a streaming query names its transactions by query and batch")
    return StreamSink(Sink(options, columns_of(schema, options)))


def batch_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    """Return the sink of one batch write. Raises BadOption, BadColumns."""
    if overwrite:
        raise BadOption('a topic cannot be overwritten, only appended to: use mode("append")')
    options = sink_options(given)
    transaction = options.transaction_id or f"spark-write:{uuid4()}"
    return BatchSink(Sink(options, columns_of(schema, options)), transaction, options.transaction_number)
