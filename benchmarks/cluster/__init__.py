"""How fast is a cell of brokers on JetStream with three replicas, and how long do publishers wait when something dies?

All of it runs on this machine: three NATS nodes that sync before they answer, the brokers, and the clients.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from benchmarks.cluster import gaps, rates, reads
from benchmarks.cluster.cell import NAME, Cell
from benchmarks.harness import BenchmarkOptions, PeerMissing, scratch, skipped
from benchmarks.journal import nats_nodes


def run(options: BenchmarkOptions) -> None:
    """Print every line of the cell's speed with its target."""
    for part in (rates.compare, reads.compare, gaps.compare):
        with scratch(options) as directory, ExitStack() as stack:
            try:
                cell = _cell(stack, directory, brokers=3 if part is gaps.compare else 2)
                part(options, directory, cell)
            except PeerMissing as missing:
                skipped(NAME, "cluster", str(missing))
                return


def _cell(stack: ExitStack, directory: Path, brokers: int) -> Cell:
    cell = Cell(stack, directory, stack.enter_context(nats_nodes(directory)))
    for _ in range(brokers):
        cell.start_broker()
    return cell
