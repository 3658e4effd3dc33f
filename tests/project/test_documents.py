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


def test_code_and_documents_name_their_subjects() -> None:
    """A noun says more than a riddle; a reader who searches for the subject finds it."""
    folders = [PROJECT / folder for folder in FOLDERS.split("|")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".js", ".html")]
    riddle = re.compile("|".join(("who" + "ever", "whom" + "ever", "no" + "body", "some" + "body")), re.IGNORECASE)
    texts = {path: path.read_text() for path in [*files, PROJECT / "README.md", PROJECT / "CONTRIBUTING.md"]}
    assert {str(path.relative_to(PROJECT)) for path, text in texts.items() if riddle.search(text)} == set()
