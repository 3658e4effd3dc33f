"""Brings a copy on: each entry of the journal becomes works on this disk."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from qb.replication.engine.payloads import (
    BatchPayload,
    ChangesPayload,
    Payload,
    StagePayload,
    decode_payload,
)
from qb.replication.engine.replicated_engine import ReplicatedEngine
from qb.replication.engine.snapshots import TrimSnapshot, ranges_before
from qb.replication.journal.journal import JournalEntry
from qb.replication.journal.journal_store import JournalError
from qb.replication.journal.record_chain import ChainPoint
from qb.storage.engine import ProducerRange
from qb.storage.log.partition_log import LocalLog
from qb.storage.log.recent_batches import StoredBatch
from qb.storage.log.segment_identity import without_identity

LogRanges = dict[str, list[tuple[int, int, int, int]]]
MOST_WAITING = 64  # works that wait for the thread


class CopyDiffers(JournalError):
    """The journal does not continue what the copy has: the copy must be taken anew."""


class Follower:
    """How far a copy has come. Belongs to the event loop."""

    def __init__(
        self, engine: ReplicatedEngine, point: ChainPoint, skip_to: int = 0, ranges: LogRanges | None = None
    ) -> None:
        """Go on behind a point; changes up to `skip_to` came with a snapshot, and so did the `ranges`."""
        self.skip_to = skip_to
        self.ranges = dict(ranges or {})  # of logs that are yet to begin
        self._engine, self._queue = engine, engine.queue
        self.point = point  # all up to here has been given to the queue
        self.epoch, self.owner = point.epoch, ""  # of the newest fence

    async def apply(self, entries: Sequence[JournalEntry]) -> None:
        """Apply entries in their order. Raises CopyDiffers, UnknownPayload; if it is cancelled, `point` is right."""
        for entry in entries:
            if self._queue.waiting > MOST_WAITING:
                await self._queue.drained()
            if self._queue.failure is not None:
                return
            if entry.pieces is None:
                self.epoch, self.owner = entry.epoch, entry.owner
            else:
                await self._take(decode_payload(*entry.pieces), entry.position)
            self.point = entry.point
        await trio.lowlevel.checkpoint()

    async def begin(self, snapshot: TrimSnapshot) -> None:
        """Begin an empty copy with a snapshot."""
        await self._engine.replay_changes(snapshot.body, snapshot.head.applied)
        await self._queue.drained()
        self.ranges = dict(snapshot.head.ranges)
        self.skip_to, self.point = snapshot.head.applied, snapshot.head.trim

    async def _take(self, payload: Payload, position: int) -> None:
        if isinstance(payload, BatchPayload):
            await self._take_batch(payload, position)
        elif isinstance(payload, ChangesPayload):
            await self._queue.drained()
            if position > self.skip_to:
                await self._engine.replay_changes(payload.body, position)
        elif isinstance(payload, StagePayload):
            await self._take_frames(payload, position)

    async def _take_batch(self, payload: BatchPayload, position: int) -> None:
        batch = payload.batch
        log = self._engine.log_of(payload.uid, payload.partition)
        if log is None:
            await self._queue.drained()  # its topic is being made
            log = self._engine.log_of(payload.uid, payload.partition)
        if position <= self.skip_to and (log is None or batch.next_offset <= log.first_offset):
            return  # its topic is deleted, or it is dropped
        if log is not None and not log.next_offset and batch.first_offset and self.skip_to:
            await self._begin_log(log, payload)
        if log is not None and not batch.positions and not log.next_offset:
            await self._begin_at(log, batch, without_identity(payload.ranges))
            return
        if log is None or log.next_offset != batch.first_offset:
            name = f"{log.topic}/{log.partition}" if log else f"partition {payload.partition} of {payload.uid:016x}"
            raise CopyDiffers(f"the journal goes on with offset {batch.first_offset} of {name}, and the copy does not")
        if not log.may_replay(batch.append_ms):
            await self._queue.drained()
        work, finished = log.replay(batch, payload.ranges)
        self._engine.apply(work, finished, position)

    async def _begin_log(self, log: LocalLog, payload: BatchPayload) -> None:
        """Let an empty log begin where the first batch does that is needed."""
        key = f"{payload.uid:016x}/{payload.partition}"
        await self._begin_at(log, payload.batch, ranges_before(self.ranges.pop(key, ()), payload.batch.first_offset))

    async def _begin_at(self, log: LocalLog, batch: StoredBatch, ranges: Sequence[ProducerRange]) -> None:
        doom = self._engine.checkpoint_files.doom
        work, finished = log.begin_at(batch.first_offset, batch.append_ms, ranges, doom)
        self._queue.put(work, finished)
        await self._queue.drained()

    async def _take_frames(self, payload: StagePayload, position: int) -> None:
        await self._queue.drained()
        stage = self._engine.stage(payload.stage_id)
        if stage is None and position <= self.skip_to:
            return  # it has ended
        if stage is None or stage.messages != payload.first:
            what = f"message {payload.first} of stage {payload.stage_id}"
            raise CopyDiffers(f"the journal goes on with {what}, and the copy does not")
        work, finished = stage.replay(payload.pieces, payload.append_ms)
        self._engine.apply(work, finished, position)
