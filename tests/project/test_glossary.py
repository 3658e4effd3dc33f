"""docs/GLOSSARY.md names what is in the code, each term once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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


def avoided_words() -> set[str]:
    return {word for row in rows(AVOIDED) for word in re.findall(r"`(\w+)`", row[0])}


def test_no_identifier_uses_a_word_that_the_glossary_avoids() -> None:
    assert len(avoided_words()) > 15
    found = {name for name in identifiers() if words(name) & avoided_words() and "in_flight" not in name.lower()}
    assert found == set()


SUBJECTLESS = {f"{who}{end}" for who in ("any", "every", "no", "some") for end in ("body", "one")} - {"noone"}
SUBJECTLESS |= {"no one", "whoever", "whomever", "whosoever"}
OWN_MEANING = re.compile(r"(in|out of)[ _-]flight", re.IGNORECASE)
KINDS = (".py", ".md", ".js", ".html", ".css", ".cfg", ".toml")
FOLDERS = ("benchmarks", "cli", "clients", "core", "docs", "doors", "examples", "pyspark_qb")
FOLDERS += ("replication", "src/qb", "storage", "testing", "tests", "tools")


def texts() -> dict[str, str]:
    """Return the text of every file that people read, by its path; of the glossary, what stands above the words."""
    inside = [path for folder in FOLDERS for path in (PROJECT / folder).rglob("*") if path.suffix in KINDS]
    paths = [*inside, *(path for path in PROJECT.glob("*") if path.suffix in KINDS)]
    found = {str(path.relative_to(PROJECT)): path.read_text() for path in paths if path != Path(__file__)}
    return found | {"docs/GLOSSARY.md": TERMS}


def lines_with(avoided: set[str]) -> list[str]:
    """Return every line that has one of these words, alone or as a part of a snake_case name."""
    pattern = re.compile(rf"(?<![A-Za-z])({'|'.join(sorted(avoided))})(?![A-Za-z])", re.IGNORECASE)
    lines = [(path, line) for path, text in texts().items() for line in text.splitlines()]
    return [f"{path}: {line.strip()}" for path, line in lines if pattern.search(OWN_MEANING.sub("", line))]


def test_sentences_name_their_subjects() -> None:
    """A reader who searches for the subject of a sentence finds a noun."""
    assert lines_with(SUBJECTLESS) == []


def test_neither_sentences_nor_the_names_of_tests_use_a_word_that_the_glossary_avoids() -> None:
    assert lines_with(avoided_words() - {"together"}) == []  # "together" is avoided as a name only
