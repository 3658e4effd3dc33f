"""The documents name files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.brokers import ROOT as PROJECT

DOCUMENTS = [*sorted((PROJECT / "docs").glob("*.md")), PROJECT / "README.md", PROJECT / "CONTRIBUTING.md"]
FOLDERS = "core|storage|doors|clients|cli|cluster|replication|pyspark_qb|tests|tools|benchmarks|examples|src|docs"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*\w/?)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_every_file_that_a_document_names_exists(document) -> None:
    named = set(PATH.findall(document.read_text()))
    assert {path for path in named if not (PROJECT / path).exists() and not (PROJECT / f"{path}.py").exists()} == set()


NAMED = re.compile(rf"`((?:{FOLDERS})/[\w./-]+\.py)`: (`\w+`(?:, `\w+`)*)")


def test_architecture_answers_where_things_are_by_file_and_name() -> None:
    section = (PROJECT / "docs/ARCHITECTURE.md").read_text().partition("## Where is it?\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| what")]
    assert len(rows) >= 15
    assert [row for row in rows if len(NAMED.findall(row)) != len(PATH.findall(row))] == [], "a file without a name"
    found = [(path, name) for path, names in NAMED.findall(section) for name in re.findall(r"\w+", names)]
    assert [each for each in found if each[1] not in defined_in(PROJECT / each[0])] == []


def defined_in(path: Path) -> set[str]:
    """Return the functions, classes and constants that a file defines."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    constants = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {node.name for node in nodes if isinstance(node, kinds)} | constants
