"""What `spark.read` reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from pyspark_qb.options.spark_options import SourceOptions
from pyspark_qb.read.broker_logs import BrokerLogs
from pyspark_qb.read.directory_logs import DirectoryLogs
from pyspark_qb.read.filters import PushedFilters, push
from pyspark_qb.read.logs import Logs, Slice
from pyspark_qb.read.query_offsets import OffsetRange, checked, ranges, resolve, split


class BatchReader(DataSourceReader):
    """Reads what is there when the query is planned."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options, self._columns = options, columns
        self._pushed = PushedFilters()

    def partitions(self) -> list[InputPartition]:
        """Return what each task reads: one partition of a topic, or a part of it if it is long."""
        options = self._options
        with closing(opened(options)) as logs:
            wanted = self._pushed.narrowed(wanted_ranges(logs, options))
            return [*logs.slices(split(wanted, options.rows_per_partition, options.min_partitions))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one slice; Spark makes up a partition of its own where there is none."""
        if isinstance(partition, Slice):
            yield from partition.read(self._columns, self._pushed.times)


class PushingBatchReader(BatchReader):
    """Takes filters over from Spark, which refuses a reader that would if it is not allowed to; see batch_reader()."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Return the filters that Spark has to apply."""
        self._pushed, left = push(filters)
        return left


def opened(options: SourceOptions) -> Logs:
    """Return the logs that are read: of a running broker, or of its data directory."""
    return DirectoryLogs(options) if options.path is not None else BrokerLogs(options)


def wanted_ranges(logs: Logs, options: SourceOptions) -> list[OffsetRange]:
    """Return what the options ask for. Raises BadOption, DataLost."""
    extents = logs.extents()
    start = resolve(extents, options.starting_offsets, options.starting_timestamp, "earliest", logs.at_time)
    end = resolve(extents, options.ending_offsets, options.ending_timestamp, "latest", logs.at_time)
    start, end = (checked(each, extents, fail_on_data_loss=options.fail_on_data_loss) for each in (start, end))
    return ranges(start, {each: max(offset, start[each]) for each, offset in end.items()})
