"""Run benchmarks and print one JSON line a case.

python -m benchmarks > figures.jsonl                  all of them
python -m benchmarks publish_latency --quick          one, for a look
python -m benchmarks.report figures.jsonl             the tables of docs/BENCHMARKS.md
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.harness import BenchmarkOptions

BENCHMARKS = (
    "machine",
    "real",
    "frames",
    "publish_latency",
    "publish_pipelined",
    "publish_connections",
    "idle_connections",
    "memory",
    "recovery",
    "http",
    "deliver",
    "deliver_fan_out",
    "deliver_latency",
    "growth",
    "tails",
    "async_clients",
    "older_client",
    "compression",
    "pull",
    "secured",
    "journal",
    "cluster",
    "spark",
)


def main() -> None:
    """Run what the command line names, in the order of BENCHMARKS."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="BENCHMARK", help=f"default: all of {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="small counts: a look, not a figure")
    parser.add_argument("--rounds", type=int, default=5, help="repeats of each comparison; medians are printed")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the disk to measure")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long tails are measured (default: 300)")
    parser.add_argument("--before", type=Path, help="an older checkout, for the benchmark older_client")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    options = BenchmarkOptions(
        arguments.dir.resolve(),
        arguments.quick,
        min(arguments.rounds, 2) if arguments.quick else arguments.rounds,
        min(arguments.seconds, 4.0) if arguments.quick else arguments.seconds,
        arguments.before and arguments.before.resolve(),
    )
    for name in [each for each in BENCHMARKS if each in (arguments.names or BENCHMARKS)]:
        print(f"{name} ...", file=sys.stderr, flush=True)
        importlib.import_module(f"benchmarks.{name}").run(options)


if __name__ == "__main__":
    main()
