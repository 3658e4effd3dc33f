"""What a broker has synced, written down as it happens: what a power cut at any moment would leave.

It is installed in a broker's process before that opens its data directory, and wraps the calls that change files. A
write counts when it is synced, by fsync or by the write itself; a name in a directory counts when the directory is
synced, and a rename counts as a whole. What stands in the data directory at the beginning counts as synced.

The journal is a file of pickled steps, which `durable_tree` reads. A write to it survives the death of the process.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import stat
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

ROOT = 0  # the number of the data directory
RWF_DSYNC = getattr(os, "RWF_DSYNC", 0)


class NameStep(NamedTuple):
    """In a directory, a name stands for a file or directory with this number, or (None) for nothing any more."""

    directory: int
    name: str
    number: int | None
    is_directory: bool = False


class ContentStep(NamedTuple):
    """Bytes of a file at a position; None: the file ends there."""

    number: int
    position: int
    data: bytes | None


Step = NameStep | ContentStep


class PowerJournal:
    """The recorder of one process."""

    def __init__(self, data_dir: str, path: str) -> None:
        """Begin a journal at `path` with the data directory as it is now."""
        self._top = os.path.abspath(data_dir)
        self._lock = threading.RLock()
        self._numbers: dict[int, int] = {}  # of files and directories, by inode; a number is never used again
        self._next_number = ROOT
        self._unsynced: dict[int, list[ContentStep]] = {}  # by file
        self._unsynced_names: list[list[NameStep]] = []  # each list is one change of names
        self._journal = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.makedirs(self._top, mode=0o700, exist_ok=True)
        self._number_new(self._top)
        self._write(list(self._tree(self._top)))

    def _tree(self, directory: str) -> list[Step]:
        steps: list[Step] = []
        for entry in os.scandir(directory):
            is_directory = entry.is_dir(follow_symlinks=False)
            steps.append(NameStep(self._number(directory), entry.name, self._number_new(entry.path), is_directory))
            if is_directory:
                steps += self._tree(entry.path)
            else:
                with open(entry.path, "rb") as file:
                    steps.append(ContentStep(self._number(entry.path), 0, file.read()))
        return steps

    def _write(self, steps: Sequence[Step]) -> None:
        data = memoryview(b"".join(pickle.dumps(tuple(step)) for step in steps))
        while data:
            data = data[os.write(self._journal, data) :]

    # Numbers

    def _number_new(self, path: str) -> int:
        number = self._numbers[os.lstat(path).st_ino] = self._next_number
        self._next_number += 1
        return number

    def _number(self, file: str | int) -> int:
        """Return the number of a file or directory, by path or descriptor."""
        return self._numbers[os.stat(file).st_ino]

    def _place(self, path: Any, dir_fd: int | None) -> tuple[str | int, str, str] | None:
        """Return directory, name and path of something inside the data directory, None for what is outside."""
        text = os.fspath(path)
        if dir_fd is not None:
            text = os.path.join(_path_of(dir_fd), text)
        text = os.path.abspath(text)
        directory, name = os.path.split(text)
        return (directory, name, text) if text.startswith(self._top + os.sep) else None

    def _file(self, fd: int) -> int | None:
        """Return the number of a regular file of the data directory that is open as `fd`."""
        found = os.fstat(fd)
        return self._numbers.get(found.st_ino) if stat.S_ISREG(found.st_mode) else None

    # The calls

    def install(self) -> None:
        """Wrap the calls of `os` from now on."""
        for name in ("mkdir", "open", "rmdir", "unlink", "rename", "pwrite", "pwritev", "ftruncate", "fsync"):
            self._wrap(name, getattr(self, f"_{name}"))
        self._wrap("remove", self._unlink)
        self._wrap("replace", self._rename)
        self._wrap("fdatasync", self._fsync)
        self._wrap("posix_fallocate", self._allocate)

    def _wrap(self, name: str, record: Callable[..., Any]) -> None:
        real = getattr(os, name, None)
        if real is None:
            return

        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                return record(lambda: real(*args, **options), *args, **options)

        setattr(os, name, call)

    def _mkdir(self, call: Callable[[], None], path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        call()
        self._made(self._place(path, dir_fd), is_directory=True)

    def _open(
        self, call: Callable[[], int], path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        place = self._place(path, dir_fd) if flags & (os.O_CREAT | os.O_TRUNC) else None
        is_new = place is not None and not os.path.lexists(place[2])
        fd = call()
        if is_new:
            self._made(place, is_directory=False)
        elif flags & os.O_TRUNC and (number := self._file(fd)) is not None:
            self._changed(ContentStep(number, 0, None))
        return fd

    def _made(self, place: tuple[str | int, str, str] | None, *, is_directory: bool) -> None:
        if place is not None:
            directory, name, path = place
            step = NameStep(self._number(directory), name, self._number_new(path), is_directory)
            self._unsynced_names.append([step])

    def _unlink(self, call: Callable[[], None], path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        call()
        if place is not None:
            self._unsynced_names.append([NameStep(self._number(place[0]), place[1], None)])

    _rmdir = _unlink

    def _rename(self, call: Callable[[], None], source: Any, target: Any, **options: Any) -> None:
        old, new = self._place(source, None), self._place(target, None)
        call()
        if old is not None and new is not None:
            moved = NameStep(self._number(new[0]), new[1], self._number(new[2]), os.path.isdir(new[2]))
            self._unsynced_names.append([moved, NameStep(self._number(old[0]), old[1], None)])

    def _pwrite(self, call: Callable[[], int], fd: int, data: Any, position: int) -> int:
        written = call()
        if (number := self._file(fd)) is not None:
            self._changed(ContentStep(number, position, bytes(memoryview(data)[:written])))
        return written

    def _pwritev(self, call: Callable[[], int], fd: int, parts: Sequence[Any], position: int, flags: int = 0) -> int:
        written = call()
        if (number := self._file(fd)) is not None:
            step = ContentStep(number, position, b"".join(parts)[:written])
            if flags & RWF_DSYNC:
                self._write([step])
            if not flags & RWF_DSYNC or self._unsynced.get(number):  # so that an older write does not undo it later
                self._changed(step)
        return written

    def _ftruncate(self, call: Callable[[], None], fd: int, size: int) -> None:
        call()
        if (number := self._file(fd)) is not None:
            self._changed(ContentStep(number, size, None))

    def _allocate(self, call: Callable[[], None], fd: int, position: int, size: int) -> None:
        before = os.fstat(fd).st_size
        call()
        if (number := self._file(fd)) is not None and position + size > before:
            self._changed(ContentStep(number, position + size, None))

    def _changed(self, step: ContentStep) -> None:
        self._unsynced.setdefault(step.number, []).append(step)

    def _fsync(self, call: Callable[[], None], fd: int) -> None:
        call()
        if (number := self._file(fd)) is not None:
            self._write(self._unsynced.pop(number, []))
        elif (number := self._numbers.get(os.fstat(fd).st_ino)) is not None:
            synced = [each for each in self._unsynced_names if any(step.directory == number for step in each)]
            self._unsynced_names = [each for each in self._unsynced_names if each not in synced]
            self._write([step for change in synced for step in change])


def _path_of(fd: int) -> str:
    """Return the path that a directory was opened by."""
    if hasattr(fcntl, "F_GETPATH"):  # macOS
        found: bytes = fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024))
        return found.rstrip(b"\0").decode()
    return os.readlink(f"/proc/self/fd/{fd}")
