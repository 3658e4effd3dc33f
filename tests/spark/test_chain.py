"""Files → QB → QB → Parquet, each step a streaming query: what comes out is what went in, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qb import BrokerClient
from tests.spark.source_tools import run_into, written

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.support.brokers import BrokerProcess

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(240)]
COLUMNS = "id bigint, name string, price double"


def publish(frame: DataFrame, servers: str, checkpoint: Path) -> None:
    """Write what a stream has now to the topic `tidied`, or to the topics that its rows name."""
    query = (
        frame.writeStream.format("qb")
        .options(servers=servers, checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(90)


def write_rows(path: Path, *numbers: int) -> list[dict[str, Any]]:
    rows = [{"id": number, "name": f'n°{number}\n\t"', "price": number / 7} for number in range(*numbers)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return rows


def test_what_went_through_qb_twice_equals_what_was_in_the_files(
    spark: SparkSession, broker: BrokerProcess, servers: str, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    with BrokerClient(port=broker.port) as client:
        client.create_topic("raw", 3)
        client.create_topic("tidied", 2)

    def run() -> None:
        rows = spark.readStream.schema(COLUMNS).json(str(files))
        publish(
            rows.selectExpr(
                "'raw' as topic",
                "cast(id as string) as key",
                "to_json(struct(*)) as value",
                "map('from', 'files') as properties",
                "timestamp_millis(1700000000000 + id) as timestamp",
            ),
            servers,
            tmp_path / "checkpoint-raw",
        )
        raw = spark.readStream.format("qb").options(servers=servers, subscribe="raw", startingOffsets="earliest").load()
        publish(
            raw.selectExpr("'tidied' as topic", "key", "value", "timestamp", "properties"),
            servers,
            tmp_path / "checkpoint-tidied",
        )
        tidied = spark.readStream.format("qb").options(
            servers=servers, subscribe="tidied", startingOffsets="earliest", maxRowsPerTrigger="150"
        )
        run_into(
            tidied.load().selectExpr(
                f"from_json(cast(value as string), '{COLUMNS}') as row",
                "key",
                "properties['from'] as origin",
                "unix_millis(timestamp) as time",
            ),
            tmp_path / "out",
        )

    expected = write_rows(files / "one.json", 200)
    run()
    expected += write_rows(files / "two.json", 200, 260)
    run()
    found = sorted(written(spark, tmp_path / "out"), key=lambda row: row["row"]["id"])
    assert [row["row"].asDict() for row in found] == expected
    assert [(row["key"], row["origin"], row["time"]) for row in found] == [
        (str(row["id"]), "files", 1_700_000_000_000 + row["id"]) for row in expected
    ]
