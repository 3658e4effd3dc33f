"""Damage data directories: python -m tests.damage [--count N] [--first SEED]. Exits with 1 if any damage was silent,
crashed verify or the start, or took out more than the damaged file describes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.damage.directories import make_clean, make_killed
from tests.damage.trials import BAD, Original, Outcome, Trial, original, try_seed

MEMORY = Path("/dev/shm")  # where syncs cost nothing, if there is such a place
_originals: list[Original] = []  # of a process of the pool


def main() -> int:
    """Run the trials that the command line names, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.damage", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="how many damages")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at once")
    parser.add_argument("--verbose", action="store_true", help="print every trial")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        seeds = range(arguments.first, arguments.first + arguments.count)
        trials = list(run(Path(scratch), seeds, arguments.processes))
    for trial in trials:
        if trial.outcome in BAD or arguments.verbose:
            print(f"\n=== seed {trial.seed}, {trial.directory}: {trial.outcome}: {trial.damage}\n{trial.details}")
    print(table(trials))
    print(f"{len(trials)} damages in {time.monotonic() - began:.0f} s; silent: {_count(trials, Outcome.SILENT)}")
    return 1 if any(trial.outcome in BAD for trial in trials) else 0


def run(scratch: Path, seeds: Iterable[int], processes: int) -> Iterator[Trial]:
    """Make the directories, and yield what becomes of each seed."""
    paths = {"clean": make_clean(scratch / "clean"), "killed": make_killed(scratch / "killed")}
    if processes == 1:
        _begin(paths, scratch)
        yield from map(_try, seeds, [scratch] * len(list(seeds)))
        return
    with ProcessPoolExecutor(processes, initializer=_begin, initargs=(paths, scratch)) as pool:
        seeds = list(seeds)
        yield from pool.map(_try, seeds, [scratch] * len(seeds), chunksize=8)


def _begin(paths: dict[str, Path], scratch: Path) -> None:
    _originals[:] = [original(name, path, scratch / f"original-{os.getpid()}") for name, path in paths.items()]


def _try(seed: int, scratch: Path) -> Trial:
    return try_seed(seed, _originals, scratch / f"copy-{os.getpid()}")


def table(trials: list[Trial]) -> str:
    """Return how often each kind of damage had which outcome."""
    kinds = sorted({trial.damage.kind for trial in trials})
    counts = Counter((trial.damage.kind, trial.outcome) for trial in trials)
    lines = [f"{'damage':10}" + "".join([f"{outcome:>22}" for outcome in Outcome])]
    lines += [f"{kind:10}" + "".join([f"{counts[kind, outcome]:22}" for outcome in Outcome]) for kind in kinds]
    return "\n".join([*lines, f"{'all':10}" + "".join([f"{_count(trials, outcome):22}" for outcome in Outcome])])


def _count(trials: list[Trial], outcome: Outcome) -> int:
    return sum([trial.outcome == outcome for trial in trials])


if __name__ == "__main__":
    sys.exit(main())
