"""Ascending offsets as columns: which lie near each other, and the runs that they are."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from qb.core.wire.columns import Offsets, np
from qb.core.wire.offset_runs import runs_of

NEAR = 256  # offsets from one message to the next: up to here they share a span


def near_each_other(offsets: Offsets) -> list[slice]:
    """Cut ascending offsets where the next one is far away, so that a span holds few offsets that are none of them."""
    if offsets[-1] - offsets[0] <= NEAR:
        return [slice(0, len(offsets))]
    cuts = (np.flatnonzero(np.diff(offsets) > NEAR) + 1).tolist()
    return [slice(first, end) for first, end in pairwise([0, *cuts, len(offsets)])]


def marked(offsets: Offsets) -> tuple[range, bytearray | None]:
    """Return the span of ascending offsets, and a 1 for each of them in it; None instead if they fill the span."""
    first = int(offsets[0])
    span = range(first, int(offsets[-1]) + 1)
    if len(span) == len(offsets):
        return span, None
    marks = np.zeros(len(span), np.bool_)
    marks[offsets - first] = True
    return span, bytearray(marks)


def runs_of_column(offsets: Offsets) -> Iterable[range]:
    """Cut ascending offsets into runs, at once if they are one."""
    if len(offsets) > 1:
        gaps = np.diff(offsets)
        if (gaps == gaps[0]).all():
            return [range(int(offsets[0]), int(offsets[-1]) + 1, int(gaps[0]))]
    return runs_of(offsets.tolist())


def ascending(offsets: Offsets) -> Offsets:
    """Return offsets in order, each of them once; those that are negative are no offsets."""
    if (np.diff(offsets) > 0).all():  # nearly always
        return offsets
    ordered = np.sort(offsets)
    once: Offsets = ordered[np.diff(ordered, prepend=-1) > 0]
    return once
