"""Run seeds: python -m tests.simulation [--replicated] [--seeds N] [--first SEED] [--processes N].

Exits with 1 if a promise broke.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.run import OPERATIONS, Outcome, simulate


def main() -> int:
    """Run what the command line names; prints each failing seed with its last steps."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="publishes of one seed, at least")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at once")
    parser.add_argument("--replicated", action="store_true", help="cells of several brokers on one journal")
    arguments = parser.parse_args()
    began, failed, operations = time.monotonic(), 0, 0
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    with ProcessPoolExecutor(arguments.processes) as pool:
        for outcome in pool.map(partial(_simulate, arguments.operations, arguments.replicated), seeds, chunksize=4):
            operations += outcome[0].operations
            if outcome[1]:
                failed += 1
                show(*outcome, "--replicated " if arguments.replicated else "")
    seconds = time.monotonic() - began
    print(f"{len(seeds)} seeds, {operations} operations, {failed} failed, {seconds:.0f} s")
    return 1 if failed else 0


def _simulate(operations: int, replicated: bool, seed: int) -> tuple[Outcome, str]:
    """Run one seed in a process of the pool; an error travels as text."""
    outcome = simulate(seed, operations, replicated=replicated)
    text = "".join(traceback.format_exception(outcome.error)) if outcome.error else ""
    return outcome._replace(error=None), text


def show(outcome: Outcome, error: str, mode: str = "") -> None:
    """Print how a seed ended."""
    print(f"\n=== seed {outcome.seed}: python -m tests.simulation {mode}--first {outcome.seed} --seeds 1")
    print("\n".join(outcome.last_steps))
    print(error)


if __name__ == "__main__":
    sys.exit(main())
