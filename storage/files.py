"""The few things that must be done right with file descriptors.

Linux first; where a call is missing the plain one takes its place.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from qb.storage.file_limit import files_of_logs

RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
RWF_DSYNC = getattr(os, "RWF_DSYNC", 0)
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
CACHED_AT_MOST = 2 * 1024 * 1024  # a longer look would keep the event loop too long
_threads = threading.local()
LOST = "it was moved or removed while the broker ran"
PRIVATE_DIRECTORY, PRIVATE_FILE = 0o700, 0o600  # messages are for the user that runs the broker


class CannotOpen(OSError):
    """Why a data directory cannot be opened, in words for its operator."""


class SyncFailed(OSError):
    """The system could not say that bytes are on stable storage; asking again would prove nothing."""


def datasync(fd: int) -> None:
    """Block until the file's bytes are on stable storage. Raises SyncFailed."""
    try:
        _datasync(fd)
    except OSError as error:
        raise SyncFailed(error.errno, error.strerror) from error


def _datasync(fd: int) -> None:
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def sync_directory(directory: Path) -> None:
    """Block until the directory's names are on stable storage. Raises OSError if there is no room, else SyncFailed."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise SyncFailed(error.errno, error.strerror) from error
    finally:
        os.close(fd)


def make_directory(directory: Path, mode: int = PRIVATE_DIRECTORY) -> None:
    """Make a directory, and what is missing above it (with the usual mode), durably. Raises OSError."""
    if not directory.is_dir():
        make_directory(directory.parent, 0o777)
        directory.mkdir(mode, exist_ok=True)
        sync_directory(directory.parent)


def replace_durably(path: Path, data: bytes) -> None:
    """Give a file this content, or leave it as it is: written beside it, synced, renamed. Raises OSError."""
    draft = path.with_name(path.name + ".new")
    fd = create_file(draft)
    try:
        write_all(fd, data, 0)
        datasync(fd)
    finally:
        os.close(fd)
    os.replace(draft, path)
    sync_directory(path.parent)


def create_file(path: str | Path) -> int:
    """Return the descriptor of a new or emptied file. Raises OSError, also if a symbolic link stands there."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE)


def write_all(fd: int, data: bytes | bytearray | memoryview, position: int) -> None:
    """Write every byte at `position`. Raises OSError; a part may have been written then."""
    written = 0
    while written < len(data):
        written += os.pwrite(fd, memoryview(data)[written:], position + written)


def write_parts(fd: int, parts: Sequence[bytes | bytearray | memoryview], position: int) -> None:
    """Write the parts one after another at `position`. Raises OSError; some of it may have been written then."""
    if len(parts) == 1 or not hasattr(os, "pwritev"):
        write_all(fd, parts[0] if len(parts) == 1 else b"".join(parts), position)
        return
    written = os.pwritev(fd, parts, position)
    if written < sum(map(len, parts)):
        write_all(fd, memoryview(b"".join(parts))[written:], position + written)


def write_durably(fd: int, parts: Sequence[bytes | bytearray | memoryview], position: int) -> None:
    """Write the parts one after another at `position`, and block until they are on stable storage.

    Where the system can, it is one call: it costs less than two, and a thread gives up Python's lock only once. Raises
    OSError if there is no room, and else SyncFailed; some of it may have been written then.
    """
    try:
        written = _write_and_sync(fd, parts, position)
        if written < sum(map(len, parts)):
            write_all(fd, memoryview(b"".join(parts))[written:], position + written)
            _datasync(fd)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise SyncFailed(error.errno, error.strerror) from error


def _write_and_sync(fd: int, parts: Sequence[bytes | bytearray | memoryview], position: int) -> int:
    """Return how many bytes were written and synced in one call, 0 where there is no such call. Raises OSError."""
    try:
        return os.pwritev(fd, parts, position, RWF_DSYNC) if RWF_DSYNC else 0
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return 0


def reserve(fd: int, position: int, size: int) -> None:
    """Make the file so long that writing there does not lengthen it: then a sync has less to do. Best effort."""
    if hasattr(os, "posix_fallocate"):
        with suppress(OSError):
            os.posix_fallocate(fd, position, size)


