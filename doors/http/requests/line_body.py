"""A body of lines, cut while it arrives, so that a long one is never held as a whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import trio

from qb.core.pacing import spend
from qb.doors.http.requests.body_room import BodyRoom
from qb.doors.http.requests.http_errors import HttpError
from qb.doors.http.requests.request_bodies import BodyLimit, BodyParts

PORTION_LINES = 5_000
PORTION_BYTES = 1 << 20
MOST_LINES = 100_000  # in one request, blank ones included


class LinePortion(NamedTuple):
    """Lines without the blank ones, and their numbers, counted from 1."""

    numbers: Sequence[int]
    texts: list[bytes]


class LineBody:
    """The lines of a body, given out in portions. It holds one portion and the line that has not ended yet.

    Args:
        parts: The body as it arrives.
        limit: How long a line may be.
        room: Where a portion gets room while it is handled.
    """

    def __init__(self, parts: BodyParts, limit: BodyLimit, room: BodyRoom) -> None:
        self._parts = parts
        self._limit = limit
        self._room = room
        self._unread = b""
        self._unfinished = bytearray()
        self._number = 0
        self._taken = 0  # bytes of the lines that were cut last

    @asynccontextmanager
    async def portion(self) -> AsyncIterator[LinePortion | None]:
        """Lend the next lines, without blank ones, of about PORTION_BYTES or PORTION_LINES; None at the end.

        Raises HttpError if a line is too long, if there are too many, or if they do not come; PeerGone.
        """
        lines = await self._next_portion()
        async with self._room.of(self._taken):
            self._parts.peer.took(self._taken)
            self._taken = 0
            yield lines

    async def _next_portion(self) -> LinePortion | None:
        await trio.lowlevel.checkpoint()
        lines: list[bytes] = []
        size = 0
        while len(lines) < PORTION_LINES and size < PORTION_BYTES and await self._read():
            whole = self._cut(PORTION_LINES - len(lines))
            size += sum(map(len, whole)) + len(whole)
            lines += whole
        self._taken = size
        return self._numbered(lines) if lines or await self._read() else None

    async def _read(self) -> bool:
        """Wait for more to cut; returns whether there is some. What follows the last newline is a line too."""
        while self._parts.more and not self._unread:
            self._unread = await self._parts.next()
        if not self._unread and self._unfinished:
            self._unread = b"\n"
        return bool(self._unread)

    def _cut(self, most: int) -> list[bytes]:
        """Take up to so many whole lines out of what was read."""
        *whole, rest = self._unread.split(b"\n", most)
        spend(len(whole))
        if whole:
            whole[0] = self._finish(whole[0])
        if len(whole) == most:
            self._unread = rest
        else:
            self._unread = b""
            self._unfinished += rest
        self._check_length(max(map(len, (*whole, self._unfinished))))
        return whole

    def _finish(self, end: bytes) -> bytes:
        """Return the line that had not ended, with its end."""
        if not self._unfinished:
            return end
        line = bytes(self._unfinished) + end
        self._unfinished.clear()
        return line

    def _check_length(self, longest: int) -> None:
        if longest > self._limit.size:
            error = self._limit.exceeded()
            raise HttpError(error.status, error.code, f"line {self._number + 1} or one after it: {error}")

    def _numbered(self, lines: list[bytes]) -> LinePortion:
        first, self._number = self._number + 1, self._number + len(lines)
        if self._number > MOST_LINES:
            raise HttpError(413, "BODY_TOO_LARGE", f"more than {MOST_LINES} lines in one request; send several")
        if all(lines) and not any(map(bytes.isspace, lines)):
            return LinePortion(range(first, first + len(lines)), lines)
        numbers = [number for number, line in enumerate(lines, first) if line and not line.isspace()]
        return LinePortion(numbers, [lines[number - first] for number in numbers])
