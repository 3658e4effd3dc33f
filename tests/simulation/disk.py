"""A disk in memory that keeps only what was synced, and of the rest what a seed decides.

A write stands in a file at once, and on the disk when it is synced: by fsync, or by a write with O_DSYNC's meaning. A
name stands in its directory at once, and on the disk when the directory is synced. `lose_power` forgets what is not on
the disk: of each write that was not synced nothing, a part or all is kept; of each name, nothing or all, where an older
change of the same name is never lost before a newer one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

FIRST_DESCRIPTOR = 1_000_000  # far above any of the real ones
SECTOR = 512


class Status(NamedTuple):
    """What the broker looks at in os.stat_result."""

    st_mode: int
    st_size: int
    st_ino: int
    st_nlink: int = 1
    st_dev: int = 1
    st_uid: int = 0
    st_mtime_ns: int = 0


class Write(NamedTuple):
    """A write, or (data is None) a change of size to `position`."""

    position: int
    data: bytes | None


class Inode:
    """A file or a directory, as processes see it and as it is on the disk."""

    def __init__(self, number: int, mode: int) -> None:
        self.number = number
        self.mode = mode

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)


class FileInode(Inode):
    """A file's bytes, and what was done to it since the last sync of all of it."""

    def __init__(self, number: int, mode: int) -> None:
        super().__init__(number, stat.S_IFREG | mode)
        self.data = bytearray()
        self._synced = bytearray()  # its content at the last sync of all of it
        self._since: list[tuple[Write, bool]] = []  # the writes since, and whether each was synced by itself

    def change(self, write: Write, *, durably: bool = False) -> None:
        apply(self.data, write)
        self._since.append((write, durably))

    def sync(self) -> None:
        self._keep([write for write, _ in self._since])

    def fail_sync(self, chance: Random) -> None:
        """Forget that some of the writes were not synced: no later sync will write them."""
        self._keep([write for write, durable in self._since if durable or chance.random() < 0.5])

    def lose_power(self, chance: Random) -> None:
        """Keep of what was not synced what the disk happened to have written."""
        self._keep(
            [kept for write, durable in self._since for kept in ([write] if durable else some_of(write, chance))]
        )
        self.data = bytearray(self._synced)

    def _keep(self, writes: Iterable[Write]) -> None:
        for write in writes:
            apply(self._synced, write)
        self._since.clear()


def some_of(write: Write, chance: Random) -> list[Write]:
    """Return nothing, a part or all of a write."""
    kept = chance.choice(("nothing", "part", "all"))
    if kept == "part" and write.data is not None:
        return [write._replace(data=torn(write.data, chance))]
    return [] if kept == "nothing" else [write]


def apply(content: bytearray, write: Write) -> None:
    """Carry a write out on a file's content."""
    position, data = write
    if data is None:
        del content[position:]
        content.extend(bytes(position - len(content)))
    else:
        content.extend(bytes(max(0, position - len(content))))
        content[position : position + len(data)] = data


def torn(data: bytes, chance: Random) -> bytes:
    """Return the first part of a write: whole sectors, or up to any byte."""
    size = chance.randrange(len(data) + 1)
    return data[: size - size % SECTOR] if chance.random() < 0.5 else data[:size]


class Directory(Inode):
    """The names in a directory: as processes see them, and as they are on the disk."""

    def __init__(self, number: int, mode: int) -> None:
        super().__init__(number, stat.S_IFDIR | mode)
        self.names: dict[str, Inode] = {}
        self.durable: dict[str, Inode] = {}


@dataclass(eq=False)
class Rename:
    """A change of names in one or two directories, which reaches the disk as a whole: name -> what it stands for."""

    changes: list[tuple[Directory, str, Inode | None]]

    def apply(self) -> None:
        for directory, name, inode in self.changes:
            if inode is None:
                directory.durable.pop(name, None)
            else:
                directory.durable[name] = inode

    def touches(self, other: Rename) -> bool:
        mine = {(directory.number, name) for directory, name, _ in self.changes}
        return any((directory.number, name) in mine for directory, name, _ in other.changes)


@dataclass(eq=False)
class Descriptor:
    """An open file."""

    inode: Inode
    path: str
    holds_lock: bool = False


