"""Where each log ends, written at once and not synced: what a kill must leave, up to the last batch.

A kill takes nothing that was written to a file, synced or not; a power cut may take the last half a minute of this one.
So it says what a log has at least, as the notes in the metadata do, and says it before a publisher is answered. After a
kill only the very last batch is in doubt: what came before it must be there, and it is reported if it is not.
"""

from __future__ import annotations

import logging
import struct
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from qb.storage.files import OpenFiles, write_all

logger = logging.getLogger(__name__)
NAME = "log-ends"
_SLOT = struct.Struct(">QQQI4x")  # identity of the log, first offset of its last batch, the one behind it, crc32
_NOTED = struct.Struct(">QQQ")


class NotedEnd(NamedTuple):
    """The last batch of a log, as far as it was noted."""

    first: int = 0
    next: int = 0


class FoundEnds(NamedTuple):
    """What the file says."""

    ends: dict[int, NotedEnd]  # by identity of the log
    slots: dict[int, int]  # where that is noted
    total: int  # slots
    damaged: int  # of them that are not what was written


def identity_of(topic: str, partition: int, created_ms: int) -> int:
    """Return what a log goes by; a topic that was made anew under the same name has others."""
    return int.from_bytes(blake2b(f"{topic}/{partition}/{created_ms}".encode(), digest_size=8).digest())


def read_ends(data_dir: Path) -> FoundEnds:
    """Return what is noted in a data directory; nothing if it has no such file. Blocks. Raises OSError."""
    try:
        data = (data_dir / NAME).read_bytes()
    except FileNotFoundError:
        data = b""
    ends, slots, damaged = dict[int, NotedEnd](), dict[int, int](), 0
    count = -(-len(data) // _SLOT.size)
    for slot in range(count):
        piece = data[slot * _SLOT.size : (slot + 1) * _SLOT.size]
        identity, first, end, crc = _SLOT.unpack(piece.ljust(_SLOT.size, b"\0"))
        if crc == crc32(_NOTED.pack(identity, first, end)):
            ends[identity], slots[identity] = NotedEnd(first, end), slot
        else:
            damaged += any(piece)
    return FoundEnds(ends, slots, count, damaged)


def ends_notes(data_dir: Path, found: FoundEnds) -> list[str]:
    """Return what an operator should know of the file."""
    if not found.damaged:
        return []
    what = f"{data_dir / NAME}: {found.damaged} of {found.total} notes of where logs end are not what was written"
    return [f"{what}: nothing is lost, and their logs are believed as far as the metadata proves them"]


class LogEnds:
    """The notes of a running broker. Belongs to the event loop; a note is one short write and raises nothing."""

    def __init__(self, files: OpenFiles, data_dir: Path) -> None:
        """Read what the last broker noted. Raises OSError."""
        self._files, self._path = files, str(data_dir / NAME)
        self.found = read_ends(data_dir)
        self._slots: dict[int, int] = {}  # of the logs that there are, by identity
        self._free: list[int] | None = None  # slots of logs that are gone; known when all logs were looked up
        self._fails = False

    def of(self, identity: int) -> NotedEnd:
        """Return what is noted of a log. A start asks for every log that there is, before anything is noted."""
        if identity in self.found.slots:
            self._slots[identity] = self.found.slots[identity]
        return self.found.ends.get(identity, NotedEnd())

    def note(self, identity: int, first: int, end: int) -> None:
        """Note that a log ends with a batch that begins with the offset `first`, and has everything before `end`."""
        crc = crc32(_NOTED.pack(identity, first, end))
        try:
            with self._files.use(self._path, create=True) as fd:
                write_all(fd, _SLOT.pack(identity, first, end, crc), self._slot_of(identity) * _SLOT.size)
            self._fails = False
        except OSError as error:
            if not self._fails:
                logger.warning("%s cannot be written now: %s", self._path, error.strerror)
            self._fails = True

    def _slot_of(self, identity: int) -> int:
        """Return where to note it: below the number of slots, each is of a log or free."""
        if identity not in self._slots:
            if self._free is None:
                used = set(self._slots.values())
                self._free = [slot for slot in range(self.found.total) if slot not in used]
            self._slots[identity] = self._free.pop() if self._free else len(self._slots)
        return self._slots[identity]

    def forget(self, identity: int) -> None:
        """Let another log have the slot of one that was deleted."""
        slot = self._slots.pop(identity, None)
        if slot is not None and self._free is not None:
            self._free.append(slot)
