"""A Spark session with the right Python for its workers and a Java that is there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

from pyspark_qb.sessions.java import ensure_java


def start(app_name: str, master: str | None, config: Mapping[str, Any]) -> SparkSession:
    """Return a session; `config` has Spark's settings with `_` for `.` or as they are: `**{"spark.ui.enabled": False}`.

    The interpreters and Java are read when the JVM starts: a session that is running already stays as it is.
    Raises NoJava.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    ensure_java()
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for name, value in config.items():
        builder = builder.config(name, _as_text(value))
    return builder.getOrCreate()


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
