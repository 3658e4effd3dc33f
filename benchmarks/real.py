"""The work that people have, at default settings: mixed JSON with keys, handlers that parse, many connections.

Every broker does the same work in turn with the same bodies, keys and parser, each at its best setting with the same
durability. Ratios of the rounds decide; rates are for the reader.
"""

from __future__ import annotations

from benchmarks.harness import BenchmarkOptions
from benchmarks.work import connections, other_doors, publish_and_handle, windows_and_transactions


def run(options: BenchmarkOptions) -> None:
    """Print every case."""
    publish_and_handle.run(options)
    connections.run(options)
    windows_and_transactions.run(options)
    other_doors.run(options)
