"""The lock on a data directory: who has it, and whether it is still where it was."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from qb.storage.files import PRIVATE_FILE, CannotOpen, is_still_at

INTERVAL = 0.5  # seconds between two looks at the directory


class DirectoryLost(OSError):
    """The data directory was moved or removed: what is written now would not be found by the next start."""


class DirectoryLock:
    """The lock of one process: on the directory itself, and on a file in it that names the process."""

    def __init__(self, directory: Path) -> None:
        """Raises CannotOpen while another process has it, or if the lock is not a file of its own."""
        self._directory, self._path = directory, directory / "lock"
        self.is_lost = False
        self._file = _open_lock(self._path)
        try:
            self._lock_file()
            self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except BaseException:
            os.close(self._file)
            raise
        try:
            self._lock_directory()
        except BaseException:
            os.close(self._file)
            os.close(self._root)
            raise
        with suppress(OSError):  # a full disk, or the like: then the next process cannot name us
            os.pwrite(self._file, b"%-10d\n" % os.getpid(), 0)  # always as long, so that it needs no more room

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            raise CannotOpen(f"{self._directory} is in use by another process (pid {holder})") from None

    def _lock_directory(self) -> None:
        """Lock the directory too, so that a lock file that was removed lets no second process in."""
        try:
            fcntl.flock(self._root, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "is in use by another process, whose lock file was removed"
            raise CannotOpen(f"{self._directory} {what}") from None
        except OSError:
            pass  # some file systems lock only files

    def check(self) -> None:
        """Raises DirectoryLost if the directory or the lock file in it is not the one that was locked."""
        for fd, path in ((self._root, self._directory), (self._file, self._path)):
            if not is_still_at(fd, path, follow_symlinks=path is self._directory):
                raise self.lost(path)

    def lost(self, path: str | Path) -> DirectoryLost:
        """Return what to raise when a file is not where it was that all of the directory depends on."""
        self.is_lost = True
        return DirectoryLost(f"{path} was moved or removed while the broker ran: nothing more is stored")

    def close(self) -> None:
        """Give the directory back."""
        os.close(self._file)
        os.close(self._root)


def _open_lock(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, PRIVATE_FILE)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CannotOpen(f"{path} is a symbolic link: remove it, the broker makes a lock file of its own") from None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        os.close(fd)
        raise CannotOpen(f"{path} is not a plain file with one name: remove it, the broker makes one of its own")
    return fd
