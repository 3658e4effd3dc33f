"""The journal as a broker uses it: append, read, follow, take over, trim."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

import trio

from qb.replication.journal.append_window import Committed
from qb.replication.journal.journal_records import Data, JournalRecordKind, PayloadAssembly, decode_fence
from qb.replication.journal.journal_store import JournalError, JournalStore, StoredRecord, Timers
from qb.replication.journal.journal_writer import WINDOW, JournalWriter
from qb.replication.journal.record_chain import ChainPoint, ChainReader
from qb.replication.journal.takeover import READ_AT_ONCE, TakenOver

START = ChainPoint()


class JournalEntry(NamedTuple):
    """A payload that was appended, or the first or last record of a fence (payload None), and the point behind it.

    A reader may go on at that point.
    """

    position: int
    epoch: int
    pieces: Sequence[Data] | None  # of the payload, as the records have them
    point: ChainPoint
    owner: str = ""  # of a fence: who has written it, for people

    @property
    def payload(self) -> bytes | None:
        """All of the payload."""
        return None if self.pieces is None else b"".join(self.pieces)


class EntryReader:
    """Makes entries of stored records: skips void ones, puts pieces together."""

    def __init__(self, point: ChainPoint) -> None:
        self._chain = ChainReader(point)
        self._assembly = PayloadAssembly()

    @property
    def next(self) -> int:
        """The position to read from."""
        return self._chain.next

    def take(self, records: Sequence[StoredRecord]) -> list[JournalEntry]:
        """Return the entries that these records complete. Raises RecordsLost, JournalGap."""
        return [entry for each in records for entry in self._take(each)]

    def _take(self, stored: StoredRecord) -> list[JournalEntry]:
        entries = []
        for position, record in self._chain.take((stored,)):
            pieces = self._assembly.take(record)
            fence = decode_fence(record.payload) if record.kind is JournalRecordKind.FENCE else None
            if pieces is not None or (fence is not None and fence.index in (0, fence.count - 1)):
                owner = fence.owner if fence is not None else ""
                entries.append(JournalEntry(position, record.epoch, pieces, self._chain.point, owner))
        return entries


class Journal:
    """A totally ordered row of payloads, written by one owner at a time. Belongs to the event loop's thread.

    `timers` must run as long as it is used.

    Example:
        >>> taken = await journal.take_over()
        >>> journal.append(b"a sealed batch", lambda outcome: print("at position", outcome))
    """

    def __init__(
        self,
        store: JournalStore,
        timers: Timers,
        owner: str,
        *,
        window: int = WINDOW,
        draw: random.Random | None = None,
    ) -> None:
        """Use a store as `owner`, a name for people. At most `window` appends (1 to 255) are in flight."""
        self._store = store
        self._writer = JournalWriter(store, timers, owner, window=window, draw=draw)

    def append(self, payload: bytes, committed: Committed) -> None:
        """Append a payload behind all before it. Does not block.

        `committed` is called once, later and in order: with the position of the payload, or with Fenced or
        RecordsLost. After an error the payload may be stored or not: this owner must behave as if it had been killed.
        """
        self._writer.append(payload, committed)

    @property
    def in_flight(self) -> int:
        """How many records are appended and not committed."""
        return self._writer.in_flight

    @property
    def point(self) -> ChainPoint:
        """Where a reader goes on behind the last payload of this owner whose `committed` has been called, or its fence.

        Inside `committed` it may be ahead of that.
        """
        return self._writer.point

    @property
    def failure(self) -> JournalError | None:
        """Why this owner writes no more."""
        return self._writer.failure

    def stop(self, error: JournalError) -> None:
        """Write nothing more; all open appends are answered with the error."""
        self._writer.stop(error)

    async def take_over(self, point: ChainPoint = START) -> TakenOver:
        """Become the owner: fence all owners before us, reading on from `point`. Returns the tenure and the end.

        It tries again until it is known who owns the journal, so give it a time limit. If it is cancelled, a fence that
        was sent already may be stored nevertheless; no other is sent.
        Raises Fenced (another owner was quicker), RecordsLost, JournalGap.
        """
        outcome: TakenOver | JournalError | None = None
        done = trio.Event()

        def finish(result: TakenOver | JournalError) -> None:
            nonlocal outcome
            outcome = result
            done.set()

        self._writer.take_over(point, finish)
        try:
            await done.wait()
        finally:
            self._writer.give_up()
        if isinstance(outcome, JournalError):
            raise outcome
        assert outcome is not None
        return outcome

    async def read(self, point: ChainPoint = START, most: int = READ_AT_ONCE) -> list[JournalEntry]:
        """Return entries behind a point, from at most `most` records. They may be outdated: decide nothing by them.

        An empty list means the end, or that the store did not answer. Raises RecordsLost, JournalGap.
        """
        reader = EntryReader(point)
        records: Sequence[StoredRecord] = ()
        done = trio.Event()

        def found(result: Sequence[StoredRecord] | None) -> None:
            nonlocal records
            records = result or ()
            done.set()

        self._store.look(reader.next, most + (point.position > 0), found)
        await done.wait()
        return reader.take(records)

    async def follow(self, point: ChainPoint = START, gather: float = 0.0) -> AsyncGenerator[list[JournalEntry], None]:
        """Yield the entries behind a point, for ever: as they come, or those of about `gather` seconds together.

        Raises RecordsLost, JournalGap.
        """
        reader = EntryReader(point)
        async with aclosing(self._store.follow(reader.next, gather)) as following:
            async for records in following:
                if entries := reader.take(records):
                    yield entries

    async def follow_stored(self) -> AsyncGenerator[Sequence[StoredRecord], None]:
        """Yield what is stored, valid or not, from the first record that is kept on, for ever."""
        async with aclosing(self._store.follow(1)) as following:
            async for records in following:
                yield records

    async def trim(self, before: int) -> None:
        """Remove the records below a position: only what a journalled drop or a snapshot has made superfluous."""
        await self._store.trim(before)
