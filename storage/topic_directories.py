"""The directories of topics, and how they come and go without ever being half there.

Everything here blocks and raises OSError.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from qb.storage.files import PRIVATE_DIRECTORY, OpenFiles, sync_directory
from qb.storage.log.segment import Segment

CREATING, DELETED = ".creating-", ".deleted-"
DOT = "%2E"  # for a dot that begins a topic's name: such names are ours on disk, and topics have no percent signs


class TopicDirectories:
    """The `topics` directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> list[str]:
        """Return every topic that has a directory."""
        entries = [path.name for path in self._root.iterdir() if path.is_dir() and not path.name.startswith(".")]
        return sorted(_topic_name(name) for name in entries)

    def partition(self, topic: str, partition: int) -> Path:
        """Return where a partition is kept."""
        return self._path(topic) / str(partition)

    def count_partitions(self, topic: str) -> int:
        """Return how many partitions the directory of a topic is meant for."""
        numbers = [int(path.name) for path in self._path(topic).iterdir() if path.name.isdigit()]
        return max(numbers, default=-1) + 1

    def create(self, files: OpenFiles, topic: str, partitions: int, created_ms: int) -> None:
        """Make a topic's partitions durably, each with its first segment."""
        draft = self._root / f"{CREATING}{_directory_name(topic)}-{secrets.token_hex(4)}"
        path = draft
        try:
            _fill(files, draft, [self.partition(topic, number) for number in range(partitions)], created_ms)
            path = draft.rename(self._path(topic))
            sync_directory(self._root)
        except OSError:
            if path is not draft:
                path.rename(draft)  # it has its name, but whether durably is unknown
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def add(self, files: OpenFiles, topic: str, first: int, end: int, created_ms: int) -> None:
        """Give a topic the partitions from `first` up to `end` durably; what an interrupted attempt left is used."""
        missing = [number for number in range(first, end) if not self.partition(topic, number).is_dir()]
        draft = self._root / f"{CREATING}{_directory_name(topic)}-{secrets.token_hex(4)}"
        try:
            _fill(files, draft, [self.partition(topic, number) for number in missing], created_ms)
            for drafted, number in enumerate(missing):
                (draft / str(drafted)).rename(self.partition(topic, number))
            sync_directory(self._path(topic))
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def hide(self, topic: str, uid: str = "") -> Path:
        """Take a topic away durably; what is left of it is for remove(), or with its `uid` for bring_back().

        A topic whose directory is missing can be deleted too.
        """
        hidden = self._root / f"{DELETED}{_directory_name(topic)}-{uid or secrets.token_hex(4)}"
        try:
            self._path(topic).rename(hidden)
        except FileNotFoundError:
            hidden.mkdir(PRIVATE_DIRECTORY)
        sync_directory(self._root)
        return hidden

    def bring_back(self, topic: str, uid: str) -> None:
        """Give a topic that was hidden its directory again, in place of a namesake's."""
        hidden = self._root / f"{DELETED}{_directory_name(topic)}-{uid}"
        if hidden.is_dir():
            if self.exists(topic):
                shutil.rmtree(self._path(topic))
            hidden.rename(self._path(topic))
            sync_directory(self._root)

    def clear(self, hidden: Path) -> None:
        """Free the space of what is no topic any more. Its directory stays: the deletion is unfinished."""
        for path in list(hidden.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def remove(self, hidden: Path) -> None:
        """Remove what is left."""
        shutil.rmtree(hidden)

    def unfinished(self) -> Iterator[tuple[Path, str | None]]:
        """Yield what an interrupted creation (None) or deletion (of that topic) has left."""
        for path in sorted(self._root.iterdir()):
            if path.name.startswith(CREATING):
                yield path, None
            elif path.name.startswith(DELETED):
                yield path, _topic_name(path.name.removeprefix(DELETED).rpartition("-")[0])

    def exists(self, topic: str) -> bool:
        """Say whether a topic has a directory."""
        return self._path(topic).is_dir()

    def _path(self, topic: str) -> Path:
        return self._root / _directory_name(topic)


def _directory_name(topic: str) -> str:
    return DOT + topic[1:] if topic.startswith(".") else topic


def _topic_name(directory: str) -> str:
    return "." + directory.removeprefix(DOT) if directory.startswith(DOT) else directory


def _fill(files: OpenFiles, draft: Path, homes: Sequence[Path], created_ms: int) -> None:
    """Make a partition in the draft for each of the homes that they are going to have."""
    draft.mkdir(PRIVATE_DIRECTORY)
    for number, home in enumerate(homes):
        (draft / str(number)).mkdir(PRIVATE_DIRECTORY)
        first = Segment.create(files, draft / str(number), 0, created_ms, (), home)
        files.forget(first.log_path, first.index_path)  # they are about to have another name
    sync_directory(draft)
