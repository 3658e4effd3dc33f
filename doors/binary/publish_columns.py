"""The frames of a PUBLISH_RUN, checked and numbered column by column: no step of Python for each message.

What is odd in any way is left to the loop over single frames, which has the words for every refusal. numpy does the
work; without it the loop does all of it.
"""

from __future__ import annotations

from array import array
from typing import Any

from qb.core.wire.columns import np
from qb.core.wire.frames import HEAD, LENGTH, OVERHEAD, MessageType
from qb.core.wire.message_rules import LATEST_MS
from qb.core.wire.runs.publish_table import LEAST, PublishTable
from qb.storage.engine import AppendRun

MOST_LENGTHS = 256  # of properties in one run: each is a pass over the messages
LONGEST_COMPARED = 1_024  # bytes of properties: comparing longer ones by columns takes longer than the loop
_HEAD = [("total", ">u4"), ("type", ">u4"), ("number", ">u8"), ("time", ">u8"), ("properties", ">u4")]  # as HEAD


class PublishColumns:
    """The frames of one run, whose lengths add up: one column for each field of their heads."""

    def __init__(self, data: bytearray, table: PublishTable) -> None:
        self.count, self.first_number = len(table.bodies), table.first_number
        self.has_one_key = False  # do all go the same way? Then said by who knows their routes
        self._data = data
        self._bodies = np.frombuffer(table.bodies, np.uint32).astype(np.int64)
        self._properties = np.frombuffer(table.properties, np.uint32).astype(np.int64)
        self._lengths = self._bodies + self._properties + OVERHEAD
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._heads = _items(data, HEAD.size)[self._starts].view(_HEAD)

    @classmethod
    def of(cls, frame: memoryview, table: PublishTable, max_body: int) -> PublishColumns | None:
        """Return the frames of a PUBLISH_RUN, or None if they are to be taken one by one.

        What is returned has no body, time or length of properties over its limit.
        """
        if len(table.bodies) < LEAST or max(table.properties) > LONGEST_COMPARED:
            return None
        columns = cls(bytearray(frame[table.frames_at :]), table)
        if int(columns._bodies.max()) > max_body or int(columns._heads["time"].max()) > LATEST_MS:
            return None
        return columns

    def first_properties(self) -> bytes:
        """Return the properties of the first message."""
        return bytes(self._data[HEAD.size : HEAD.size + int(self._properties[0])])

    def all_properties(self) -> set[bytes] | None:
        """Return the properties that occur; None if they have too many lengths."""
        counts = np.bincount(self._properties)
        lengths = np.flatnonzero(counts)
        if not lengths[0] or len(lengths) > MOST_LENGTHS:
            return None
        found: set[bytes] = set()
        for length in lengths.tolist():
            starts = self._starts if len(lengths) == 1 else self._starts[self._properties == length]
            found.update(_items(self._data, length)[starts + HEAD.size].tolist())
        return found

    def numbered(self, first_offset: int, now_ms: int, producer_id: int) -> AppendRun:
        """Return the run as DATA frames with offsets from `first_offset` on. To be called once."""
        heads, starts, times = self._heads, self._starts, self._heads["time"]
        heads["total"], heads["properties"] = self._lengths, self._properties
        heads["type"], heads["number"] = MessageType.DATA.value, np.arange(first_offset, first_offset + self.count)
        times[times == 0] = now_ms
        _items(self._data, HEAD.size)[starts] = heads.view(f"V{HEAD.size}")
        body_lengths = self._bodies.astype(">u4").view(f"V{LENGTH.size}")
        _items(self._data, LENGTH.size)[starts + HEAD.size + self._properties] = body_lengths
        positions = array("I", starts.astype(np.uint32).tobytes())
        return AppendRun(self._data, positions, first_offset, producer_id, self.first_number)


def _items(data: bytearray, size: int) -> Any:
    """Return all runs of `size` bytes in the data, by where they begin: what is written to them is written there."""
    return np.ndarray((len(data) - size + 1,), f"V{size}", data, 0, (1,))
