"""The project as users have it: its wheel, built once, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import trio

from tests.support.brokers import ROOT as PROJECT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist as a package index would get it."""
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, PROJECT]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert built.returncode == 0, built.stderr
    (found,) = directory.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel; dependencies come from the environment of the tests."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    command = [sys.executable, "-m", "pip", "--python", home / "bin/python", "install", "-q", "--no-deps", wheel]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (site,) = (home / "lib").glob("python*/site-packages")
    dependencies = Path(trio.__file__).parent.parent  # after the wheel; an editable install there is not seen
    (site / "zz_dependencies.pth").write_text(f"{dependencies}\n")
    return home


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A directory of a program that has packages and modules with the names of our folders; importing one exits."""
    for room in ("core", "storage", "doors", "clients", "cli", "testing", "replication", "cluster"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("raise SystemExit('the program has this package')")
    for module in ("client", "server"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('the program has this module')")
    return tmp_path
