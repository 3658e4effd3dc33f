"""What the metadata says about the project is true."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from qb.core.wire.version import __version__
from tests.support.brokers import ROOT as PROJECT

SETUP = configparser.ConfigParser()
SETUP.read(PROJECT / "setup.cfg")
ROOMS = ("cli", "clients", "cluster", "core", "doors", "pyspark_qb", "replication", "storage", "testing")
REQUIREMENTS = {
    "install": SETUP["options"]["install_requires"].split(),
    **{extra: listed.split() for extra, listed in SETUP["options.extras_require"].items()},
}


@pytest.mark.parametrize("extra", REQUIREMENTS)
def test_every_requirement_has_a_lower_bound(extra: str) -> None:
    assert REQUIREMENTS[extra]
    assert [each for each in REQUIREMENTS[extra] if not re.fullmatch(r"[\w.\[\]-]+>=[\d.]+", each)] == []


def test_spark_is_only_an_extra() -> None:
    with_spark = {extra for extra, listed in REQUIREMENTS.items() if any("spark" in each for each in listed)}
    assert with_spark == {"spark", "spark-pipelines"}


def test_every_extra_that_is_named_is_there() -> None:
    paths = [path for room in (*ROOMS, "docs") for path in (PROJECT / room).rglob("*") if path.suffix in (".py", ".md")]
    named = {extra for path in paths for extra in re.findall(r"qb-broker\[([\w-]+)\]", path.read_text())}
    assert "tls" in named
    assert named <= REQUIREMENTS.keys()


@pytest.mark.timeout(180)
def test_the_wheel_holds_exactly_qb_and_pyspark_qb_with_their_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"qb", "pyspark_qb"}
    assert {"qb/py.typed", "pyspark_qb/py.typed", "qb/doors/http/page/index.html", "qb/core/wire/frames.py"} <= set(
        names
    )
    sources = {path.relative_to(PROJECT / room) for room in ROOMS for path in (PROJECT / room).rglob("*.py")}
    assert len([name for name in names if name.endswith(".py")]) >= len(sources)


@pytest.mark.timeout(180)
def test_the_environment_of_a_wheel_has_one_qb_and_spark_finds_its_source(installed: Path, crowded: Path) -> None:
    program = (
        "import pkgutil, qb.server, qb.cli.main; print(qb.__file__);"
        "print([found.name for found in pkgutil.iter_modules() if found.name.startswith('pyspark_')])"
    )
    command = [installed / "bin/python", "-c", program]
    shown = subprocess.run(command, cwd=crowded, capture_output=True, text=True)
    where, found = shown.stdout.splitlines()
    assert where.startswith(str(installed)), shown.stderr
    assert found == "['pyspark_qb']"


@pytest.mark.timeout(180)
def test_an_installed_client_has_types(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from qb import AsyncBrokerClient, BrokerClient, Receipt, UnknownTopic\n"
        "with BrokerClient() as broker:\n"
        "    offset: str = broker.publish('t', b'x').offset\n"
        "client: AsyncBrokerClient = BrokerClient()\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"]
    command += ["--python-executable", installed / "bin/python", "program.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in checked.stdout.splitlines() if "error:" in line]
    assert [line.partition(" error: ")[0] for line in lines] == ["program.py:3:", "program.py:4:"], checked.stdout
    assert 'has type "int"' in lines[0]


HAS_SPARK = importlib.util.find_spec("pyspark") is not None
EXAMPLES = sorted(
    each
    for each in (PROJECT / "examples").rglob("*.py")
    if HAS_SPARK or not ("spark" in each.name or "pipeline" in each.parts)
)


def copy_examples(directory: Path) -> None:
    for each in EXAMPLES:
        copy = directory / each.relative_to(PROJECT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(each, copy)


@pytest.mark.timeout(180)
def test_mypy_accepts_the_examples_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    copy_examples(tmp_path)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"]
    command += ["--python-executable", installed / "bin/python", "examples"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    assert f"no issues found in {len(EXAMPLES)} source files" in checked.stdout


@pytest.mark.timeout(180)
@pytest.mark.skipif(shutil.which("node") is None, reason="pyright is a program for node, which is not installed")
def test_pyright_accepts_the_examples_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    copy_examples(tmp_path)
    command = [sys.executable, "-m", "pyright", "--pythonpath", installed / "bin/python", "examples"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "0 errors" in checked.stdout


def test_the_installed_project_has_this_version_and_both_commands() -> None:
    installed = importlib.metadata.distribution("qb-broker")
    assert installed.version == __version__
    commands = {each.name: each for each in installed.entry_points if each.group == "console_scripts"}
    assert {"qb", "qb-server"} == set(commands)
    assert all(callable(command.load()) for command in commands.values())
    (plugin,) = [each for each in installed.entry_points if each.group == "pytest11"]
    assert (plugin.name, plugin.value) == ("qb", "qb.testing.plugin")
