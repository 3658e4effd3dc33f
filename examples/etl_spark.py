"""ETL with Spark: sales come out of one topic, are cleaned and converted, and go into another, each exactly once.

`python -m examples.etl_spark` runs against the broker that the environment names. It needs the extra `spark`. A
micro-batch is one transaction, and the checkpoint says how far it has come: run again, it goes on from there.
"""

from __future__ import annotations

import tempfile

from pyspark.sql import DataFrame, SparkSession

import pyspark_qb
from qb import BrokerClient

SALE = "id bigint, city string, currency string, amount double"
SALES = [
    {"id": 1, "city": " Berlin", "currency": "EUR", "amount": 10.0},
    {"id": 2, "city": "paris", "currency": "USD", "amount": 20.0},
    {"id": 3, "city": None, "currency": "EUR", "amount": 5.0},  # no city: left out
]


def cleaned(messages: DataFrame) -> DataFrame:
    """Return the sales that are whole, in euros, keyed by city: a row is a message."""
    sales = messages.selectExpr(f"from_json(CAST(value AS STRING), '{SALE}') AS sale").select("sale.*")
    whole = sales.where("id IS NOT NULL AND city IS NOT NULL AND amount >= 0")
    euros = whole.selectExpr(
        "id",
        "initcap(trim(city)) AS city",
        "round(amount * CASE currency WHEN 'USD' THEN 0.9 ELSE 1 END, 2) AS euros",
    )
    return euros.selectExpr("city AS key", "to_json(struct(*)) AS value")


def run(spark: SparkSession, servers: str, checkpoint: str) -> None:
    """Carry over all that there is, and return."""
    source = spark.readStream.format("qb").options(servers=servers, subscribe="sales", startingOffsets="earliest")
    sink = cleaned(source.load()).writeStream.format("qb").options(servers=servers, topic="sales-in-euros")
    sink.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()


def main(spark: SparkSession) -> list[str]:
    """Publish sales, convert them with Spark, and return what came out."""
    with BrokerClient.from_env() as broker, tempfile.TemporaryDirectory() as directory:
        broker.create_topic("sales")
        broker.create_topic("sales-in-euros")
        for sale in SALES:
            broker.publish_json("sales", sale)
        run(spark, f"{broker.host}:{broker.port}", f"{directory}/checkpoint")
        return [f"{message.key}: {message.text()}" for message in broker.fetch("sales-in-euros")]


if __name__ == "__main__":
    print("\n".join(main(pyspark_qb.session("etl", "local[2]"))))
