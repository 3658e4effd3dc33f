"""Arithmetic on runs of offsets, without looking at each offset.

A run is a `range` with a positive step. A backlog dealt out to k subscribers is k runs of step k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
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


NEAR = 256  # offsets from one message to the next: up to here they share a span


def near_each_other(offsets: list[int]) -> list[list[int]]:
    """Cut ascending offsets where the next one is far away, so that a span holds few offsets that are none of them."""
    if offsets[-1] - offsets[0] <= NEAR:
        return [offsets]
    cuts = [at for at, (one, other) in enumerate(pairwise(offsets), 1) if other - one > NEAR]
    return [offsets[first:end] for first, end in pairwise([0, *cuts, len(offsets)])]


def marked(offsets: list[int]) -> tuple[range, bytearray | None]:
    """Return the span of ascending offsets, and a 1 for each of them in it; None instead if they fill the span."""
    first = offsets[0]
    span = range(first, offsets[-1] + 1)
    if len(span) == len(offsets):
        return span, None
    marks = bytearray(len(span))
    for offset in offsets:
        marks[offset - first] = 1
    return span, marks
