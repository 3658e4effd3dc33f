"""Spark's `format("qb")`, found by Spark itself because of this package's name.

Spark imports every module called `pyspark_*` to look for a DefaultSource, and one that cannot be imported disables them
all. So what reads and writes is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

__all__ = ["DefaultSource", "register", "session"]


class DefaultSource(DataSource):
    """QB as a data source: rows to topics and topics to rows, batch and streaming."""

    @classmethod
    def name(cls) -> str:
        """The name behind `format(...)`."""
        return "qb"

    def schema(self) -> StructType:
        """The columns of what is read. What is written has the columns of its DataFrame."""
        from pyspark_qb.read.source import schema_for

        return schema_for(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """What `spark.read` uses."""
        from pyspark_qb.read.source import batch_reader

        return batch_reader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """What `spark.readStream` uses."""
        from pyspark_qb.read.source import stream_reader

        return stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """What `df.write` uses: one of these a job, made on the driver and sent to its tasks."""
        from pyspark_qb.write.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """What `df.writeStream` uses: one for the tasks and another for every commit; they share nothing."""
        from pyspark_qb.write.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)


def register(spark: SparkSession) -> None:
    """Make `format("qb")` known to this session, where Spark cannot find the package by itself."""
    spark.dataSource.register(DefaultSource)


def session(app_name: str = "qb", master: str | None = None, **config: Any) -> SparkSession:
    """Return a Spark session whose workers run this very Python, and that knows `format("qb")`.

    Without Java on this machine it uses the one that the extra `spark-jvm` brings. See pyspark_qb.sessions.
    """
    from pyspark_qb.sessions.spark_sessions import start

    spark = start(app_name, master, config)
    register(spark)
    return spark
