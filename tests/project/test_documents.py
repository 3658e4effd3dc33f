"""The documents name files that exist, and say things plainly."""

from __future__ import annotations

import re

import pytest

from tests.support.brokers import ROOT as PROJECT

DOCUMENTS = [*sorted((PROJECT / "docs").glob("*.md")), PROJECT / "README.md", PROJECT / "CONTRIBUTING.md"]
FOLDERS = "core|storage|doors|clients|cli|pyspark_qb|tests|tools|benchmarks|examples|src|docs"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*\w/?)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_every_file_that_a_document_names_exists(document) -> None:
    named = set(PATH.findall(document.read_text()))
    assert {path for path in named if not (PROJECT / path).exists() and not (PROJECT / f"{path}.py").exists()} == set()
