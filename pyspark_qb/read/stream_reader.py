"""What `spark.readStream` reads.

Spark's checkpoint alone says where a query goes on. What is committed to the broker is for its tools to show.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from pyspark_qb.arrow.bounds import Bounds
from pyspark_qb.options.spark_errors import DataLost
from pyspark_qb.options.spark_options import SourceOptions
from pyspark_qb.read.broker_logs import BrokerLogs
from pyspark_qb.read.fetches import log
from pyspark_qb.read.logs import Slice
from pyspark_qb.read.query_offsets import (
    Positions,
    TopicPartition,
    begun_in,
    checked,
    from_json,
    limited,
    ranges,
    resolve,
    split,
    to_json,
)
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.fetch_requests import PartitionExtent


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what has come since the last batch. Spark calls it in one process, and read() in those of the tasks."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options, self._columns = options, columns
        self._logs = BrokerLogs(options)
        self._initial: dict[str, Any] | None = None
        self._committed: Positions | None = None  # what was last committed for the group of the query
        self._ends: Positions | None = None  # as they were last seen
        self._target: Positions | None = None  # Trigger.AvailableNow: there is nothing behind these

    def initialOffset(self) -> dict[str, Any]:
        """Return where a new query begins: always the same, however often it is asked."""
        if self._initial is None:
            options, extents = self._options, self._logs.extents()
            asked = options.starting_offsets, options.starting_timestamp
            start = resolve(extents, *asked, "latest", self._logs.at_time)
            start = checked(start, extents, fail_on_data_loss=options.fail_on_data_loss)
            self._initial = to_json(start, start)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return how much one batch reads at most."""
        most = self._options.max_rows_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Take note of what there is now: the query reads that and ends."""
        self._target = {each: extent.next for each, extent in self._extents().items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next batch ends; the start itself if there is nothing to read. Raises DataLost."""
        positions = from_json(start)
        self._commit(positions)  # Spark asks for another batch when the last one is done, also if there is none
        extents = self._extents()
        self._check_loss(positions, extents)
        self._ends = {each: extent.next for each, extent in extents.items()}
        end = self._until_target(positions, self._ends)
        if isinstance(limit, ReadMaxRows):
            end = limited(positions, end, limit.max_rows)
        begun = begun_in(start)
        return start if end == positions else to_json(end, begun if begun == positions else None)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return where the logs end, for Spark to show how far behind the query is."""
        return None if self._ends is None else to_json(self._ends)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return what each task reads: one partition of a topic, or a part of it if the batch is large."""
        begun = begun_in(end)
        between = ranges(from_json(start) if begun is None else begun, from_json(end))
        return [*self._logs.slices(split(between, self._options.rows_per_partition, self._options.min_partitions))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one slice."""
        assert isinstance(partition, Slice)
        return partition.read(self._columns, Bounds())

    def commit(self, end: dict[str, Any]) -> None:
        """Take note that a batch is done. Spark says so only when it begins another one."""
        self._commit(from_json(end))

    def stop(self) -> None:
        """End the connection."""
        self._logs.close()

    def _commit(self, positions: Positions) -> None:
        """Report to the broker how far the query has come; it goes on if that fails."""
        if positions == self._committed:
            return
        self._committed, group = positions, self._options.group_id or default_group(self._options)
        try:
            self._logs.commit(group, positions)
        except QBError as error:
            log.warning("the broker does not know how far group %s has come: %s", group, error)

    def _extents(self) -> dict[TopicPartition, PartitionExtent]:
        return self._logs.extents(missing_ok=not self._options.fail_on_data_loss)

    def _check_loss(self, positions: Positions, extents: Mapping[TopicPartition, PartitionExtent]) -> None:
        """Raises DataLost if a partition is gone, or was made anew; the tasks report messages that are gone."""
        for partition, offset in positions.items():
            extent = extents.get(partition)
            if self._options.fail_on_data_loss and (extent is None or extent.next < offset):
                found = "is gone" if extent is None else f"ends at offset {extent.next}: it was made anew"
                raise DataLost(f"{partition} was read up to offset {offset}, and now it {found}")

    def _until_target(self, positions: Positions, ends: Positions) -> Positions:
        if self._target is None:
            return ends
        return {each: min(end, self._target.get(each, positions.get(each, 0))) for each, end in ends.items()}


def default_group(options: SourceOptions) -> str:
    """Return the group of queries that name none: `spark-` and what they read. Such queries share it."""
    read = options.pattern or "-".join(options.topics)
    return re.sub(r"[^A-Za-z0-9._-]+", "_", f"spark-{read}")[:200]
