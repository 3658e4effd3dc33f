"""The metadata of format 1, which lay in SQLite: how it is read and set aside."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec

from qb.storage.files import CannotOpen, sync_directory
from qb.storage.metadata.metadata_records import Entries, StoredValue

DATABASE = "metadata.sqlite3"


def set_aside(data_dir: Path) -> None:
    """Rename a database that has been migrated, durably. Blocks. Raises OSError."""
    left = [path for path in data_dir.glob(f"{DATABASE}*") if not path.name.startswith(f"{DATABASE}.")]
    for path in left:
        path.rename(data_dir / f"{DATABASE}.migrated{path.name.removeprefix(DATABASE)}")
    if left:
        sync_directory(data_dir)


def read_database(path: Path) -> Entries | None:
    """Return every entry, with what a killed broker left in the database's own log. Blocks. Raises CannotOpen.

    None: the database is not there or has no table, so nothing was ever stored in it.
    """
    if not path.exists():
        return None
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as database:
            (answer,) = database.execute("PRAGMA integrity_check").fetchone()
            if answer != "ok":
                raise sqlite3.DatabaseError(answer)
            if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'entries'").fetchone():
                return None
            rows = database.execute("SELECT key, value, version FROM entries ORDER BY key")
            return {key: StoredValue(_checked(value), version) for key, value, version in rows}
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise CannotOpen(f"{path} cannot be read: {error}; restore it from a backup") from error


def read_copy(path: Path) -> Entries | None:
    """Return what read_database() does without writing to its files: SQLite writes even when it reads."""
    with tempfile.TemporaryDirectory() as copies:
        for each in path.parent.glob(f"{path.name}*"):
            if not each.name.endswith("-shm"):
                shutil.copy(each, copies)
        return read_database(Path(copies) / path.name)


def _checked(value: str | bytes) -> bytes:
    """Return a value as it is stored. Raises MsgspecError if it is no JSON."""
    data = value.encode() if isinstance(value, str) else value
    msgspec.json.decode(data)
    return data
