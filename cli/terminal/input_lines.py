"""A stream cut into lines, handed out as they arrive.

What has arrived since the last look makes the next portion. So a fast source is taken in bulk, a slow one promptly,
and memory stays bounded.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from io import BufferedReader

from qb.cli.terminal.command import CommandFailed, UsageError

PORTION_BYTES = 4 * 2**20
LONGEST_LINE = 2**30
PIPE_BYTES = 2**20  # as much as Linux allows without privileges; lines gather there while a portion is being published


def open_source(path: str | None) -> BufferedReader:
    """Return the file to read, for `with`; None or `-` is standard input. Raises OSError, UsageError."""
    if path is not None and path != "-":
        return open(path, "rb")
    if sys.stdin is None:
        raise UsageError("there is no MESSAGE, no --file and no standard input")
    if sys.stdin.isatty():
        print("publishing each line that you type; end with Ctrl-D", file=sys.stderr)
    return _widened(open(sys.stdin.fileno(), "rb", closefd=False))


def size_of(source: BufferedReader) -> int | None:
    """Return how many bytes there are to read, or None if that cannot be known."""
    status = os.fstat(source.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def portions(source: BufferedReader) -> Iterator[list[bytes]]:
    """Yield whole lines, without their newlines, as they arrive; what follows the last newline is a line too.

    Blocks while there is nothing to read. Raises OSError, and CommandFailed for a line that no broker would take.
    """
    unfinished: list[bytes] = []  # the line that has not ended yet, as it came
    while chunk := source.read1(PORTION_BYTES):
        unfinished.append(chunk)
        if b"\n" in chunk:
            *lines, rest = b"".join(unfinished).split(b"\n")
            unfinished = [rest]
            yield lines
        elif sum(map(len, unfinished)) > LONGEST_LINE:
            raise CommandFailed(f"a line is longer than the {LONGEST_LINE} bytes that any broker takes as one message")
    if last := b"".join(unfinished):
        yield [last]


def _widened(source: BufferedReader) -> BufferedReader:
    try:
        fcntl.fcntl(source.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except (OSError, AttributeError):  # not a pipe, or not Linux
        pass
    return source
