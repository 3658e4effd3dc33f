"""docs/GLOSSARY.md names what is in the code, each term once."""

from __future__ import annotations

import ast
import re

from tests.support.brokers import ROOT as PROJECT
from tools.import_graph import modules

GLOSSARY = (PROJECT / "docs" / "GLOSSARY.md").read_text()
TERMS, _, AVOIDED = GLOSSARY.partition("## Words to avoid")
SOURCES = {name: path.read_text() for name, path in modules().items()}


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| term", "| avoid"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def identifiers() -> set[str]:
    """Return every name that the code defines or uses, and the last part of every module's name."""
    found = {name.rpartition(".")[2] for name in SOURCES}
    for source in SOURCES.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)  # names of properties, columns and states
    return found


def test_each_term_has_one_row() -> None:
    terms = [row[0] for row in rows(TERMS)]
    assert len(terms) > 60
    assert sorted(set(terms)) == sorted(terms)


def test_every_name_in_the_glossary_is_in_the_code() -> None:
    named = {name for row in rows(TERMS) for name in re.findall(r"`(\w+)`", row[2])}
    assert named - identifiers() == set()


def words(identifier: str) -> set[str]:
    """Return the words of a snake_case or CamelCase name, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def test_no_identifier_uses_a_word_that_the_glossary_avoids() -> None:
    avoided = {word for row in rows(AVOIDED) for word in re.findall(r"`(\w+)`", row[0])}
    assert len(avoided) > 15
    found = {name for name in identifiers() if words(name) & avoided and "in_flight" not in name.lower()}
    assert found == set()
