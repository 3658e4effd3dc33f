"""Bytes in, lines out, however TCP cuts them."""

from __future__ import annotations

from collections.abc import Iterator


class LineSplitter:
    """What one peer has sent and is not a whole line yet. Never keeps more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._unfinished = bytearray()
        self._too_long = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Yield each line that is whole now, without its end; None for one that was longer than the limit."""
        at = 0  # one line after the other: a list of all of them would take far more memory than the bytes
        while (end := data.find(b"\n", at)) >= 0:
            self._keep(data[at:end])
            yield self._take()
            at = end + 1
        self._keep(data[at:])

    def finish(self) -> Iterator[bytes | None]:
        """Yield the last line if its end never came."""
        if self._unfinished or self._too_long:
            yield self._take()

    @property
    def unfinished(self) -> int:
        """How many bytes of a line that is not whole yet are kept."""
        return len(self._unfinished)

    def discard(self) -> None:
        """Let go of what has come of a line."""
        self._unfinished, self._too_long = bytearray(), False

    def _keep(self, part: bytes) -> None:
        if len(self._unfinished) + len(part) > self.limit:
            self._too_long = True
            self._unfinished.clear()
        elif not self._too_long:
            self._unfinished += part

    def _take(self) -> bytes | None:
        line = None if self._too_long else bytes(self._unfinished)
        self._too_long = False
        self._unfinished.clear()
        return line
