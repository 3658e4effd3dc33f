"""Arithmetic on runs of offsets, without looking at each offset.

A run is a `range` with a positive step. A backlog dealt out to k subscribers is k runs of step k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd

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
    common = gcd(a.step, b.step)
    apart, remainder = divmod(b.start - a.start, common)
    if remainder:
        return EMPTY
    members = apart * pow(a.step // common, -1, b.step // common) % (b.step // common)  # of a, up to the first in b
    step = a.step // common * b.step
    first = a.start + members * a.step
    first += max(0, -((first - low) // step)) * step
    return range(first, high + 1, step) if first <= high else EMPTY


def runs_of(offsets: Iterable[int]) -> Iterator[range]:
    """Cut a row of offsets into runs, keeping its order."""
    upcoming = iter(offsets)
    for first in upcoming:
        last, step = first, None  # no step: a run of one so far
        for offset in upcoming:
            gap = offset - last
            if gap == step:
                last = offset
            elif step is None and gap > 0:
                last, step = offset, gap
            else:
                yield range(first, last + 1, step or 1)
                first = last = offset
                step = None
        yield range(first, last + 1, step or 1)


def runs_of_ascending(offsets: list[int]) -> Iterable[range]:
    """Cut ascending offsets into runs, at once if they are one."""
    if offsets[-1] - offsets[0] == len(offsets) - 1:
        return [range(offsets[0], offsets[-1] + 1)]
    return runs_of(offsets)
