"""The benchmarks run, print one JSON line a case, and their report renders; what they measure is not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import compression, growth, older_client, tails
from benchmarks.harness import BenchmarkOptions
from benchmarks.report import pictures, tables
from tests.support.brokers import ROOT as PROJECT


@pytest.mark.process
def test_a_benchmark_prints_json_lines_that_the_report_renders(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "machine", "publish_latency", "--quick", "--dir", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"machine", "publish_latency"} == {line["benchmark"] for line in lines}
    assert "qb/100B/one-at-a-time/fsync-before-ack" in {line.get("case") for line in lines}
    rendered = "\n".join(tables(lines))
    assert "| median ack at most 2.5 times a bare append + fdatasync of the same bytes |" in rendered
    assert list(tmp_path.iterdir()) == [], "a benchmark leaves nothing behind"


@pytest.mark.process
def test_growth_prints_a_line_for_each_size_that_becomes_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [each._replace(quick_sizes=(1, 3)) for each in growth.DIMENSIONS if each.name == "idle subscriptions"]
    monkeypatch.setattr(growth, "DIMENSIONS", small)
    growth.run(BenchmarkOptions(tmp_path, quick=True, rounds=1))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["size"] for line in lines if "size" in line] == [1, 3]
    assert "| push, 1 to 3 idle subscriptions: at most 1.5 times the cost |" in "\n".join(tables(lines))
    drawn = pictures(lines)
    assert list(drawn) == ["growth-idle-subscriptions.svg"]
    assert ElementTree.fromstring(drawn["growth-idle-subscriptions.svg"]).tag.endswith("svg")
    assert list(tmp_path.iterdir()) == [], "a benchmark leaves nothing behind"


@pytest.mark.process
def test_tails_prints_percentiles_of_the_broker_and_of_the_bare_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tails, "BACKLOG", 10_000)
    monkeypatch.setattr(tails, "SHARE", 0.01)
    tails.run(BenchmarkOptions(tmp_path, quick=True, rounds=1, seconds=1.5))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    sides = {"qb-publish-to-handler", "qb-publisher-held-up", "bare-append+fdatasync/200B"}
    beside = {"nothing-else", "catching-up-in-another-broker", "catching-up-in-the-same-broker"}
    figures = {line["case"]: line for line in lines if "p99.9_ms" in line}
    assert set(figures) == {f"{side}/{other}" for side in sides for other in beside}
    assert all(line["p99.9_ms"] >= line["p99_ms"] > 0 for line in figures.values())
    assert lines[-1]["times_catching-up-in-another-broker"] > 0
    assert len([line for line in lines if "target" in line]) == 2


@pytest.mark.process
def test_compression_prints_the_bytes_of_each_work_and_the_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compression, "COUNT", 20_000)
    compression.run(BenchmarkOptions(tmp_path, quick=True, rounds=1))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len([line for line in lines if "case" in line]) == len(compression.CODECS) * len(compression.WORKS)
    assert all(line["bytes_each"] > 0 for line in lines if "case" in line)
    assert len([line for line in lines if "target" in line]) == len(compression.WORKS)


def test_without_an_older_checkout_there_is_nothing_to_compare_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older_client.run(BenchmarkOptions(tmp_path, quick=True, rounds=1))
    assert json.loads(capsys.readouterr().out)["skipped"] == "no --before"


def test_an_unknown_benchmark_is_refused_by_name() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks", "nonsense"], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such benchmark: nonsense" in done.stderr
