"""What the system does for a broker that writes, replaced in this process: by a disk that waits, fails, or is full."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

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