def forget_cached(fd: int) -> None:
    """Have the system read the file from the disk the next time, not from its memory. Best effort."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(fd: int, length: int, position: int) -> bytes:
    """Return `length` bytes at `position`, fewer only at the end of the file. May wait for the disk."""
    data = os.pread(fd, length, position)
    while len(data) < length:
        more = os.pread(fd, length - len(data), position + len(data))
        if not more:
            break
        data += more
    return data


def read_cached(fd: int, length: int, position: int) -> bytes:
    """Return `length` bytes at `position` if memory has them. Raises BlockingIOError where the disk would be asked."""
    if not RWF_NOWAIT or length > CACHED_AT_MOST:
        raise BlockingIOError(errno.EAGAIN, "a thread should do this")
    buffer = _scratch(length)
    try:
        got = os.preadv(fd, [buffer], position, RWF_NOWAIT)
    except OSError as error:
        raise BlockingIOError(errno.EAGAIN, str(error)) from error
    if got < length:
        raise BlockingIOError(errno.EAGAIN, "only a part is in memory")
    return bytes(buffer)


def _scratch(length: int) -> memoryview:
    """Return room for one read: always the same of a thread, since fresh memory has to be filled with zeros first."""
    if not hasattr(_threads, "scratch"):
        _threads.scratch = memoryview(bytearray(CACHED_AT_MOST))
    return _threads.scratch[:length]  # type: ignore[no-any-return]


def is_still_at(fd: int, path: str | Path, *, follow_symlinks: bool = True) -> bool:
    """Say whether a path still leads to the open file. Raises OSError when the disk fails, which proves nothing."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=follow_symlinks))
    except (FileNotFoundError, NotADirectoryError):
        return False


def note_on_access(directory: Path) -> list[str]:
    """Return a sentence for the operator if other users can get into the directory."""
    mode = stat.S_IMODE(directory.stat().st_mode)
    if not mode & 0o077:
        return []
    return [f"{directory} is open to other users (mode {mode:03o}); to close it: chmod 700 {directory}"]


class _Open:
    """A descriptor and how many are using it right now."""

    __slots__ = ("fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd, self.users = fd, 0


class _Use:
    """One use of a file; a class, since a generator would cost every publish several microseconds."""

    __slots__ = ("_entry", "_files", "_wanted")

    def __init__(self, files: OpenFiles, *wanted: Any) -> None:
        self._files, self._wanted = files, wanted

    def __enter__(self) -> int:
        self._entry = self._files.take(*self._wanted)
        return self._entry.fd

    def __exit__(self, *_: object) -> None:
        self._files.give_back(self._wanted[0], self._entry)


class OpenFiles:
    """Descriptors by path, the least recently used closed first. Any thread may call.

    More than `capacity` (by default what the limit of open files allows) are open only while more are in use.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = files_of_logs() if capacity is None else capacity
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()

    def use(self, path: str, *, create: bool = False, if_open: bool = False) -> AbstractContextManager[int]:
        """Lend a file's descriptor, which stays valid inside the block even if the file is deleted.

        Raises FileNotFoundError unless it may `create`; with `if_open` BlockingIOError if it is not open already.
        """
        return _Use(self, path, create, if_open)

    def forget(self, *paths: str) -> None:
        """Close these, each as soon as it is not in use."""
        with self._lock:
            for path in paths:
                entry = self._open.pop(path, None)
                if entry and not entry.users:
                    os.close(entry.fd)

    def forget_below(self, directory: Path) -> None:
        """As forget(), all files in a directory and below it: their paths are about to mean other files."""
        with self._lock:
            found = [path for path in self._open if path.startswith(f"{directory}{os.sep}")]
        self.forget(*found)

    def lost(self) -> list[str]:
        """Return the paths of files that were moved, removed or replaced while they are open. Blocks.

        The code of the broker forgets a file before it moves or removes it.
        """
        with self._lock:
            paths = list(self._open)
        return [path for path in paths if self._is_lost(path)]

    def _is_lost(self, path: str) -> bool:
        try:
            with _Use(self, path, False, True) as fd:
                entry = self._open.get(path)
                return not is_still_at(fd, path) and self._open.get(path) is entry is not None
        except OSError:  # it was closed meanwhile; or the disk fails, which proves nothing
            return False

    def close(self) -> None:
        """Close everything."""
        self.forget(*list(self._open))

    def take(self, path: str, create: bool, if_open: bool) -> _Open:
        """Begin to use a file. Raises as use()."""
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                if if_open:
                    raise BlockingIOError(errno.EAGAIN, "not open")
                flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
                entry = self._open[path] = _Open(os.open(path, flags, PRIVATE_FILE))
                self._close_unused(path)
            else:
                self._open.move_to_end(path)
            entry.users += 1
            return entry

    def give_back(self, path: str, entry: _Open) -> None:
        """End it."""
        with self._lock:
            entry.users -= 1
            if not entry.users and self._open.get(path) is not entry:
                os.close(entry.fd)  # it was forgotten meanwhile

    def _close_unused(self, opened: str) -> None:
        """Close the least recently used beyond the capacity, but not the one that was just opened."""
        surplus = len(self._open) - self._capacity
        if surplus > 0:
            unused = (path for path, entry in self._open.items() if not entry.users and path != opened)
            for path in list(islice(unused, surplus)):
                os.close(self._open.pop(path).fd)