@dataclass
class Fault:
    """What fails: the calls so named, on paths that end so, `times` times."""

    call: str
    error: int
    path: str = ""
    times: int = 1


@dataclass
class SimulatedDisk:
    """The file system below `root`. Its methods are named after the system calls that they stand for."""

    root: str
    chance: Random
    capacity: int = 1 << 30  # bytes; what is beyond is ENOSPC
    faults: list[Fault] = field(default_factory=list)
    off: bool = False  # has the power gone? Then nothing that is asked happens
    calls: int = 0
    number: int = 0  # of several disks of one world

    def __post_init__(self) -> None:
        self._inodes = 0
        self._top = Directory(self._next_inode(), 0o700)
        self._open: dict[int, Descriptor] = {}
        self._next_fd = self.first_descriptor
        self._renames: list[Rename] = []  # that no sync of a directory has covered
        self._locks: dict[int, int] = {}  # inode -> descriptor

    @property
    def first_descriptor(self) -> int:
        return FIRST_DESCRIPTOR * (self.number + 1)

    # Power

    def lose_power(self) -> None:
        """Forget what is not on the disk, and all that was open. Names and writes that survive are chance."""
        dropped: list[Rename] = []
        for rename in self._renames:
            if any(rename.touches(other) for other in dropped) or self.chance.random() < 0.5:
                dropped.append(rename)
            else:
                rename.apply()
        self._renames.clear()
        for inode in self._all(self._top, durable=True):
            if isinstance(inode, FileInode):
                inode.lose_power(self.chance)
            elif isinstance(inode, Directory):
                inode.names = dict(inode.durable)
        self.end_process()

    def end_process(self) -> None:
        """Close all that is open, as the end of a process does; what was written stays."""
        self._open.clear()
        self._locks.clear()
        self.off = False
        self.faults.clear()

    def _all(self, inode: Inode, *, durable: bool) -> Iterator[Inode]:
        yield inode
        if isinstance(inode, Directory):
            for each in list((inode.durable if durable else inode.names).values()):
                yield from self._all(each, durable=durable)

    def files(self) -> dict[str, bytes]:
        """Return every file with its content, as processes see it."""
        found: dict[str, bytes] = {}

        def walk(inode: Inode, path: str) -> None:
            if isinstance(inode, FileInode):
                found[path] = bytes(inode.data)
            elif isinstance(inode, Directory):
                for name, each in inode.names.items():
                    walk(each, f"{path}/{name}")

        walk(self._top, self.root)
        return found

    # Calls

    def _enter(self, call: str, path: str = "") -> None:
        self.calls += 1
        if self.off:
            raise OSError(errno.EIO, "the power is off")
        for fault in self.faults:
            if fault.call == call and path.endswith(fault.path):
                fault.times -= 1
                if not fault.times:
                    self.faults.remove(fault)
                raise OSError(fault.error, os.strerror(fault.error), path)

    def _find(self, path: str) -> Inode:
        inode: Inode = self._top
        for name in self._parts(path):
            if not isinstance(inode, Directory) or name not in inode.names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            inode = inode.names[name]
        return inode

    def _parts(self, path: str) -> list[str]:
        return [part for part in path.removeprefix(self.root).split("/") if part not in ("", ".")]

    def _parent(self, path: str) -> tuple[Directory, str]:
        *above, name = self._parts(path)
        parent = self._find("/".join([self.root, *above]))
        assert isinstance(parent, Directory), path
        return parent, name

    def _next_inode(self) -> int:
        self._inodes += 1
        return self._inodes

    def _rename(self, *changes: tuple[Directory, str, Inode | None]) -> None:
        for directory, name, inode in changes:
            if inode is None:
                directory.names.pop(name)
            else:
                directory.names[name] = inode
        self._renames.append(Rename(list(changes)))

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        self._enter("open", path)
        try:
            inode = self._find(path)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            parent, name = self._parent(path)
            inode = FileInode(self._next_inode(), mode)
            self._rename((parent, name, inode))
        else:
            if flags & os.O_CREAT and flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if flags & os.O_TRUNC and isinstance(inode, FileInode):
            inode.change(Write(0, None))
        self._next_fd += 1
        self._open[self._next_fd] = Descriptor(inode, path)
        return self._next_fd

    def close(self, fd: int) -> None:
        closed = self._open.pop(fd, None)
        if closed is not None and self._locks.get(closed.inode.number) == fd:
            del self._locks[closed.inode.number]

    def _file(self, call: str, fd: int) -> FileInode:
        if fd not in self._open:
            self._enter(call)
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._enter(call, self._open[fd].path)
        inode = self._open[fd].inode
        assert isinstance(inode, FileInode), self._open[fd].path
        return inode

    def flock(self, fd: int) -> None:
        self._enter("flock", self._open[fd].path)
        inode = self._open[fd].inode
        if self._locks.setdefault(inode.number, fd) != fd:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")

    def pread(self, fd: int, length: int, position: int) -> bytes:
        inode = self._file("pread", fd)
        return bytes(inode.data[position : position + length])

    def pwrite(self, fd: int, data: bytes, position: int, *, durably: bool = False) -> int:
        inode = self._file("pwrite", fd)
        grown = max(0, position + len(data) - len(inode.data))
        room = self.capacity - self.used
        if grown > room:
            data = data[: max(0, len(data) - (grown - room))]
            if not data:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._open[fd].path)
        inode.change(Write(position, bytes(data)), durably=durably)
        return len(data)

    @property
    def used(self) -> int:
        return sum(len(each.data) for each in self._all(self._top, durable=False) if isinstance(each, FileInode))

    def ftruncate(self, fd: int, size: int) -> None:
        self._file("ftruncate", fd).change(Write(size, None))

    def allocate(self, fd: int, position: int, size: int) -> None:
        inode = self._file("posix_fallocate", fd)
        if position + size > len(inode.data):
            if self.used + position + size - len(inode.data) > self.capacity:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            inode.change(Write(position + size, None))

    def fsync(self, fd: int) -> None:
        """Put a file, or the names of a directory, on the disk.

        Of a file whose sync fails, what was written may be lost though a later sync succeeds: the system forgets that
        it was not written.
        """
        descriptor = self._open.get(fd)
        if descriptor is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        inode = descriptor.inode
        try:
            self._enter("fsync", descriptor.path)
        except OSError:
            if isinstance(inode, FileInode) and not self.off:
                inode.fail_sync(self.chance)
            raise
        if isinstance(inode, FileInode):
            inode.sync()
        else:
            self._sync_names(inode)

    def _sync_names(self, inode: Inode) -> None:
        """Put on the disk what was changed in this directory, and older changes of the same names elsewhere."""
        wanted: list[Rename] = []
        for rename in reversed(self._renames):
            here = any(directory is inode for directory, _, _ in rename.changes)
            if here or any(rename.touches(each) for each in wanted):
                wanted.append(rename)
        for rename in reversed(wanted):
            rename.apply()
            self._renames.remove(rename)

    def fstat(self, fd: int) -> Status:
        self._enter("fstat")
        return self._status(self._open[fd].inode)

    def stat(self, path: str) -> Status:
        self._enter("stat", path)
        return self._status(self._find(path))

    def _status(self, inode: Inode) -> Status:
        return Status(inode.mode, len(inode.data) if isinstance(inode, FileInode) else 0, inode.number)

    def listdir(self, path: str) -> list[str]:
        self._enter("listdir", path)
        inode = self._find(path)
        if not isinstance(inode, Directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return sorted(inode.names)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._enter("mkdir", path)
        parent, name = self._parent(path)
        if name in parent.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._rename((parent, name, Directory(self._next_inode(), mode)))

    def rename(self, source: str, target: str) -> None:
        self._enter("rename", source)
        inode = self._find(source)
        (old, old_name), (new, new_name) = self._parent(source), self._parent(target)
        self._rename((new, new_name, inode), (old, old_name, None))

    def unlink(self, path: str) -> None:
        self._enter("unlink", path)
        self._find(path)
        parent, name = self._parent(path)
        self._rename((parent, name, None))

    def rmdir(self, path: str) -> None:
        self._enter("rmdir", path)
        inode = self._find(path)
        assert isinstance(inode, Directory)
        if inode.names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        parent, name = self._parent(path)
        self._rename((parent, name, None))

    def chmod(self, path: str, mode: int) -> None:
        self._enter("chmod", path)
        inode = self._find(path)
        inode.mode = stat.S_IFMT(inode.mode) | mode
