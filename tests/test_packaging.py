"""What pip is told about the project is true of the project."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from core.version import __version__

PROJECT = Path(__file__).resolve().parent.parent
SETUP = configparser.ConfigParser()
SETUP.read(PROJECT / "setup.cfg")
PACKAGES, DATA = SETUP["options"]["packages"].split(), SETUP["options.package_data"]
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


def test_every_package_is_listed_and_ships_its_types() -> None:
    found = {
        ".".join(each.parent.relative_to(PROJECT).parts)
        for room in ("cli", "clients", "core", "gateways", "pyspark_qb", "storage")
        for each in (PROJECT / room).rglob("__init__.py")
    }
    assert set(PACKAGES) == found | {"client-stubs"}
    for package in found:
        assert (PROJECT / package.partition(".")[0] / "py.typed").exists(), package
    assert DATA["*"] == "py.typed"


@pytest.mark.timeout(120)
def test_whoever_installs_it_has_types_for_what_he_imports(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    for module in SETUP["options"]["py_modules"].split():
        shutil.copy(PROJECT / f"{module}.py", site)
    for package in PACKAGES:
        source, target = PROJECT.joinpath(*package.split(".")), site.joinpath(*package.split("."))
        target.mkdir(parents=True)
        for pattern in ("*.py", DATA["*"], *DATA.get(package, "").split()):
            for file in source.glob(pattern):
                target.joinpath(file.relative_to(source)).parent.mkdir(exist_ok=True)
                shutil.copy(file, target / file.relative_to(source))
    (tmp_path / "program.py").write_text(
        "from client import AsyncBrokerClient, BrokerClient, Receipt, UnknownTopic, main\n"
        "with BrokerClient() as broker:\n"
        "    offset: str = broker.publish('t', b'x').offset\n"
        "client: AsyncBrokerClient = BrokerClient()\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"]
    command += ["--python-executable", tmp_path / "venv" / "bin" / "python", "program.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = [line for line in checked.stdout.splitlines() if "error:" in line]
    assert [line.partition(" error: ")[0] for line in lines] == ["program.py:3:", "program.py:4:"], checked.stdout
    assert 'has type "int"' in lines[0]


def test_the_installed_project_has_this_version_and_both_commands() -> None:
    installed = importlib.metadata.distribution("qb-broker")
    assert installed.version == __version__
    commands = {each.name: each for each in installed.entry_points if each.group == "console_scripts"}
    assert {"qb", "qb-server"} == set(commands)
    assert all(callable(command.load()) for command in commands.values())
