"""The ETL program of examples/ runs on real Spark, from a topic and into a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from examples import etl_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.brokers import BrokerProcess

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(240)]


def test_sales_are_cleaned_and_converted(
    spark: SparkSession, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QB_SERVER_PORT", str(broker.port))
    assert etl_spark.main(spark) == [
        'Berlin: {"id":1,"city":"Berlin","euros":10.0}',
        'Paris: {"id":2,"city":"Paris","euros":18.0}',
    ]
