"""What the journal asks of the service that keeps its records.

A store is memory, a JetStream stream, or a bucket of objects with conditional PUT. All rules of the journal stand above
it, so every store is written, fenced and read by the same code.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol


class JournalError(Exception):
    """The journal cannot do what was asked."""


class Fenced(JournalError):
    """Another owner has taken over. This one must behave as if it had been killed."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"the owner of epoch {epoch} has taken over the journal; this broker has stopped writing")
        self.epoch = epoch


class RecordsLost(JournalError):
    """The journal does not hold what it held before. Nothing may be appended until it has been restored."""


class JournalGap(JournalError):
    """Records before this position have been trimmed; start from a snapshot behind them."""

    def __init__(self, expected: int, found: int) -> None:
        super().__init__(
            f"the journal goes on at position {found}, and {expected} was expected: "
            "the records between have been trimmed, so start from a snapshot behind them"
        )
        self.expected, self.found = expected, found


class JournalNewer(JournalError):
    """The journal goes on with a record of a later version. Who does not understand it must not write behind it."""

    def __init__(self, position: int) -> None:
        super().__init__(
            f"the record at position {position} of the journal was written by a later version: upgrade this broker"
        )
        self.position = position


class Answer(Enum):
    """What a store says of a write."""

    STORED = "stored"  # all of it, from the position behind `after` on
    REFUSED = "refused"  # the store said that its end is elsewhere; it may be mistaken
    UNKNOWN = "unknown"  # time-out, lost connection, store error: stored, or not, or not yet


class StoredRecord(NamedTuple):
    """One record as it lies in the store."""

    position: int
    data: bytes | memoryview


Answered = Callable[[Answer], None]
Found = Callable[[Sequence[StoredRecord] | None], None]  # None: the read failed


class JournalStore(Protocol):
    """Records at positions 1, 2, 3, …; all methods belong to the event loop's thread."""

    most_bytes: int  # the largest record that it takes

    def write(self, after: int, records: Sequence[bytes], answered: Answered) -> None:
        """Store the records behind position `after`, all or none, if nothing is stored behind it. Does not block.

        `answered` is called exactly once, never inside write(), and after a bounded time. A write may take effect
        long after it was answered with UNKNOWN. Several records are one atomic step; a store that cannot do that
        writes them one after another, each only if its position is free (docs/CLUSTER.md, Object storage).
        """

    def look(self, first: int, most: int, found: Found) -> None:
        """Read up to `most` records from position `first` on. Does not block.

        `found` is called exactly once, never inside look(), and after a bounded time. The answer may be outdated: a
        record that is found is stored; one that is missing may be stored nevertheless.
        """

    def follow(self, first: int, gather: float = 0.0) -> AsyncGenerator[Sequence[StoredRecord], None]:
        """Yield everything from position `first` on, as it comes, in order. It goes on across lost connections.

        With `gather`, records that come one after another may be yielded together, so many seconds late: a reader that
        need not know them at once is not woken for each.
        """

    async def trim(self, before: int) -> None:
        """Remove the records below a position. Their positions are never used again."""


class Timers(Protocol):
    """Calls that are due later."""

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it once in the event loop, when so many seconds have passed. Does not block."""
