"""The tables and pictures of docs/BENCHMARKS.md from the lines that `python -m benchmarks` printed.

python -m benchmarks.report figures.jsonl
python -m benchmarks.report figures.jsonl --pictures docs      docs/growth-partitions.svg and the others
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.pictures import GrowthPoint, picture

Line = dict[str, Any]
QUIET_LOAD = 0.5  # what a machine may have had to do before the first benchmark


def tables(lines: Iterable[Line]) -> Iterator[str]:
    """Yield Markdown: the targets with what was measured, then every case."""
    kept = list(lines)
    load = max([line.get("load_average", 0.0) for line in kept], default=0.0)
    if load > QUIET_LOAD:
        yield f"> The machine was busy otherwise (load average {load}): rates, latencies and ratios decide nothing."
        yield ""
    yield "| target | measured | |"
    yield "|---|---|---|"
    for line in kept:
        if "target" in line:
            verdict = "met" if line["met"] else "**missed**"
            yield f"| {line['target']} | {_number(line['measured'])} {line['unit']} | {verdict} |"
    yield ""
    yield "| benchmark | case | figures |"
    yield "|---|---|---|"
    for line in kept:
        if "case" in line:
            yield f"| {line['benchmark']} | {line['case']} | {_figures(line)} |"


def _figures(line: Line) -> str:
    shown = [(name, value) for name, value in line.items() if name not in ("benchmark", "case", "rounds")]
    return ", ".join(f"{name.replace('_', ' ')} {_number(value)}" for name, value in shown)


def _number(value: object) -> str:
    if isinstance(value, float) and value >= 1000:
        return f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def pictures(lines: Iterable[Line]) -> dict[str, str]:
    """Return an SVG for each thing that grows, by file name."""
    points: dict[str, list[GrowthPoint]] = {}
    for line in lines:
        if "dimension" in line:
            point = GrowthPoint(line["size"], line["publish_us"], line["push_us"])
            points.setdefault(line["dimension"], []).append(point)
    return {f"growth-{name.replace(' ', '-')}.svg": picture(name, found) for name, found in points.items()}


def main() -> None:
    """Read JSON lines from the named files, or from standard input."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: standard input")
    parser.add_argument("--pictures", type=Path, metavar="DIRECTORY", help="write the pictures of what grows there")
    arguments = parser.parse_args()
    texts = [path.read_text() for path in arguments.files] or [sys.stdin.read()]
    lines = [json.loads(line) for text in texts for line in text.splitlines() if line.strip()]
    for row in tables(lines):
        print(row)
    if arguments.pictures:
        for name, drawn in pictures(lines).items():
            (arguments.pictures / name).write_text(drawn)


if __name__ == "__main__":
    main()
