"""Every Python block of docs/PYTHON.md is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qb.testing.running_broker import RunningBroker
from tests.support.brokers import ROOT as PROJECT

GUIDE = (PROJECT / "docs/PYTHON.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
FILES = {found[1]: block for block in BLOCKS if (found := re.match(r"# file: (\S+)\n", block))}

SNIPPETS = [block for block in BLOCKS if not block.startswith("# file: ")]

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with all files of the guide."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(directory: Path, *arguments: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "QB_"))}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=directory, env=kept | environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_guides_tests_pass_with_the_plugin_as_it_is_installed(home: Path) -> None:
    shown = run(home, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "test_shop.py")
    assert f"{FILES['test_shop.py'].count('def test_')} passed" in shown


def test_the_guides_blocks_run_one_after_another(tmp_path: Path, qb_broker: RunningBroker) -> None:
    (tmp_path / "guide.py").write_text("\n".join(SNIPPETS))
    lines = run(tmp_path, "-W", "error", "guide.py", QB_SERVER_PORT=str(qb_broker.port)).splitlines()
    assert len(SNIPPETS) >= 6
    assert lines[0].endswith(" 0 fsynced")
    assert lines[1] == "3 7"
    assert len([line for line in lines if re.fullmatch(r"[01] \d", line)]) >= 1, "the group was handed messages"
    assert "fsynced" in lines
    assert '    "name": "publish orders",' in lines, "the publish is a span"
