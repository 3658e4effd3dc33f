"""What the system does for a broker that writes, replaced in this process: by a disk that waits, fails, or is full."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

RWF_DSYNC = getattr(os, "RWF_DSYNC", 0)


def patch_sync(patch: pytest.MonkeyPatch, sync: Callable[[int], None]) -> None:
    """Call `sync(fd)` wherever bytes are put on stable storage, by a call of its own or by the one that writes them."""
    write = getattr(os, "pwritev", None)

    def write_and_sync(fd: int, parts: Sequence[bytes], position: int, flags: int = 0) -> int:
        written: int = write(fd, parts, position, flags & ~RWF_DSYNC)
        if flags & RWF_DSYNC:
            sync(fd)
        return written

    patch.setattr(os, "fdatasync", sync)
    if write:
        patch.setattr(os, "pwritev", write_and_sync)


def patch_write(patch: pytest.MonkeyPatch, write: Callable[[int, bytes, int], int]) -> None:
    """Call `write(fd, data, position)` wherever bytes are written; what it has written is synced if it should be."""
    sync = os.fdatasync

    def write_and_sync(fd: int, parts: Sequence[bytes], position: int, flags: int = 0) -> int:
        written = write(fd, b"".join(parts), position)
        if flags & RWF_DSYNC:
            sync(fd)
        return written

    patch.setattr(os, "pwrite", write)
    if hasattr(os, "pwritev"):
        patch.setattr(os, "pwritev", write_and_sync)


# The calls that change the disk, and open(), which may
CHANGING = ("mkdir", "open", "pwrite", "pwritev", "fdatasync", "fsync", "rename", "replace", "unlink", "ftruncate")


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Give the list of what is synced, renamed and removed inside the block, in order: `replace a.new b`."""
    calls: list[str] = []
    real = {name: getattr(os, name) for name in ("fdatasync", "fsync", "rename", "replace", "unlink")}

    def wrap(name: str) -> Callable[..., object]:
        def call(first: object, *others: object, **options: object) -> object:
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first
            calls.append(" ".join([name, *(os.path.basename(str(each)) for each in (path, *others))]))
            return real[name](first, *others, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(os, name, wrap(name))
        yield calls


class Crash(BaseException):
    """The process is gone."""


def crash_at(patch: pytest.MonkeyPatch, step: int) -> Callable[[], int]:
    """Let the process die at the step-th call that changes the disk; returns how to ask for the calls so far."""
    calls = 0
    real = {name: getattr(os, name) for name in CHANGING}

    def wrap(name: str) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == step:
                raise Crash(name)
            return real[name](*args, **options)

        return call

    for name in real:
        patch.setattr(os, name, wrap(name))
    return lambda: calls
