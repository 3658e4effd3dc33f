"""How many files this process may have open, and how storage and connections share them."""

from __future__ import annotations

import resource
from contextlib import suppress

OPEN_FILES = 256  # of logs, kept open at once where the limit allows it
OTHERS = 64  # listeners, threads' pipes, directories being synced, files in use at the same moment
ENOUGH = 1_048_576


def raise_file_limit() -> None:
    """Raise the soft limit of open files as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def file_limit() -> int:
    """Return how many files may be open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def files_of_logs() -> int:
    """Return how many files of logs are kept open at once: the others are closed, and opened again for each use."""
    return min(OPEN_FILES, file_limit() // 4)


def most_connections() -> int:
    """Return how many connections leave storage the files that it needs."""
    return max(1, file_limit() - files_of_logs() - OTHERS)
