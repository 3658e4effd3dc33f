"""What all pipelines here have in common: start Spark, show progress, stop, and fail in one line."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped, unused-ignore]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)
from pyspark.sql.streaming.query import StreamingQuery

import pyspark_qb
from pyspark_qb.options.spark_errors import SparkUseError
from pyspark_qb.options.spark_options import SERVERS
from pyspark_qb.read.query_offsets import from_json
from qb import BrokerClient
from qb.clients.protocol.client_errors import QBError

LOOK_EVERY = 0.5  # seconds between two looks at the queries
OURS = re.compile(r"^(?:qb|pyspark_qb)\.[\w.]+: (.+)$", re.MULTILINE)  # in a worker's traceback

Start = Callable[[SparkSession, Namespace], Sequence[StreamingQuery]]


def stream_arguments(module: str, purpose: str, every: float = 0) -> ArgumentParser:
    """Return a parser with the arguments that every pipeline has; `every` is the default of that one."""
    parser = ArgumentParser(prog=f"python -m {module}", description=purpose)
    add = parser.add_argument
    add("--servers", type=_address, default="127.0.0.1:9999", help="where the broker listens (default: %(default)s)")
    add("--checkpoint", required=True, help="directory where Spark keeps how far it has come")
    add("--once", action="store_true", help="do what there is to do now, and end")
    add("--every", type=float, default=every, help="seconds from one batch to the next (default: %(default)s)")
    add("--master", default="local[*]", help="Spark's master (default: %(default)s)")
    add("--verbose", action="store_true", help="show Spark's own log, too")
    return parser


def _address(text: str) -> str:
    SERVERS.parse(text)
    return text


def carry_out(start: Start, arguments: Namespace, topics: Iterable[str]) -> int:
    """Run a pipeline until it ends; return the exit code of its process.

    That the broker and the topics are there is looked at first: Spark takes seconds to start, and to fail.
    """
    try:
        with BrokerClient(servers=SERVERS.parse(arguments.servers)) as client:
            client.describe_topics(list(topics))
        follow(start(_session(arguments), arguments))
    except (QBError, SparkUseError, PySparkException, Py4JError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before there was a query to follow
        return 130
    return 0


def _session(arguments: Namespace) -> SparkSession:
    config = {
        "spark.log.level": "WARN" if arguments.verbose else "OFF",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": 4,  # 200 by default, which is for clusters
        "spark.ui.enabled": False,  # it would take port 4040, as the broker's JSON lines do
        "spark.ui.showConsoleProgress": False,
    }
    return pyspark_qb.session("qb pipeline", arguments.master, **config)


def reason(error: Exception) -> str:
    """Return why a pipeline failed, in one line: the broker's words if there are any."""
    text = str(error)
    ours = OURS.findall(text)
    words = ours[-1] if ours else text.strip().partition("\n")[0]
    return words.partition(" (in a program: ")[0]


def read_topics(spark: SparkSession, arguments: Namespace, topics: str, group: str, **options: Any) -> DataFrame:
    """Return a stream of topics from their first message on; the broker shows its lag under the name of the group."""
    source = {"servers": arguments.servers, "subscribe": topics, "startingOffsets": "earliest", "groupId": group}
    return spark.readStream.format("qb").options(**source, **options).load()


def trigger(arguments: Namespace) -> dict[str, Any]:
    """Return when batches begin, as DataStreamWriter.trigger() takes it."""
    return {"availableNow": True} if arguments.once else {"processingTime": f"{arguments.every} seconds"}


def follow(queries: Sequence[StreamingQuery]) -> None:
    """Print a line a batch until the queries end, or Ctrl-C or SIGTERM ends them.

    A batch that is cut short then is repeated by the next run. Raises what a query failed with.
    """
    shown = dict.fromkeys(queries, -1)
    try:
        with _stopped_by_signal() as stop:
            while not stop.wait(LOOK_EVERY):
                running = [query for query in queries if query.isActive]  # asked before they are looked at
                for query in queries:
                    shown[query] = _show(query, shown[query])
                    if failure := query.exception():
                        raise failure
                if not running:
                    return
            print("stopped; the same command goes on from here", flush=True)
    finally:
        for query in queries:
            query.stop()


@contextmanager
def _stopped_by_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set."""
    stop, numbers = threading.Event(), (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _show(query: StreamingQuery, last: int) -> int:
    """Print the batches after `last`; return the last one now."""
    for progress in [json.loads(each.json) for each in query.recentProgress]:
        if progress["batchId"] > last and progress["numInputRows"]:  # without rows: Spark reports that it waits
            last = progress["batchId"]
            print(line(progress), flush=True)
    return last


class Shown(StreamingQueryListener):
    """Prints a line a batch where the program does not hold the queries: `spark.streams.addListener(Shown())`."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing to show yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Show a batch."""
        if event.progress.numInputRows:
            print(line(json.loads(event.progress.json)), flush=True)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Nothing to show."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Nothing more to show."""


def line(progress: dict[str, Any]) -> str:
    """Return a batch in one line: `orders to qb: batch 7, 1,000 rows, 52,000 rows/s, lag 0`."""
    rows, behind = progress["numInputRows"], lag(progress["sources"])
    speed = rows * 1000 / max(progress["batchDuration"], 1)
    left = "unknown" if behind is None else f"{behind:,}"
    return f"{progress['name']}: batch {progress['batchId']}, {rows:,} rows, {speed:,.0f} rows/s, lag {left}"


def lag(sources: Iterable[dict[str, Any]]) -> int | None:
    """Return how many messages the topics held beyond the batch, or None if a source does not say (files do not)."""
    behind = 0
    for source in sources:
        if not source.get("latestOffset"):
            return None
        done = from_json(source["endOffset"])
        behind += sum(end - done.get(each, 0) for each, end in from_json(source["latestOffset"]).items())
    return behind
