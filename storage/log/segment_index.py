"""Where each record of a segment starts and when it was appended."""

from __future__ import annotations

import os
import sys
import threading
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress

from qb.core.wire.columns import np
from qb.storage.files import OpenFiles, datasync, read_all, read_cached, write_all
from qb.storage.log.record_positions import ENTRY as ENTRY
from qb.storage.log.record_positions import RecordPositions

FEW = 16  # entries for which columns do not pay
WRITE_AT = 4096  # bytes of entries that gather before they are written


def encode(positions: Sequence[int], append_ms: int, base: int = 0) -> bytes:
    """Return the entries of records that were appended at the same time; the positions are counted from `base`."""
    if len(positions) <= FEW:
        return b"".join([ENTRY.pack(base + position, append_ms) for position in positions])
    entries = np.empty((len(positions), 2), np.uint64)
    if isinstance(positions, range):  # of records that are all as long as each other
        entries[:, 0] = np.arange(positions.start, positions.stop, positions.step, dtype=np.uint64)
    else:
        entries[:, 0] = positions if isinstance(positions, array) else array("Q", positions)
    entries[:, 0] += np.uint64(base)
    entries[:, 1] = append_ms
    if sys.byteorder == "little":
        entries.byteswap(inplace=True)
    return entries.tobytes()


class IndexEntries:
    """Entries on their way into bytes, without a step for each."""

    def __init__(self) -> None:
        self._positions = array("Q")
        self._times = array("Q")

    def add(self, positions: Iterable[int], append_ms: int) -> None:
        """Add records that were appended at the same time."""
        self._positions += array("Q", positions)
        self._times += array("Q", [append_ms]) * (len(self._positions) - len(self._times))

    def encode(self) -> bytes:
        """Return what belongs into the file."""
        entries = array("Q", bytes(ENTRY.size * len(self._times)))
        entries[0::2] = self._positions
        entries[1::2] = self._times
        if sys.byteorder == "little":
            entries.byteswap()
        return entries.tobytes()


class IndexFile:
    """One .idx file. append() never waits for the disk; the other methods belong to any thread."""

    def __init__(self, files: OpenFiles, path: str) -> None:
        self.path = path
        self.believed = False  # was every entry compared with the log, or written with it, in this process?
        self._files = files
        self._writing = threading.Lock()  # one writes the file at a time
        self._lock = threading.Lock()  # guards what follows; never held while waiting for the disk
        self._written = 0
        self._unwritten = b""

    def trust(self, count: int) -> None:
        """Take the file as it is: it was found to have so many entries."""
        self._written = count

    def append(self, entries: bytes) -> None:
        """Add entries. They wait in memory for write(): no publish is refused or delayed for a cache."""
        with self._lock:
            self._unwritten += entries

    @property
    def is_due(self) -> bool:
        """Do enough entries wait in memory to be worth a write?"""
        return len(self._unwritten) >= WRITE_AT

    def write(self) -> None:
        """Write what waits in memory."""
        with self._writing:
            with self._lock:
                first, entries = self._written, self._unwritten
            if not entries:
                return
            try:
                with self._files.use(self.path, create=True) as fd:
                    write_all(fd, entries, first * ENTRY.size)
            except OSError:
                return  # the disk has no room, perhaps: it is tried again next time
            self._note_written(first + len(entries) // ENTRY.size)

    def _note_written(self, count: int) -> None:
        """The file has so many entries now."""
        with self._lock:
            if count > self._written:
                self._unwritten = self._unwritten[(count - self._written) * ENTRY.size :]
                self._written = count

    def entry(self, number: int, *, cached: bool = False) -> tuple[int, int]:
        """Return position and append time of a record; (0, 0) if the file lacks it.

        Raises OSError; with `cached` BlockingIOError where the disk would be asked.
        """
        with self._lock:
            written, unwritten = self._written, self._unwritten
        if number >= written and unwritten:
            return self._unpack(unwritten, (number - written) * ENTRY.size)
        try:
            with self._files.use(self.path, if_open=cached) as fd:
                read = read_cached if cached else read_all
                return self._unpack(read(fd, ENTRY.size, number * ENTRY.size), 0)
        except FileNotFoundError:
            return 0, 0

    def entries(self, first: int, count: int, *, cached: bool = False) -> RecordPositions:
        """Return positions and append times of `count` records from the first-th on, fewer if it has no more.

        Raises as entry().
        """
        try:
            data = self._bytes(first * ENTRY.size, (first + count) * ENTRY.size, cached)
        except FileNotFoundError:
            data = b""
        return RecordPositions(data[: len(data) - len(data) % ENTRY.size])

    def _bytes(self, start: int, stop: int, cached: bool) -> bytes:
        with self._lock:
            written, unwritten = self._written * ENTRY.size, self._unwritten
        waiting = unwritten[max(0, start - written) : max(0, stop - written)]
        if start >= written:
            return waiting
        read = read_cached if cached else read_all
        with self._files.use(self.path, if_open=cached) as fd:
            return read(fd, min(stop, written) - start, start) + waiting

    def holds(self, first: int, entries: bytes) -> bool:
        """Say whether these are the entries from the first-th on."""
        start = first * ENTRY.size
        try:
            return self._bytes(start, start + len(entries), False) == entries
        except FileNotFoundError:
            return False

    def first_at(self, time_ms: int, count: int) -> int:
        """Return the number of the first of `count` records appended at `time_ms` or later, or `count`."""
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if self.entry(middle)[1] < time_ms:
                low = middle + 1
            else:
                high = middle
        return low

    def sync(self) -> None:
        """Ask for the entries to be on stable storage; if they do not get there, the next start rebuilds them."""
        self.write()
        with suppress(OSError), self._files.use(self.path) as fd:
            datasync(fd)

    def matches(self, entries: bytes) -> bool:
        """Say whether the file holds exactly these entries."""
        try:
            with self._files.use(self.path) as fd:
                return os.fstat(fd).st_size == len(entries) and read_all(fd, len(entries), 0) == entries
        except FileNotFoundError:
            return False

    def replace(self, entries: bytes) -> None:
        """Write the first entries anew, and cut off what was not appended here. Raises OSError."""
        with self._writing:
            self._files.forget(self.path)
            with self._files.use(self.path, create=True) as fd:
                write_all(fd, entries, 0)
                os.ftruncate(fd, max(len(entries), self._written * ENTRY.size))
                datasync(fd)
            self._note_written(len(entries) // ENTRY.size)

    @staticmethod
    def _unpack(data: bytes, at: int) -> tuple[int, int]:
        return ENTRY.unpack_from(data, at) if len(data) >= at + ENTRY.size else (0, 0)
