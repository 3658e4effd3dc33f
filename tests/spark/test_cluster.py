"""The sink works where the tasks run in other processes than the driver, and Spark finds it by its name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.conftest import QUICK
from tests.support.brokers import ROOT, BrokerProcess
from tests.support.peers import Peer

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(240)]

# A plain session: nothing is registered, nothing but PYSPARK_PYTHON is set.
SCRIPT = """
import sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local-cluster[2,1,1024]")
for name, value in {settings!r}.items():
    builder = builder.config(name, str(value).lower() if isinstance(value, bool) else value)
spark = builder.getOrCreate()
servers, checkpoint, lines = sys.argv[1:]
options = {{"servers": servers, "topic": "events", "checkpointLocation": checkpoint}}
stream = spark.readStream.text(lines).repartition(4).writeStream.format("qb").options(**options)
stream.trigger(availableNow=True).start().awaitTermination()
print(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size())
spark.stop()
"""


def test_a_stream_runs_on_a_cluster_of_two_workers(broker: BrokerProcess, tmp_path: Path) -> None:
    settings = QUICK | {
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": QUICK["spark.driver.extraJavaOptions"],
    }
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "a").write_text("".join(f"{number}\n" for number in range(200)))
    environment = os.environ | {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    with Peer(broker.port) as peer:
        peer.create_topic("events", partitions="2")
    arguments = [f"127.0.0.1:{broker.port}", str(tmp_path / "checkpoint"), str(lines)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(settings=settings), *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    with Peer(broker.port) as peer:
        peer.hello()
        found = peer.bodies("events", 0) + peer.bodies("events", 1)
    assert sorted(map(int, found)) == list(range(200))
    assert done.stdout.split()[-1] == "3", "the driver and two executors"
