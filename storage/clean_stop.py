"""The proof of a clean stop: where logs ended, so that the next start can distinguish a cut end from a kill."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from isal.isal_zlib import crc32

from qb.storage.files import replace_durably, sync_directory

NAME = "clean-stop"


class LogEnd(NamedTuple):
    """Where a log ends."""

    size: int
    last: int  # of the metadata the checksum of its last record, of a partition the offset behind its last message


class BadProof(Exception):
    """The proof of the last clean stop is not what was written."""


def write_proof(data_dir: Path, ends: Mapping[str, LogEnd]) -> None:
    """Store where each log ended, by its path in the data directory. Blocks. Raises OSError."""
    text = msgspec.json.encode(ends)
    replace_durably(data_dir / NAME, b"%08x %s\n" % (crc32(text), text))


def read_proof(data_dir: Path) -> Mapping[str, LogEnd] | None:
    """Return where each log ended at the last stop; None if that was no clean one. Raises BadProof, OSError."""
    try:
        crc, _, text = (data_dir / NAME).read_bytes().partition(b" ")
    except FileNotFoundError:
        return None
    if not text.endswith(b"\n") or crc != b"%08x" % crc32(text[:-1]):
        raise BadProof(f"{data_dir / NAME} is damaged, so it does not prove where the logs ended at the last stop")
    return msgspec.json.decode(text, type=dict[str, LogEnd])


def remove_proof(data_dir: Path) -> None:
    """Remove it durably: from now on logs may be written. Blocks. Raises OSError."""
    if (data_dir / NAME).exists():
        os.unlink(data_dir / NAME)
        sync_directory(data_dir)
