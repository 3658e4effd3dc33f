"""The benchmarks run, print one JSON line a case, and their report renders; what they measure is not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import tables
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


def test_an_unknown_benchmark_is_refused_by_name() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks", "nonsense"], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such benchmark: nonsense" in done.stderr
