"""Filling an empty journal with what a data directory holds.

A mark in the metadata says that this is under way. While it is there no broker owns the journal, so nothing counts
before the last record of the migration, which takes the mark away. One that was interrupted is begun again: what it has
brought so far is removed by one record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import msgspec
import trio

from qb.replication.engine.payloads import ChangesPayload, StagePayload, decode_payload, encode_metadata
from qb.replication.engine.replicated_cell import MIGRATION
from qb.replication.journal.journal import START, Journal, JournalEntry
from qb.replication.journal.journal_store import JournalError, JournalGap
from qb.replication.journal.record_chain import ChainPoint
from qb.storage.metadata.metadata_records import Entries, StoredValue, apply_changes, decode_changes, encode_changes
from qb.storage.signals import Signal
from qb.storage.stages.stage_store import NOTED

PAUSE = 0.05  # seconds between two reads
MOST_OPEN = 8 << 20  # bytes that were given to the journal and are not committed


class JournalInUse(JournalError):
    """The journal holds a cell already."""

    def __init__(self) -> None:
        super().__init__(
            "the journal is not empty: a data directory can only be migrated into a cell that holds nothing"
        )


class _JournalContents:
    """The metadata that a journal holds, as far as it was read."""

    def __init__(self) -> None:
        self.entries: Entries = {}
        self.point: ChainPoint = START
        self.stages: dict[str, int] = {}  # messages in each
        self._is_written = False

    def take(self, entry: JournalEntry) -> None:
        if entry.payload is not None:
            self._is_written = True
            payload = decode_payload(entry.payload)
            if isinstance(payload, ChangesPayload):
                apply_changes(self.entries, decode_changes(payload.body))
                self.stages = {key: count for key, count in self.stages.items() if NOTED + key in self.entries}
            elif isinstance(payload, StagePayload):
                count = sum([piece.count for piece in payload.pieces])
                self.stages[payload.stage_id] = self.stages.get(payload.stage_id, 0) + count
        self.point = entry.point

    def check(self) -> None:
        """Raises JournalInUse if there is more than an unfinished migration."""
        if self._is_written and MIGRATION not in self.entries:
            raise JournalInUse

    async def read_on(self, journal: Journal) -> None:
        try:
            while entries := await journal.read(self.point):
                for entry in entries:
                    self.take(entry)
        except JournalGap:
            raise JournalInUse from None
        self.check()


class JournalFilling:
    """One migration into a journal. Belongs to the event loop.

    Example:
        >>> filling = JournalFilling(journal, "storage/data of host a")
        >>> epoch = await filling.begin(directory.stages)
        >>> await filling.fill(directory.payloads(filling.stages))
    """

    def __init__(self, journal: Journal, source: str) -> None:
        """`source`: where the data comes from, for people."""
        self._journal, self._source = journal, source
        self._contents = _JournalContents()
        self._open = 0
        self._changed = Signal()
        self._failure: JournalError | None = None

    async def check(self) -> None:
        """Raises JournalInUse if the journal holds anything, as far as can be read; RecordsLost."""
        await self._contents.read_on(self._journal)

    @property
    def stages(self) -> Mapping[str, int]:
        """How many messages an interrupted migration has left in stages that were kept: these are not sent again."""
        return self._contents.stages

    async def begin(self, stages: Collection[str] = ()) -> int:
        """Own the journal, and remove what an interrupted migration has left in it; returns the epoch.

        These stages are kept, since the id of a stage is never used twice.
        Raises JournalInUse, Fenced, RecordsLost.
        """
        await self.check()
        taken = await self._journal.take_over(self._contents.point)
        while self._contents.point.epoch < taken.tenure.epoch:  # a read may be outdated
            await self._contents.read_on(self._journal)
            await trio.sleep(PAUSE)
        mark = StoredValue(msgspec.json.encode({"from": self._source}), 1)
        kept = {MIGRATION, *[NOTED + stage for stage in stages]}
        left = {key: None for key in self._contents.entries if key not in kept}
        await self._append(encode_metadata(encode_changes([(MIGRATION, mark), *left.items()])))
        return taken.tenure.epoch

    async def fill(self, payloads: Iterator[bytes]) -> None:
        """Append all of them, which are read in a thread, then take the mark away. Raises what they raise, Fenced."""
        while (payload := await trio.to_thread.run_sync(next, payloads, None)) is not None:
            await self._append(payload)
        await self._settled(0)  # the mark goes when all else is there
        await self._append(encode_metadata(encode_changes([(MIGRATION, None)])))
        await self._settled(0)

    async def _append(self, payload: bytes) -> None:
        size = len(payload)
        self._open += size

        def committed(outcome: int | JournalError) -> None:
            self._open -= size
            if isinstance(outcome, JournalError):
                self._failure = outcome
            self._changed.set()

        self._journal.append(payload, committed)
        await self._settled(MOST_OPEN)

    async def _settled(self, most: int) -> None:
        """Return when no more than so many bytes are open."""
        while self._open > most and self._failure is None:
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
