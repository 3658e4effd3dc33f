"""A Spark driver that publishes lines of files, while processes are killed at chosen moments: `driver.py DIRECTORY`.

DIRECTORY holds Spark's settings, the process ids of the broker and of the driver's JVM, and a directory for each stream
with its `plan.json`, `input/`, `checkpoint/`, and `fired/`: the batches whose fault has happened. Ends with 0 when all
is published, and with 3 when its JVM was killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from py4j.protocol import Py4JError
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import pyspark_qb
from pyspark_qb.write.sink import BATCH, Sink, StreamSink
from qb.clients.blocking.methods.stages import Stage

JVM_KILLED = 3


class Faults:
    """What is to happen in which batch; each happens once, whichever process comes first."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._plan: dict[str, str] = json.loads((self._directory / "plan.json").read_text())["faults"]

    def due(self, batch: int, *kinds: str) -> str | None:
        """Return which of these faults is to happen now, if one is."""
        kind = self._plan.get(str(batch))
        if kind not in kinds:
            return None
        try:
            (self._directory / "fired" / str(batch)).touch(exist_ok=False)
        except FileExistsError:
            return None
        return kind

    def kill(self, whom: str) -> None:
        """kill -9 of "broker" or "jvm"; it may be dead already."""
        try:
            os.kill(int((self._directory.parent / f"{whom}.pid").read_text()), signal.SIGKILL)
        except ProcessLookupError:
            pass


def kill_this_process(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FaultySink(StreamSink):
    """The sink as it is, and what befalls it."""

    def __init__(self, sink: Sink, directory: str) -> None:
        super().__init__(sink)
        self._directory = directory

    def write(self, iterator: Iterator[Any]) -> Any:
        faults, batch = Faults(self._directory), int(TaskContext.get().getLocalProperty(BATCH))
        kind = faults.due(batch, "task killed", "task fails", "broker killed while staging", "driver killed in a task")
        if kind == "task killed":
            with mock.patch.object(Stage, "finish", kill_this_process):
                return super().write(iterator)
        if kind == "broker killed while staging":
            finish = Stage.finish
            with mock.patch.object(Stage, "finish", lambda stage: faults.kill("broker") or finish(stage)):
                return super().write(iterator)
        done = super().write(iterator)
        if kind == "driver killed in a task":
            faults.kill("jvm")
        if kind == "task fails":
            raise RuntimeError("a task fails when its rows are out already")
        return done

    def commit(self, messages: Any, batchId: int) -> None:
        faults = Faults(self._directory)
        if faults.due(batchId, "driver killed before commit"):
            faults.kill("jvm")
            kill_this_process()
        if faults.due(batchId, "driver killed inside commit"):
            faults.kill("jvm")
        if faults.due(batchId, "broker killed before commit"):
            faults.kill("broker")
        if faults.due(batchId, "broker killed while committing"):
            threading.Timer(random.uniform(0, 0.02), faults.kill, ["broker"]).start()
        super().commit(messages, batchId)
        if faults.due(batchId, "broker killed after commit"):
            faults.kill("broker")
        if faults.due(batchId, "driver killed after commit"):
            faults.kill("jvm")
            kill_this_process()  # so Spark never hears of the commit
        if faults.due(batchId, "commit killed when it was done"):
            kill_this_process()


class FaultySource(pyspark_qb.DefaultSource):
    """format("qb") with the faulty sink."""

    def streamWriter(self, schema: Any, overwrite: bool) -> FaultySink:
        directory = self.options.pop("faults")
        writer: Any = super().streamWriter(schema, overwrite)
        return FaultySink(writer._sink, directory)


def publish(spark: SparkSession, stream: Path) -> None:
    """Publish all lines, one file a batch, over a number of tasks that differs from attempt to attempt."""
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(str(stream / "input"))
    options = json.loads((stream / "plan.json").read_text())["options"]
    writer = lines.repartition(random.randint(1, 3)).writeStream.format("qb").options(faults=str(stream), **options)
    writer = writer.option("checkpointLocation", str(stream / "checkpoint")).trigger(availableNow=True)
    writer.start().awaitTermination()


def publish_all(spark: SparkSession, stream: Path) -> None:
    """Start the query again whenever it has failed because of a fault."""
    while True:
        before = len(list((stream / "fired").iterdir()))
        try:
            return publish(spark, stream)
        except PySparkException:
            if len(list((stream / "fired").iterdir())) == before:
                raise


def main(directory: Path) -> int:
    spark = pyspark_qb.session("faulty driver", "local[2]", **json.loads((directory / "spark.json").read_text()))
    (directory / "jvm.pid").write_text(str(spark.sparkContext._gateway.proc.pid))
    spark.sparkContext.setLogLevel("OFF")
    spark.dataSource.register(FaultySource)
    try:
        for stream in sorted(path for path in directory.iterdir() if path.is_dir()):
            publish_all(spark, stream)
    except (Py4JError, OSError):
        return JVM_KILLED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
