"""The properties of many messages at once, as Arrow columns.

Properties are `name=value` NUL for each; of a repeated name the first counts (docs/PROTOCOL.md).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from pyspark_qb.arrow.spans import Bytes, Numbers, gather, spans
from qb.core.wire.frames import RESERVED, decode_properties

KEY = "key"
MAP = pa.map_(pa.string(), pa.string())


class PropertyColumns(Protocol):
    """The properties of messages."""

    def keys(self) -> pa.StringArray:
        """Return the key of each message, null where it has none."""

    def maps(self) -> pa.MapArray:
        """Return the properties of each message, without those that the broker gives a meaning."""


def property_columns(data: Bytes, starts: Numbers, lengths: Numbers) -> PropertyColumns:
    """Return the properties of messages, which begin at `starts` in the data and are `lengths` long."""
    if len(starts) and (lengths == lengths[0]).all():
        each = gather(data, starts, f"({int(lengths[0])},)u1")
        first = each[0].tobytes()
        if each.tobytes() == first * len(each):  # most often they are all the same
            return SameProperties(first, len(each))
    return _Items(spans(data, starts, starts + lengths))


class SameProperties:
    """The same properties for so many messages."""

    def __init__(self, encoded: bytes, count: int) -> None:
        self._properties, self._count = decode_properties(encoded), count

    def keys(self) -> pa.StringArray:
        return pa.repeat(pa.scalar(self._properties.get(KEY), pa.string()), self._count)

    def maps(self) -> pa.MapArray:
        chosen = [(name, value) for name, value in self._properties.items() if name not in RESERVED]
        return pa.array([chosen], MAP).take(pa.array(np.zeros(self._count, np.int32)))


class _Items:
    """Every single property in rows of encoded ones: which row it is of, its name and its value."""

    def __init__(self, rows: pa.BinaryArray) -> None:
        _, offsets, data = rows.buffers()
        self._count = len(rows)
        self._bytes = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
        row_ends = np.frombuffer(offsets, np.int32)[1 : self._count + 1] if self._count else np.empty(0, np.int32)
        self._ends = np.flatnonzero(self._bytes == 0)
        self._starts = np.concatenate(([0], self._ends[:-1] + 1)) if len(self._ends) else self._ends
        self._equals = _first_at_or_after(np.flatnonzero(self._bytes == ord("=")), self._starts, len(self._bytes))
        if (self._equals > self._ends).any():
            raise ValueError("stored properties are not of the form name=value")
        self._row = np.searchsorted(row_ends, self._starts, side="right")

    def keys(self) -> pa.StringArray:
        found = self._first_of_each(self._has_name(KEY))
        where = np.full(self._count, -1)
        where[self._row[found]] = found
        return self._values.take(pa.array(where, pa.int64(), mask=where < 0))

    def maps(self) -> pa.MapArray:
        chosen = self._first_of_each(~self._has_name(*RESERVED))
        counts = np.bincount(self._row[chosen], minlength=self._count)
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        items = pa.array(chosen)
        return pa.MapArray.from_arrays(pa.array(offsets), self._names.take(items), self._values.take(items), MAP)

    @cached_property
    def _names(self) -> pa.StringArray:
        return spans(self._bytes, self._starts, self._equals).cast(pa.string())

    @cached_property
    def _values(self) -> pa.StringArray:
        return spans(self._bytes, self._equals + 1, self._ends).cast(pa.string())

    @cached_property
    def _numbered(self) -> tuple[Any, list[str]]:
        """Return a number for each item's name, and the names by number."""
        encoded = self._names.dictionary_encode()
        return np.asarray(encoded.indices), encoded.dictionary.to_pylist()

    def _has_name(self, *names: str) -> Any:
        numbers, known = self._numbered
        return np.isin(numbers, [number for number, name in enumerate(known) if name in names])

    def _first_of_each(self, wanted: Any) -> Numbers:
        """Return the wanted items, of those with the same row and name only the first."""
        items = np.flatnonzero(wanted)
        numbers, known = self._numbered
        both = self._row[items] * len(known) + numbers[items]
        if (np.diff(both) > 0).all():  # every row has its names in the same order, and none twice
            return items
        _, first = np.unique(both, return_index=True)
        return items[np.sort(first)]


def _first_at_or_after(positions: Numbers, starts: Numbers, nowhere: int) -> Numbers:
    """Return for each start the first of the sorted positions that is not before it."""
    return np.append(positions, nowhere)[np.searchsorted(positions, starts)]
