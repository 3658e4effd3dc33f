"""A data directory as a power cut leaves it: put together from a journal of what was synced."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qb.testing.power_journal import ROOT


@dataclass
class DurableTree:
    """The names of directories and the contents of files that are on the disk, by their numbers."""

    names: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=dict)
    contents: dict[int, bytearray] = field(default_factory=dict)

    def apply(self, step: tuple[Any, ...]) -> None:
        """Carry out a step of the journal: one of three fields is a change of content, one of four of a name."""
        if len(step) == 3:
            self._change(*step)
        else:
            directory, name, number, is_directory = step
            names = self.names.setdefault(directory, {})
            names.pop(name, None)
            if number is not None:
                names[name] = number, is_directory

    def _change(self, number: int, position: int, data: bytes | None) -> None:
        content = self.contents.setdefault(number, bytearray())
        content.extend(bytes(max(0, position - len(content))))
        if data is None:
            del content[position:]
        else:
            content[position : position + len(data)] = data

    def write(self, path: Path, number: int = ROOT) -> None:
        """Make the directory with this number, and all that is in it, at `path`."""
        path.mkdir(mode=0o700)
        for name, (inner, is_directory) in self.names.get(number, {}).items():
            if is_directory:
                self.write(path / name, inner)
            else:
                (path / name).write_bytes(self.contents.get(inner, b""))
                (path / name).chmod(0o600)


def restore(journal: Path, data_dir: Path) -> None:
    """Give a data directory the content that its journal says is synced. No process may use it."""
    tree = DurableTree()
    for step in _steps(journal):
        tree.apply(step)
    shutil.rmtree(data_dir)
    tree.write(data_dir)


def _steps(journal: Path) -> Iterator[tuple[Any, ...]]:
    with journal.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):  # the end; a step that was being written is not durable
                return
