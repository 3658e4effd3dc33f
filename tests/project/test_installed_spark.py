"""Spark finds `format("qb")` of an installed wheel by itself, in whatever directory a program runs."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = """
from pyspark.sql import SparkSession
from pyspark_qb.sessions.java import ensure_java

ensure_java()
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False)
builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
builder = builder.config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
print(spark.read.format("qb").options(servers="127.0.0.1:1", subscribe="t").load().schema.names)
"""


@pytest.mark.spark
@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.skipif(find_spec("pyspark") is None, reason="needs the extra spark")
def test_the_source_of_a_wheel_is_found_from_a_directory_of_another_program(installed: Path, crowded: Path) -> None:
    python = str(installed / "bin/python")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    environment |= {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
    done = subprocess.run([python, "-c", PROGRAM], cwd=crowded, env=environment, capture_output=True, text=True)
    assert done.stdout.strip().startswith("['key', 'value', 'topic', 'partition', 'offset', 'timestamp'"), done.stderr
