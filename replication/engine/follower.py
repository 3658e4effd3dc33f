"""Brings a copy on: each entry of the journal becomes works on this disk."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from qb.replication.engine.payloads import (
    BatchPayload,
    ChangesPayload,
    StagePayload,
    decode_payload,
)
from qb.replication.engine.replicated_engine import ReplicatedEngine
from qb.replication.journal.journal import JournalEntry
from qb.replication.journal.journal_store import JournalError
from qb.replication.journal.record_chain import ChainPoint

MOST_WAITING = 64  # works that wait for the thread


class CopyDiffers(JournalError):
    """The journal does not continue what the copy has: the copy must be taken anew."""


class Follower:
    """How far a copy has come. Belongs to the event loop."""

    def __init__(self, engine: ReplicatedEngine, point: ChainPoint) -> None:
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
            if entry.payload is None:
                self.epoch, self.owner = entry.epoch, entry.owner
            else:
                await self._take(entry.payload)
            self.point = entry.point
        await trio.lowlevel.checkpoint()

    async def _take(self, data: bytes) -> None:
        payload = decode_payload(data)
        if isinstance(payload, BatchPayload):
            await self._take_batch(payload)
        elif isinstance(payload, ChangesPayload):
            await self._queue.drained()
            await self._engine.replay_changes(payload.body)
        elif isinstance(payload, StagePayload):
            await self._take_frames(payload)

    async def _take_batch(self, payload: BatchPayload) -> None:
        batch = payload.batch
        log = self._engine.log_of(payload.uid, payload.partition)
        if log is None:
            await self._queue.drained()  # its topic is being made
            log = self._engine.log_of(payload.uid, payload.partition)
        if log is None or log.next_offset != batch.first_offset:
            name = f"{log.topic}/{log.partition}" if log else f"partition {payload.partition} of {payload.uid:016x}"
            raise CopyDiffers(f"the journal goes on with offset {batch.first_offset} of {name}, and the copy does not")
        if not log.may_replay(batch.append_ms):
            await self._queue.drained()
        work, finished = log.replay(batch, payload.ranges)
        self._engine.apply(work, finished)

    async def _take_frames(self, payload: StagePayload) -> None:
        await self._queue.drained()
        stage = self._engine.stage(payload.stage_id)
        if stage is None or stage.messages != payload.first:
            what = f"message {payload.first} of stage {payload.stage_id}"
            raise CopyDiffers(f"the journal goes on with {what}, and the copy does not")
        work, finished = stage.replay(payload.pieces, payload.append_ms)
        self._engine.apply(work, finished)
