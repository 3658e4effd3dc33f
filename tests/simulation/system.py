"""The system's own calls, answered by a simulated disk where they concern it: code above sees `os` and `open`."""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.simulation.disk import FIRST_DESCRIPTOR, SimulatedDisk

RWF_DSYNC = getattr(os, "RWF_DSYNC", 0)


class RawFile(io.RawIOBase):
    """A file of the simulated disk for `open`."""

    def __init__(self, disk: SimulatedDisk, fd: int, mode: str) -> None:
        self._disk, self._fd, self._mode, self._at = disk, fd, mode, 0

    def readable(self) -> bool:
        return "r" in self._mode or "+" in self._mode

    def writable(self) -> bool:
        return self._mode.strip("bt") != "r"

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        size = self._disk.fstat(self._fd).st_size
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: size}[whence]
        return self._at

    def fileno(self) -> int:
        return self._fd

    def readinto(self, buffer: Any) -> int:
        data = self._disk.pread(self._fd, len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def write(self, data: Any) -> int:
        written = self._disk.pwrite(self._fd, bytes(data), self._at)
        self._at += written
        return written

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._disk.close(self._fd)


FLAGS = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL}


class System:
    """The calls of `os`, `fcntl`, `shutil` and `open` that storage makes; those on other paths go to the real ones."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    def owns(self, where: Any) -> bool:
        """Is this path or descriptor the simulated disk's?"""
        if isinstance(where, int):
            return self._disk.first_descriptor <= where < self._disk.first_descriptor + FIRST_DESCRIPTOR
        return os.fsdecode(where).startswith(self._disk.root)

    def by_path(self, name: str) -> Callable[..., Any]:
        """Return a call whose first argument is a path, and perhaps its second too."""
        real, simulated = (
            getattr(os, name),
            getattr(self._disk, {"replace": "rename", "remove": "unlink"}.get(name, name)),
        )

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, int) or not self.owns(path):
                return real(path, *arguments, **options)
            options.pop("follow_symlinks", None)
            options.pop("dir_fd", None)
            if name in ("rename", "replace"):
                arguments = (os.fsdecode(arguments[0]), *arguments[1:])
            return simulated(os.fsdecode(path), *arguments, **options)

        return call

    def by_descriptor(self, name: str, simulated: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call whose first argument is a descriptor."""
        real = getattr(os, name)

        def call(fd: int, *arguments: Any) -> Any:
            return simulated(fd, *arguments) if self.owns(fd) else real(fd, *arguments)

        return call

    def pwritev(self, fd: int, parts: Sequence[bytes], position: int, flags: int = 0) -> int:
        return self._disk.pwrite(fd, b"".join(parts), position, durably=bool(flags & RWF_DSYNC))

    def preadv(self, fd: int, buffers: Sequence[Any], position: int, flags: int = 0) -> int:
        (buffer,) = buffers
        data = self._disk.pread(fd, len(buffer), position)
        buffer[: len(data)] = data
        return len(data)

    def pwrite(self, fd: int, data: Any, position: int) -> int:
        return self._disk.pwrite(fd, bytes(data), position)

    def statvfs(self, path: str) -> Any:
        return SimpleNamespace(f_bavail=max(0, self._disk.capacity - self._disk.used), f_frsize=1)

    @contextmanager
    def _scan(self, path: str) -> Iterator[Any]:
        def entry(name: str) -> Any:
            mode = self._disk.stat(f"{path}/{name}").st_mode
            return SimpleNamespace(
                name=name,
                path=f"{path}/{name}",
                is_dir=lambda **_: stat.S_ISDIR(mode),
                is_file=lambda **_: stat.S_ISREG(mode),
                is_symlink=lambda: False,
            )

        yield iter([entry(name) for name in self._disk.listdir(path)])

    def rmtree(self, path: str) -> None:
        if stat.S_ISDIR(self._disk.stat(path).st_mode):
            for name in self._disk.listdir(path):
                self.rmtree(f"{path}/{name}")
            self._disk.rmdir(path)
        else:
            self._disk.unlink(path)

    def open_file(self, path: Any, mode: str = "r", *arguments: Any, opener: Any = None, **options: Any) -> Any:
        name = os.fsdecode(path)
        flags = FLAGS[mode.strip("bt+")[:1]]
        fd = opener(name, flags) if opener else self._disk.open(name, flags, 0o666)
        raw = RawFile(self._disk, fd, mode)
        buffered: Any = io.BufferedWriter(raw) if raw.writable() else io.BufferedReader(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding=options.get("encoding") or "utf-8", errors=options.get("errors"))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Answer the calls of this process while the context is open."""
        disk = self._disk
        replaced: list[tuple[Any, str, Any]] = [
            (os, name, self.by_path(name))
            for name in ("open", "stat", "listdir", "mkdir", "rename", "replace", "unlink", "remove", "rmdir", "chmod")
        ]
        replaced.append((os, "lstat", self._lstat(os.lstat)))
        for name, simulated in (
            ("close", disk.close),
            ("pread", disk.pread),
            ("preadv", self.preadv),
            ("pwrite", self.pwrite),
            ("pwritev", self.pwritev),
            ("ftruncate", disk.ftruncate),
            ("posix_fallocate", disk.allocate),
            ("fdatasync", disk.fsync),
            ("fsync", disk.fsync),
            ("fstat", disk.fstat),
            ("fchmod", lambda fd, mode: None),
        ):
            replaced.append((os, name, self.by_descriptor(name, simulated)))
        replaced.append((os, "statvfs", self._first_path(os.statvfs, self.statvfs)))
        replaced.append((os, "scandir", self._first_path(os.scandir, self._scan)))
        replaced.append((shutil, "rmtree", self._rmtree(shutil.rmtree)))
        replaced.append((fcntl, "flock", self._flock(fcntl.flock)))
        opening = self._first_path(builtins.open, self.open_file)
        replaced += [(builtins, "open", opening), (io, "open", opening)]
        patches = [patch.object(module, name, new) for module, name, new in replaced]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in reversed(patches):
                each.stop()

    def _lstat(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, **options: self._disk.stat(os.fsdecode(path)) if self.owns(path) else real(path, **options)

    def _first_path(self, real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if isinstance(path, int) or not self.owns(path):
                return real(path, *arguments, **options)
            return simulated(os.fsdecode(path), *arguments, **options)

        return call

    def _rmtree(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def rmtree(path: Any, ignore_errors: bool = False, **options: Any) -> None:
            if not self.owns(path):
                real(path, ignore_errors, **options)
                return
            try:
                self.rmtree(os.fsdecode(path))
            except OSError:
                if not ignore_errors:
                    raise

        return rmtree

    def _flock(self, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda fd, how: self._disk.flock(fd) if self.owns(fd) else real(fd, how)
