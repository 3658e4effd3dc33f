"""A data directory as a whole: its format, and what a start must find in it."""

from __future__ import annotations

from pathlib import Path

from qb.storage.files import CannotOpen, make_directory, replace_durably
from qb.storage.metadata.metadata_files import DIRECTORY, log_paths, read_newest
from qb.storage.metadata.metadata_log import create_log
from qb.storage.metadata.metadata_records import Entries
from qb.storage.metadata.sqlite_migration import DATABASE, read_copy, read_database, set_aside
from qb.storage.topic_directories import TopicDirectories

FORMAT = "qb-storage"
WITH_SQLITE, VERSION = 1, 2  # the formats that are read; the last one is written
WITHOUT_DATABASE = (
    "restore it from a backup; or start a broker with a new data directory, stop it, and move the directories of the "
    "topics there: they are adopted, without subscriptions, offsets and transactions"
)


def prepare(data_dir: Path) -> None:
    """Make a new data directory whole, or bring an older one to our format. Blocks. Raises CannotOpen, OSError.

    The format is written last: when it is there, so is the metadata.
    """
    path = data_dir / "format"
    version = check_format(path) if path.exists() else None
    if version is None:
        _begin(data_dir)
    elif version == WITH_SQLITE:
        _migrate(data_dir)
    else:
        check_metadata(data_dir)
    if version != VERSION:
        replace_durably(path, f"{FORMAT} {VERSION}\n".encode())
    set_aside(data_dir)
    make_directory(data_dir / "topics")


def _migrate(data_dir: Path) -> None:
    """Write the metadata log from the database of format 1.

    Until the format says otherwise the database is the truth: an interrupted migration begins anew.
    """
    entries = read_database(data_dir / DATABASE)
    if entries is None and _has_topics(data_dir):
        raise CannotOpen(f"{data_dir} has topics, but {DATABASE} is missing or empty: {WITHOUT_DATABASE}")
    make_directory(data_dir / DIRECTORY)
    create_log(data_dir / DIRECTORY, entries or {})


def check_format(path: Path) -> int:
    """Return the version that the format file names. Raises CannotOpen unless this version of ours reads it."""
    name, _, version = path.read_text(errors="replace").strip().partition(" ")
    if name != FORMAT or not (version.isascii() and version.isdigit()) or not int(version):
        what = "this is no data directory of ours, or the file is damaged: restore it from a backup"
        raise CannotOpen(f"{path} does not say {FORMAT!r} and a version: {what}")
    if int(version) > VERSION:
        raise CannotOpen(f"{path} has version {version}; this broker reads up to {VERSION}: use a newer one")
    return int(version)


def read_metadata(data_dir: Path) -> Entries:
    """Return the metadata of a directory without writing to it. Blocks. Raises CannotOpen, LogDamaged, OSError."""
    if check_format(data_dir / "format") == WITH_SQLITE:
        entries = read_copy(data_dir / DATABASE)
        if entries is None:
            raise CannotOpen(f"{data_dir / DATABASE} is missing or empty: {WITHOUT_DATABASE}")
        return entries
    check_metadata(data_dir)
    return read_newest(data_dir / DIRECTORY).entries


def check_metadata(data_dir: Path) -> None:
    """Raises CannotOpen if there is neither a metadata log nor its copy."""
    if not log_paths(data_dir / DIRECTORY):
        raise CannotOpen(
            f"{data_dir / DIRECTORY} has no metadata: restore it from a backup, or see what it costs to go on without: "
            f"qb repair {data_dir}"
        )


def _begin(data_dir: Path) -> None:
    """Make the metadata of a new directory. Raises CannotOpen if it is not new: then its format file is lost."""
    if _has_topics(data_dir) or (data_dir / DATABASE).exists():
        raise CannotOpen(without_format(data_dir))
    if not log_paths(data_dir / DIRECTORY):
        make_directory(data_dir / DIRECTORY)
        create_log(data_dir / DIRECTORY, {})


def without_format(data_dir: Path) -> str:
    """Return why a directory that has no format file is not opened, and what to do."""
    if _has_topics(data_dir) or (data_dir / DATABASE).exists():
        return f"{data_dir} has no file named 'format', and yet it is not empty: restore that file from a backup"
    if not data_dir.is_dir():
        return f"{data_dir} is no data directory: there is no such directory"
    return f"{data_dir} is no data directory: it has no file named 'format'"


def _has_topics(data_dir: Path) -> bool:
    return (data_dir / "topics").is_dir() and bool(TopicDirectories(data_dir / "topics").names())
