"""Arithmetic on runs of offsets, without looking at each offset.

A run is a `range` with a positive step. A backlog dealt out to k subscribers is k runs of step k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import lcm

EMPTY = range(0)


def intersect(a: range, b: range) -> range:
    """Return the offsets that both runs hold."""
    if not a or not b:
        return EMPTY
    low, high = max(a.start, b.start), min(a[-1], b[-1])
    if low > high:
        return EMPTY
    if a.step == b.step == 1:
        return range(low, high + 1)
    skipped = -((a.start - low) // a.step)
    # a hits every residue that it can reach in b within b.step members
    first = next((offset for offset in a[skipped : skipped + b.step] if offset in b), None)
    if first is None or first > high:
        return EMPTY
    return range(first, high + 1, lcm(a.step, b.step))


def subtract(a: range, part: range) -> list[range]:
    """Return what is left of `a` without `part`, which must be a run out of `a` (from intersect())."""
    if not part:
        return [a]
    first, last = a.index(part[0]), a.index(part[-1])
    stride = max(1, part.step // a.step)
    between = [a[first + skip : last : stride] for skip in range(1, stride)] if last > first else []
    return [run for run in (a[:first], *between, a[last + 1 :]) if run]


def runs_of(offsets: Iterable[int]) -> Iterator[range]:
    """Cut a row of offsets into runs, keeping its order."""
    run = EMPTY
    for offset in offsets:
        step = offset - run[-1] if run else 0
        if step > 0 and (len(run) == 1 or step == run.step):
            run = range(run.start, offset + 1, step)
        else:
            if run:
                yield run
            run = range(offset, offset + 1)
    if run:
        yield run
