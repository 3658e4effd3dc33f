"""The tools that show the project's structure run, and say what the documents say of them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.brokers import ROOT as PROJECT


def run(tool: str) -> str:
    done = subprocess.run([sys.executable, f"tools/{tool}"], cwd=PROJECT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_the_path_of_a_message_is_counted_in_files_and_boundaries() -> None:
    counted = re.findall(r"^(\w+): (\d+) files, (\d+) boundaries, ", run("trace_path.py"), re.MULTILINE)
    assert [what for what, _, _ in counted] == ["publish", "delivery", "ack"]
    assert all(0 < int(files) <= 2 * int(boundaries) for _, files, boundaries in counted)


def test_the_import_graph_shows_that_the_wire_imports_no_room_but_itself() -> None:
    assert "\nqb.core.wire: -\n" in run("import_graph.py")
