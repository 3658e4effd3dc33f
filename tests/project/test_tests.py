"""Rules that the tests themselves keep."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.brokers import ROOT as PROJECT

TESTS = sorted((PROJECT / "tests").rglob("*.py"))
FAKE_CLOCKS = {"autojump_clock", "mock_clock", "clock"}
REAL_SOCKETS = {"a_broker", "start_broker", "broker"}


def shown(path: Path, line: int) -> str:
    return f"{path.relative_to(PROJECT)}:{line}"


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_only_one_helper_sleeps_on_the_real_clock() -> None:
    simulated = PROJECT / "tests" / "simulation"  # runs on a clock of its own
    sleeping = [
        shown(path, number)
        for path in TESTS
        if not path.is_relative_to(simulated)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\b(?:time|trio|anyio|asyncio)\.sleep\(", line)
        and not re.search(r"MockClock|autojump", path.read_text())
    ]
    assert {each.partition(":")[0] for each in sleeping} <= {"tests/support/waiting.py", "tests/project/test_tests.py"}


def test_no_fake_clock_ticks_over_real_sockets() -> None:
    both = [
        shown(path, node.lineno)
        for path in TESTS
        for node in functions(path)
        if (given := {argument.arg for argument in node.args.args}) & FAKE_CLOCKS and given & REAL_SOCKETS
    ]
    assert both == []


def test_no_test_imports_from_another() -> None:
    importing = [
        f"{path.relative_to(PROJECT)}: {match[0]}"
        for path in TESTS
        for match in re.finditer(r"^(?:from|import) tests\.[\w.]*\btest_\w+", path.read_text(), re.M)
    ]
    assert importing == []
