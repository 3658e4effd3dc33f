"""The readers of `format("qb")`."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from pyspark_qb.options.spark_errors import BadOption
from pyspark_qb.options.spark_options import source_options
from pyspark_qb.read.source_columns import full_schema, wanted_columns

PUSHDOWN = "pyspark.sql.worker.data_source_pushdown_filters"


def schema_for(options: Mapping[str, str]) -> StructType:
    """Return the columns of what is read. Raises BadOption."""
    return full_schema(source_options(options).include_properties)


def batch_reader(options: Mapping[str, str], schema: StructType) -> DataSourceReader:
    """Return a reader of what is there now. Raises BadOption, BadColumns.

    Spark pushes filters down if spark.sql.python.filterPushdown.enabled is on, and refuses every reader that would take
    them if it is off. It plans with a worker of its own if it pushes: only there the reader takes filters.
    """
    from pyspark_qb.read.batch_reader import BatchReader, PushingBatchReader

    kind = PushingBatchReader if PUSHDOWN in sys.modules else BatchReader
    checked = source_options(options)
    if checked.max_rows_per_trigger is not None:
        raise BadOption("option maxRowsPerTrigger is for streams; a batch has startingOffsets and endingOffsets")
    return kind(checked, wanted_columns(schema))


def stream_reader(options: Mapping[str, str], schema: StructType) -> DataSourceStreamReader:
    """Return a reader of what comes. Raises BadOption, BadColumns."""
    from pyspark_qb.read.stream_reader import StreamReader

    checked = source_options(options)
    if checked.path is not None:
        raise BadOption("files are read as a batch; a stream needs option servers, a running broker")
    if checked.ending_offsets is not None or checked.ending_timestamp is not None:
        raise BadOption("a stream has no end: endingOffsets and endingTimestamp are for batches")
    return StreamReader(checked, wanted_columns(schema))
