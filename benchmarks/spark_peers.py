"""benchmarks.spark_peers: data sources that do nothing but pass Arrow rows, to compare ours with.

May import: pyarrow, pyspark, the standard library.
Never: anything of ours.
"""

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
    """Yields one record batch of stored messages again and again."""

    def __init__(self, rows: int, size: int, splits: int) -> None:
        self._rows, self._size, self._splits = rows, size, splits

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self._splits)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        count = PORTION
        columns = {
            "key": pa.nulls(count, pa.string()),
            "value": pa.array([b"x" * self._size] * count, pa.binary()),
            "topic": pa.array(["memory"] * count, pa.string()),
            "partition": pa.array([partition.value] * count, pa.int32()),
            "offset": pa.array(range(count), pa.int64()),
            "timestamp": pa.array(range(count), pa.timestamp("us", "UTC")),
        }
        batch = pa.RecordBatch.from_pydict(columns)
        for _ in range(self._rows // self._splits // count):
            yield batch


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
