"""The layers of docs/ARCHITECTURE.md hold, and a name means one thing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from typing import NamedTuple

import pytest

from tests.support.brokers import ROOT
from tools.import_graph import cycles, graph, imports, modules

MODULES = modules()
MOST_IN_A_ROOM = 15
# The client's side of a refusal has the broker's name for it; the async client mirrors the blocking one.
REFUSALS = "qb.clients.protocol.client_errors"
TWINS = ("qb.clients.aio", "qb.clients.blocking")
HEAVY = {"trio", "httptools", "rich", "yaml", "construct", "pyspark", "pyarrow", "numpy", "pyspark_qb"}


class Layer(NamedTuple):
    """One row of the table."""

    name: str
    prefix: str
    may_import: frozenset[str]


def layers() -> list[Layer]:
    """Return the table of docs/ARCHITECTURE.md, from the lowest layer to the highest."""
    section = (ROOT / "docs/ARCHITECTURE.md").read_text().partition("\n## Layers\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| `([\w.]+)` \| [^|]+ \| ([^|]+) \|$", section, re.MULTILINE)
    return [
        Layer(name, prefix, frozenset(may.split(", ")) if may.strip() != "nothing of ours" else frozenset())
        for name, prefix, may in rows
    ]


LAYERS = layers()


def layer_of(module: str) -> Layer:
    """Return the layer with the longest prefix of a module's name."""
    fitting = [each for each in LAYERS if module == each.prefix or module.startswith(f"{each.prefix}.")]
    return max(fitting, key=lambda each: len(each.prefix))


def test_the_table_is_there_and_looks_only_down() -> None:
    assert len(LAYERS) == 14
    above: set[str] = set()
    for layer in LAYERS:
        assert layer.may_import <= above, f"{layer.name} looks up"
        above.add(layer.name)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_layers_that_the_table_allows(name: str) -> None:
    here = layer_of(name)
    found = {
        each for each in imports(MODULES[name].read_text(), MODULES) if each.partition(".")[0] in ("qb", "pyspark_qb")
    }
    assert {each for each in found if layer_of(each).name not in here.may_import | {here.name}} == set()


def test_there_is_no_cycle_between_layers() -> None:
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for module, targets in graph(by_module=True).items():
        edges[layer_of(module).name] |= {layer_of(each).name for each in targets} - {layer_of(module).name}
    assert cycles(edges) == []


def test_there_is_no_cycle_between_modules() -> None:
    assert cycles(graph(by_module=True)) == []


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_of_spark_only_the_readers_of_files_know_storage() -> None:
    users = {
        name
        for name, path in MODULES.items()
        if name.startswith("pyspark_qb")
        and any(each.startswith("qb.storage") for each in imports(path.read_text(), MODULES))
    }
    assert users <= {f"pyspark_qb.read.{each}" for each in ("directory_logs", "segment_reader", "segment_slices")}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_opens_with_its_purpose_in_one_line(name: str) -> None:
    purpose = (ast.get_docstring(ast.parse(MODULES[name].read_text())) or "").split("\n\n")[0]
    assert purpose
    assert "\n" not in purpose, "one line"


def test_a_room_has_about_a_dozen_modules() -> None:
    counts = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    assert {str(room): count for room, count in counts.items() if count > MOST_IN_A_ROOM} == {}


def test_a_module_name_stands_for_one_module() -> None:
    names = [name.rpartition(".")[2] for name in MODULES if not name.startswith("qb.clients.aio")]
    packages = {name.rpartition(".")[2] for name, path in MODULES.items() if path.name == "__init__.py"}
    assert {name for name, count in Counter(names).items() if count > 1} - packages == set()


def test_a_class_name_stands_for_one_thing() -> None:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].add(module)
    twice = {name: modules_of for name, modules_of in found.items() if len(modules_of - {REFUSALS}) > 1}
    assert twice == {}


@pytest.mark.parametrize("room", ["core", "storage", "doors", "clients", "cli", "testing", "replication", "cluster"])
def test_a_room_is_never_imported_by_a_second_name(room: str) -> None:
    shown = subprocess.run([sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True)
    assert f"ImportError: this package is qb.{room}, not {room}" in shown.stderr


def test_what_spark_loads_by_itself_imports_nothing_more() -> None:
    pytest.importorskip("pyspark")
    show = (
        "import sys, pyspark.sql.datasource; known = {*sys.modules}; import pyspark_qb; print({*sys.modules} - known)"
    )
    shown = subprocess.run([sys.executable, "-c", show], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "{'pyspark_qb'}\n"


@pytest.mark.parametrize("name", ["qb", "client"])
def test_importing_the_client_stays_light(name: str) -> None:
    show = f"import sys, {name}; print({name}.BrokerClient.__module__, *sys.modules)"
    shown = subprocess.run([sys.executable, "-c", show], cwd=ROOT, capture_output=True, text=True, check=True)
    where, *loaded = shown.stdout.split()
    assert where == "qb.clients.blocking.client"
    assert {each.partition(".")[0] for each in loaded}.isdisjoint(HEAVY)
    assert not [each for each in loaded if each.startswith(("qb.storage", "qb.server", "qb.doors", "qb.cli."))]


def test_no_old_name_of_a_module_is_left_in_code_or_documents() -> None:
    old = re.compile(
        r"(?:from|(?<!qb )import) (?:core|storage|clients|cli|gateways|server|client)\b(?! import BrokerClient`)"
        r"|\bgateways/"
    )
    documents = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    programs = [path for room in ("tests", "benchmarks", "examples") for path in (ROOT / room).rglob("*.py")]
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in [*MODULES.values(), *documents, *programs]
        for match in old.finditer(path.read_text())
        if path.name != "test_rooms.py"
    }
    assert found == set()
