"""The checkpoint of a copy: whose copy it is, how far it has come, and where its files ended when they were synced."""

from __future__ import annotations

from pathlib import Path

import msgspec
from isal.isal_zlib import crc32

from qb.replication.engine.journal_positions import JournalPositions
from qb.replication.journal.record_chain import ChainPoint
from qb.storage.cut_back import ANEW, CHECKPOINT, CopyEnds
from qb.storage.files import CannotOpen, replace_durably


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a start goes back to."""

    identity: str  # of the stream that it is a copy of
    point: ChainPoint = ChainPoint()  # the journal up to here is in the files
    ends: CopyEnds | None = None  # None: the copy is yet to begin
    skip_to: int = 0  # changes of the metadata up to this position came with a snapshot
    ranges: dict[str, list[tuple[int, int, int, int]]] = {}  # as in TrimHead, of logs that are yet to begin
    positions: JournalPositions = msgspec.field(default_factory=JournalPositions)


def write_checkpoint(data_dir: Path, checkpoint: Checkpoint) -> None:
    """Store it durably in place of the one before. Blocks. Raises OSError."""
    text = msgspec.json.encode(checkpoint)
    replace_durably(data_dir / CHECKPOINT, b"%08x %s\n" % (crc32(text), text))


def read_checkpoint(data_dir: Path) -> Checkpoint | None:
    """Return it, or None if there is none. Blocks. Raises CannotOpen if it is damaged, OSError."""
    path = data_dir / CHECKPOINT
    try:
        crc, _, text = path.read_bytes().partition(b" ")
    except FileNotFoundError:
        return None
    if not text.endswith(b"\n") or crc != b"%08x" % crc32(text[:-1]):
        raise CannotOpen(f"{path} is damaged: {ANEW}")
    return msgspec.json.decode(text, type=Checkpoint)
