"""Pieces of a buffer as Arrow values, copied in one go."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


def gather(data: Bytes, positions: Numbers, kind: Any) -> Any:
    """Return the `kind` (a numpy type) that begins at each position, aligned or not."""
    wanted = np.dtype(kind)
    opaque = np.dtype(f"V{wanted.itemsize}")  # numpy copies bytes without a meaning eight times as fast
    if not len(positions):
        return np.empty(0, wanted)
    every = np.ndarray((len(data) - wanted.itemsize + 1,), opaque, data, strides=(1,))
    return every[positions].view(wanted)


def spans(data: Bytes, starts: Numbers, ends: Numbers) -> pa.BinaryArray:
    """Return the bytes from each start up to its end; the pieces must be in order and must not overlap.

    Pieces and the gaps between them are one Arrow array over the data as it is; Arrow takes every other value of it,
    which is a copy per piece in C.
    """
    if not len(starts):
        return pa.array([], pa.binary())
    borders = np.empty(2 * len(starts), np.int32)
    borders[0::2], borders[1::2] = starts, ends
    everything = pa.Array.from_buffers(pa.binary(), len(borders) - 1, [None, pa.py_buffer(borders), pa.py_buffer(data)])
    return everything.take(pa.array(np.arange(0, len(borders), 2, dtype=np.int32)))
