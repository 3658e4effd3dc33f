"""Every Python block of docs/PYTHON.md is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.brokers import ROOT as PROJECT

GUIDE = (PROJECT / "docs/PYTHON.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
FILES = {found[1]: block for block in BLOCKS if (found := re.match(r"# file: (\S+)\n", block))}

pytestmark = pytest.mark.process


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with all files of the guide."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_guides_tests_pass_with_the_plugin_as_it_is_installed(home: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "test_shop.py"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "QB_"))}
    done = subprocess.run(command, cwd=home, env=kept, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{FILES['test_shop.py'].count('def test_')} passed" in done.stdout
