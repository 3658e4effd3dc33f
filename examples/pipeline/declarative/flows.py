"""The same pipelines, declared.

`spark-pipelines` runs this file; spark-pipeline.yml beside it says with which settings.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from examples.pipeline import archive, files_to_qb, windows
from examples.pipeline.running import Shown

spark = SparkSession.active()
spark.streams.addListener(Shown())
SERVERS, TOPIC, TOTALS, INPUT, OUTPUT = (
    str(spark.conf.get(f"spark.qb.{name}")) for name in ("servers", "topic", "totals", "input", "output")
)


def topic(group: str) -> DataFrame:
    """Return the messages of the topic; the broker shows the lag of the group."""
    source = {"servers": SERVERS, "subscribe": TOPIC, "startingOffsets": "earliest", "groupId": group}
    return spark.readStream.format("qb").options(**source).load()


dp.create_sink("orders", "qb", {"servers": SERVERS, "topic": TOPIC})
dp.create_sink("totals_in_qb", "qb", {"servers": SERVERS, "topic": TOTALS})
dp.create_sink("totals_in_files", "parquet", {"path": f"{OUTPUT}/totals"})
dp.create_sink("archived", "parquet", {"path": f"{OUTPUT}/archive"})


@dp.append_flow(target="orders")
def files_into_qb() -> DataFrame:
    """Each line of the files becomes a message."""
    return files_to_qb.messages(spark.readStream.schema(files_to_qb.ORDER).json(INPUT))


@dp.temporary_view
def totals() -> DataFrame:
    """Orders by item and minute. Spark 4.3 takes a watermark only here, on what is read, not on `readStream.table`."""
    return windows.totals(topic("declared-totals"), "1 minute", "30 seconds")


@dp.append_flow(target="totals_in_qb")
def totals_into_qb() -> DataFrame:
    """The totals become messages, too."""
    return windows.messages(spark.readStream.table("totals"))


@dp.append_flow(target="totals_in_files")
def totals_into_files() -> DataFrame:
    """The totals as they are."""
    return spark.readStream.table("totals")


@dp.append_flow(target="archived")
def topic_into_files() -> DataFrame:
    """The archive. A sink has no columns to make folders of."""
    return archive.dated(topic("declared-archive"))
