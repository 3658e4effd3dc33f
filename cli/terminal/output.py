"""What a command returned, shown to people or to scripts.

People get sentences and tables (drawn ones on a terminal, aligned text in a pipe); scripts get one JSON value.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from qb.cli.terminal.command import Outcome
from qb.cli.terminal.escaping import for_stream
from qb.core.wire.harmless_text import one_line

Row = Mapping[str, Any]
Escape = Callable[[str], str]


def emit(outcome: Outcome, *, as_json: bool, raw: bool) -> None:
    """Print what a command returned to standard output; on a terminal escaped, unless it shall be `raw`.

    Raises BrokenPipeError when the reader of standard output has gone.
    """
    if outcome.data is None and outcome.text is None:
        return  # the command has shown everything as it came
    if as_json:
        print(json.dumps(outcome.data, indent=2 if sys.stdout.isatty() else None))
    elif outcome.text is not None:
        text = outcome.text if raw else for_stream(outcome.text, sys.stdout)
        print(text, end="\n" if text else "")
    else:
        _show(outcome.data, one_line if sys.stdout.isatty() and not raw else str)
    sys.stdout.flush()


def complain(text: str) -> None:
    """Print one or two lines about a failure to standard error; on a terminal escaped."""
    for line in for_stream(text, sys.stderr).splitlines():
        print(f"qb: {line}", file=sys.stderr)


class EscapedLines(logging.Formatter):
    """Log lines for standard error; on a terminal escaped, as they name keys and errors."""

    def format(self, record: logging.LogRecord) -> str:
        return for_stream(super().format(record), sys.stderr)


def escape_warnings() -> None:
    """Escape what the client logs while no command has set up logging."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(EscapedLines("qb: %(message)s"))


def log_to_standard_error() -> None:
    """Show the program's log lines on standard error."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(EscapedLines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level="INFO", handlers=[lines])


def _show(data: Row | Sequence[Row], escape: Escape) -> None:
    """Show a list of rows as a table; of a single row first its plain facts, then its tables."""
    if not isinstance(data, Mapping):
        return _table(data, escape)
    facts = {name: value for name, value in data.items() if not _is_table(value)}
    width = max(map(len, map(_title, facts)))
    for name, value in facts.items():
        print(f"{_title(name).ljust(width)}  {escape(_cell(name, value))}")
    for value in data.values():
        if _is_table(value):
            print()
            _table(value, escape)
    return None


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _table(rows: Sequence[Row], escape: Escape) -> None:
    """Show rows as a table, without the columns that all of them leave empty."""
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if value is not None))
    cells = [[escape(_cell(name, row.get(name))) for name in names] for row in rows]
    to_right = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in names]
    draw = _draw_table if sys.stdout.isatty() else _print_table
    draw([_title(name) for name in names], cells, to_right)


def _print_table(titles: list[str], cells: list[list[str]], to_right: list[bool]) -> None:
    lines = [titles, *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, to_right, strict=True)
        )
        print("  ".join(aligned).rstrip())


def _draw_table(titles: list[str], cells: list[list[str]], to_right: list[bool]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD)
    for title, right in zip(titles, to_right, strict=True):
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for line in cells:
        table.add_row(*map(Text, line))
    Console().print(table)


# --- single values ---


def _title(name: str) -> str:
    return name.removesuffix("_ms").replace("_", " ")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):  # of words, or of pairs such as a topic and a partition
        return ", ".join("/".join(map(str, each)) if isinstance(each, list) else str(each) for each in value) or "-"
    return FORMATS.get(name, str)(value)


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _moment(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000).isoformat(" ", "seconds")


FORMATS: dict[str, Callable[[Any], str]] = {
    "bytes": _size,
    "retention_bytes": _size,
    "retention_hours": "{:g}".format,
    "created_ms": _moment,
    "updated_ms": _moment,
    "time_ms": _moment,
    "oldest_unacked_age": "{:.1f} s".format,
    "uptime": "{:,.1f} s".format,
    "idle": "{:.1f} s".format,
}
