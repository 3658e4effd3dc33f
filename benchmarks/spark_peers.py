"""Data sources that do nothing but pass Arrow rows, to compare ours with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    import pyarrow as pa

PORTION = 10_000  # rows in a record batch from memory


class DropWriter(DataSourceStreamArrowWriter):
    """Takes every row and keeps none."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass


class MemoryReader(DataSourceReader):
    """Yields record batches of messages as ours does, their values out of one buffer in memory."""

    def __init__(self, rows: int, size: int, splits: int) -> None:
        self._rows, self._size, self._splits = rows, size, splits

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._splits)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import numpy as np
        import pyarrow as pa

        same = {
            "key": pa.nulls(PORTION, pa.string()),
            "value": pa.array([b"x" * self._size] * PORTION, pa.binary()),
            "topic": pa.array(["memory"] * PORTION, pa.string()),
            "partition": pa.array(np.full(PORTION, partition.value, np.int32)),
        }
        for first in range(0, self._rows // self._splits, PORTION):
            offsets = np.arange(first, first + PORTION)
            times = pa.array(offsets, pa.timestamp("us", "UTC"))
            yield pa.RecordBatch.from_pydict({**same, "offset": pa.array(offsets), "timestamp": times})


class NothingSource(DataSource):
    """Both of them, as `format("nothing")`."""

    @classmethod
    def name(cls) -> str:
        return "nothing"

    def schema(self) -> str:
        return "key string, value binary, topic string, partition int, offset bigint, timestamp timestamp"

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self.options
        return MemoryReader(int(options["rows"]), int(options["size"]), int(options["splits"]))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return DropWriter()
