"""Print who imports whom, by room, and every cycle between rooms: `python tools/import_graph.py [--modules]`.

A room is a folder of the package. With --modules the graph is that of single modules.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PACKAGES = {"qb": PROJECT / "src" / "qb", "pyspark_qb": PROJECT / "pyspark_qb"}
LINKED = ("core", "storage", "doors", "clients", "cli", "testing", "replication", "cluster")  # what src/qb links to


def modules() -> dict[str, Path]:
    """Return every module of the installed packages by its full name."""
    found: dict[str, Path] = {}
    for package, directory in PACKAGES.items():
        found |= {_name(package, directory, path): path for path in directory.rglob("*.py")}
    for room in LINKED:
        directory = PROJECT / room
        found |= {_name(f"qb.{room}", directory, path): path for path in directory.rglob("*.py")}
    return dict(sorted(found.items()))


def _name(package: str, directory: Path, path: Path) -> str:
    return ".".join((package, *path.relative_to(directory).with_suffix("").parts)).removesuffix(".__init__")


def imports(source: str, known: Mapping[str, object]) -> Iterator[str]:
    """Yield the full name of every module that a source imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports name the module in full"
            origin = node.module or ""
            yield from {name if (name := f"{origin}.{alias.name}") in known else origin for alias in node.names}


def graph(by_module: bool = False) -> dict[str, set[str]]:
    """Return, for each room (or module), those that it imports."""
    known = modules()
    edges: dict[str, set[str]] = {}
    for name, path in known.items():
        here = name if by_module else room_of(name, path)
        targets = edges.setdefault(here, set())
        for each in imports(path.read_text(), known):
            if each in known:
                targets.add(each if by_module else room_of(each, known[each]))
    return {here: targets - {here} for here, targets in edges.items()}


def room_of(name: str, path: Path) -> str:
    """Return the folder that a module stands in, as a dotted name."""
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other (Tarjan's strongly connected components of two or more)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in sorted(edges.get(node, ())):
            if target not in order:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == order[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(edges):
        if node not in order:
            visit(node)
    return found


def main() -> None:
    """Print the graph and its cycles."""
    edges = graph("--modules" in sys.argv[1:])
    for here, targets in sorted(edges.items()):
        print(f"{here}: {', '.join(sorted(targets)) or '-'}")
    found = cycles(edges)
    print("\nno cycles" if not found else "\ncycles:\n" + "\n".join("  " + ", ".join(each) for each in found))


if __name__ == "__main__":
    main()
