"""The rows of one Spark task on their way to the broker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from time import time_ns

import pyarrow as pa

from pyspark_qb.arrow.encoding import encode
from pyspark_qb.arrow.row_columns import Columns
from pyspark_qb.arrow.rows import read_rows
from pyspark_qb.options.spark_errors import SparkUseError
from pyspark_qb.options.spark_options import SinkOptions
from pyspark_qb.write.routing import FrameRun, Gatherer, Router, runs_of
from pyspark_qb.write.tasks import StagedRows
from qb.clients.blocking.client import BrokerClient
from qb.clients.protocol.client_errors import QBError, RequestRefused
from qb.clients.protocol.prepared_frames import publish_frames


class RowPublisher:
    """Where the rows of one task go."""

    def __init__(self, client: BrokerClient, options: SinkOptions, columns: Columns, turn: int) -> None:
        """`turn`: which partition rows without a key begin with, so that tasks do not all begin with the same."""
        self._client, self._topic, self._columns = client, options.topic, columns
        self._router = Router(lambda topic: int(client.describe_topic(topic)["partitions"]), turn)

    def publish(self, batches: Iterator[pa.RecordBatch]) -> int:
        """Publish the rows straight away; return how many there were.

        Raises BadColumns, PublishFailed, and whatever else the broker refuses; what came before it is published.
        """
        runs = self._gathered(batches, straight=True)
        return publish_frames(self._client, ((run.frames, run.rows) for run in runs))

    def stage(self, batches: Iterator[pa.RecordBatch], transaction: str, number: int | None) -> StagedRows:
        """Stage the rows durably. Reads all of them even if nothing is to be staged, as Spark wants it.

        Raises BadColumns, and whatever the broker refuses; then nothing is left at the broker, or it expires.
        """
        runs = self._gathered(batches)
        first = next(runs, None)
        if first is None:
            return StagedRows()
        stage = self._client.begin_transaction(transaction, number)
        if stage is None:
            deque(batches, maxlen=0)
            return StagedRows(replayed=True)
        try:
            for run in chain([first], runs):
                stage.add(*run)
            return StagedRows(stage.stage_id, stage.finish())
        except (SparkUseError, RequestRefused):
            with suppress(QBError):
                self._client.abort_transaction(transaction, number, [stage.stage_id])
            raise

    def _gathered(self, batches: Iterator[pa.RecordBatch], straight: bool = False) -> Iterator[FrameRun]:
        gatherer = Gatherer()
        for batch in batches:
            if batch.num_rows:
                for run in self._runs(batch, straight):
                    yield from gatherer.add(run)
        yield from gatherer.rest()

    def _runs(self, batch: pa.RecordBatch, straight: bool) -> Iterator[FrameRun]:
        rows = read_rows(batch, self._columns, self._topic)
        partitions = self._router.partitions(rows)
        now_ms, limit = time_ns() // 1_000_000, self._client.max_message_size
        return runs_of(rows, partitions, encode(rows, now_ms, limit, partitions if straight else None))
