"""Where records start, in the very bytes in which an index has it on disk.

A reader of a long stretch needs only a few of the numbers, to find its borders. So a number is decoded when it is
asked for, and all of them only when all are iterated.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import sub
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import numpy as np

ENTRY = struct.Struct(">QQ")  # position in the log, append time in ms
_NUMBER = struct.Struct(">Q")


class RecordPositions(Sequence[int]):
    """Positions of consecutive records, counted from `base`, and their append times."""

    __slots__ = ("_base", "_entries")

    def __init__(self, entries: bytes | memoryview, base: int = 0) -> None:
        """`entries` are whole ones."""
        self._entries, self._base = memoryview(entries), base

    def since(self, base: int) -> RecordPositions:
        """Return the same, counted from another place."""
        return RecordPositions(self._entries, base)

    def first(self, count: int) -> RecordPositions:
        """Return the first `count` of them."""
        return RecordPositions(self._entries[: count * ENTRY.size], self._base)

    def time(self, number: int) -> int:
        """Return when the number-th record was appended, in ms."""
        return _NUMBER.unpack_from(self._entries, number * ENTRY.size + _NUMBER.size)[0]  # type: ignore[no-any-return]

    def words(self) -> bytes:
        """Return the low half of every position in the log, big-endian."""
        return self._entries.cast("I")[1 :: ENTRY.size // 4].tobytes()

    def __len__(self) -> int:
        return len(self._entries) // ENTRY.size

    @overload
    def __getitem__(self, number: int) -> int: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[int]: ...
    def __getitem__(self, number: int | slice) -> int | Sequence[int]:
        if isinstance(number, int):
            at = range(len(self))[number] * ENTRY.size
            return _NUMBER.unpack_from(self._entries, at)[0] - self._base  # type: ignore[no-any-return]
        start, stop, step = number.indices(len(self))
        if step != 1:
            return list(self)[number]
        return RecordPositions(self._entries[start * ENTRY.size : stop * ENTRY.size], self._base)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return all of them as a column of numpy."""
        import numpy as np

        return (np.frombuffer(self._entries, ">u8")[::2].astype(np.int64) - self._base).astype(dtype, copy=False)

    def __iter__(self) -> Iterator[int]:
        numbers = array("Q", bytes(self._entries))
        if sys.byteorder == "little":
            numbers.byteswap()
        return map(sub, numbers[0::2], repeat(self._base))


def words(positions: Sequence[int]) -> bytes:
    """Return positions as big-endian u32, counted from one place for all of them, wherever it is, and modulo 2^32."""
    if isinstance(positions, RecordPositions):
        return positions.words()
    numbers = array("I", positions)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers.tobytes()
