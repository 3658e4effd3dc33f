"""What pip is told about the project is true of the project."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
from pathlib import Path

import pytest

from core.version import __version__

PROJECT = Path(__file__).resolve().parent.parent
SETUP = configparser.ConfigParser()
SETUP.read(PROJECT / "setup.cfg")
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


def test_every_package_ships_its_types() -> None:
    patterns = [pattern.rstrip("*") for pattern in SETUP["options.packages.find"]["include"].split()]
    packages = [PROJECT / name for name in patterns if (PROJECT / name).is_dir()]
    assert {"core", "storage", "clients", "cli"} <= {package.name for package in packages}
    for package in packages:
        assert (package / "__init__.py").exists(), package
        assert (package / "py.typed").exists(), package
    assert SETUP["options.package_data"]["*"] == "py.typed"


def test_the_installed_project_has_this_version_and_both_commands() -> None:
    installed = importlib.metadata.distribution("qb-broker")
    assert installed.version == __version__
    commands = {each.name: each for each in installed.entry_points if each.group == "console_scripts"}
    assert {"qb", "qb-server"} == set(commands)
    assert all(callable(command.load()) for command in commands.values())
