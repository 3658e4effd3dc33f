"""numpy, for work on many messages at once without a step of Python for each."""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy starts a thread for each processor

import numpy as np
from numpy.typing import NDArray

__all__ = ["FEW", "Flags", "Numbers", "Offsets", "begins_of", "distinct", "np"]

FEW = 32  # messages: so many take less time one by one than by columns

Offsets = NDArray[np.int64]
Numbers = NDArray[np.int32]
Flags = NDArray[np.bool_]


def begins_of(ordered: Numbers) -> Offsets:
    """Return where each number begins among numbers in order, none of which is negative."""
    return np.flatnonzero(np.diff(ordered, prepend=-1))


def distinct(numbers: Numbers) -> list[int]:
    """Return each of the numbers once, in order. None may be negative."""
    ordered = np.sort(numbers)
    found: list[int] = ordered[begins_of(ordered)].tolist()
    return found
