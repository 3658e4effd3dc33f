"""A decided transaction on its way from its stages to the ends of its partitions.

The copy can be repeated: all transactions are one producer, whose numbers go on from one to the next, and a log says
which of them it holds. What is held in memory is bounded, whatever the transaction's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import trio

from qb.core.transactions.copy_target import CopyTarget
from qb.core.wire.errors import BrokerError, Internal, UnknownPartition, UnknownTopic
from qb.core.wire.runs.staged_frames import NumberedFrames, number_messages, skip_messages
from qb.storage.engine import (
    TRANSACTIONS,
    AppendRun,
    Done,
    Engine,
    PartitionLog,
    ProducerRange,
    StagedMessages,
    StageLog,
    Where,
)
from qb.storage.signals import Signal
from qb.storage.stages.transaction_records import CommittedShare, DecidedMessages, TransactionRecord

READ_BYTES = 4_000_000  # of a stage at a time
RUN_BYTES = 1_000_000  # numbered in one step of the event loop, and written as one batch
IN_FLIGHT_BYTES = 8_000_000  # given to logs and not yet durable; past this, nothing more is read


class Append(Protocol):
    """AppendService.append(): never raises, calls `done`."""

    def __call__(self, log: PartitionLog, run: AppendRun, done: Done, *, lags: bool = False) -> None: ...


class StageCopy:
    """All of one transaction."""

    def __init__(self, decision: TransactionRecord, engine: Engine, append: Append) -> None:
        """Its logs are not held yet. Topics that are gone are left out."""
        self.decision = decision
        self._engine = engine
        self._give_to_log = append
        self._destinations: dict[Where, CopyTarget] = {}
        for held in decision.partitions:
            try:
                log = engine.log(held.topic, held.partition)
            except (UnknownTopic, UnknownPartition):
                continue
            self._destinations[held.where] = CopyTarget(log, held, decision.first_number)
        self._holds = False  # do the visible ends of its logs stand still for it?
        self._in_flight = 0
        self._moved = Signal()  # something has become durable, or has failed
        self._error: BrokerError | None = None
        self.when_stored: Callable[[], None] | None = None  # called once, when all of it is durable in its logs

    @property
    def shares(self) -> list[CommittedShare]:
        """What is durable in each log."""
        stored = [each for each in self._destinations.values() if each.stored and not each.gone]
        return [destination.share for destination in stored]

    @property
    def given_shares(self) -> list[CommittedShare]:
        """What each log was given in one go."""
        return [each.given_share for each in self._destinations.values()]

    @property
    def is_next(self) -> bool:
        """Would all of it be stored right behind what readers see? Then a start would store it there again."""
        return not self.decision.stages and all(each.is_next for each in self._destinations.values())

    @property
    def is_given(self) -> bool:
        """Do the logs have all of it, durable or on its way?"""
        return self._error is None and all(each.is_given for each in self._destinations.values())

    @property
    def progress(self) -> list[dict[str, Any]]:
        """How far each partition has come, as tools see it."""
        return [destination.progress for destination in self._destinations.values()]

    @property
    def partitions(self) -> Iterable[Where]:
        """Where it goes."""
        return self._destinations

    def holds(self, where: Where) -> bool:
        """Does the transaction keep the visible end of this partition from moving?"""
        destination = self._destinations.get(where)
        return self._holds and destination is not None and not destination.gone

    def hold(self, reason: str | None = None) -> None:
        """Show nothing of the transaction, nor what comes behind it; `reason` is why this lasts."""
        self._holds = True
        for destination in self._destinations.values():
            destination.log.hold(destination.held.end_offset, reason)

    def release(self, *, early: bool = False) -> None:
        """Show all of it, in this one step of the event loop; one that was whole at the start is shown already.

        `early`: it is on its way into the logs, and nothing else is between it and what readers see.
        """
        if self._holds:
            self._holds = False
            for destination in self._destinations.values():
                destination.log.release(destination.log.next_offset if early else 0)

    def resume(self) -> None:
        """Look how far a copy that was begun before the start has come; the logs of one that is not whole are held."""
        for destination in self._destinations.values():
            for found in destination.log.ranges():
                if found.producer_id == TRANSACTIONS:
                    destination.take_in(found)
        if not self.is_complete:
            self.hold()

    def step(self) -> AbstractContextManager[object]:
        """Return a block in which several copies may begin: each log takes what they give it as one batch."""
        return self._engine.commit_step(False)

    def write_now(self) -> None:
        """Have the logs write at once what they were given."""
        for destination in self._destinations.values():
            destination.log.write_now()

    def begin(self, *, lags: bool = False) -> None:
        """Look what is missing, and give the logs what the decision itself holds. Raises BrokerError.

        `lags`: the logs may let it wait a little for company.
        """
        self._error = None
        for destination in self._destinations.values():
            destination.given, destination.seen = destination.stored, 0
            if not destination.is_complete:
                destination.check_writable()
        for each in self.decision.content:
            self._give_at_once(each, lags=lags)

    async def wait(self) -> None:
        """Return when nothing is on its way into a log any more."""
        await self._wait_for_at_most(0)

    async def copy_stages(self) -> None:
        """Return when all messages are durable in their logs; to be called after begin() and wait().

        Raises the BrokerError that prevents it. All of it may be called again then, and goes on where it was.
        """
        if self.decision.stages and not self.is_complete and not self._error:
            try:
                await self._copy(self._stages())
            finally:
                await self.wait()
        if self._error:
            raise self._error
        if not self.is_complete:
            raise Internal(f"the stages of transaction {self.decision.name} do not hold what was committed")

    def _give_at_once(self, content: DecidedMessages, *, lags: bool) -> None:
        """Give a log those of these messages that it does not have: they are few."""
        to = self._destinations.get(content.where)
        if to is None or to.is_complete:
            return
        frames = bytearray(content.frames)
        at = skip_messages(frames, to.given)
        while at < len(frames):
            numbered = number_messages(frames, at, to.log.next_offset, len(frames))
            self._append(to, numbered, lags=lags)
            at = numbered.end

    @property
    def is_complete(self) -> bool:
        """Are all messages durable in the logs that are still there?"""
        return all(destination.is_complete for destination in self._destinations.values())

    def _stages(self) -> Sequence[StageLog]:
        known = self._engine.stages()
        for named in self.decision.stages:
            if named.stage not in known:
                raise Internal(f"stage {named.stage!r} of transaction {self.decision.name} is missing")
        return [known[named.stage] for named in self.decision.stages]

    async def _copy(self, stages: Sequence[StageLog]) -> None:
        """Give the logs what the stages hold, in order; the next portions are read while these are given."""
        # Without a buffer: the reader waits with its portions until they are wanted.
        send, receive = trio.open_memory_channel[StagedMessages](0)
        async with trio.open_nursery() as reading:
            reading.start_soon(self._read, stages, send)
            async for portion in receive:
                await self._give(portion)
                if self._error:
                    break
            reading.cancel_scope.cancel()

    async def _read(self, stages: Sequence[StageLog], send: trio.MemorySendChannel[StagedMessages]) -> None:
        async with send:
            try:
                for stage in stages:
                    portions, position = await stage.read(0, READ_BYTES)
                    while portions:
                        for portion in portions:
                            await send.send(portion)
                        portions, position = await stage.read(position, READ_BYTES)
            except BrokerError as error:
                self._error = self._error or error

    async def _give(self, portion: StagedMessages) -> None:
        """Give a log those of these messages that it does not have."""
        to = self._destinations.get((portion.topic, portion.partition))
        if to is None:
            return
        at = skip_messages(portion.frames, min(to.given - to.seen, portion.count))
        to.seen += portion.count
        while at < len(portion.frames) and not self._error and not to.gone:
            numbered = number_messages(portion.frames, at, to.log.next_offset, RUN_BYTES)
            self._append(to, numbered)
            at = numbered.end
            await trio.lowlevel.checkpoint()
            await to.log.wait_for_room()
            await self._wait_for_at_most(IN_FLIGHT_BYTES)

    def _append(self, to: CopyTarget, numbered: NumberedFrames, *, lags: bool = False) -> None:
        run = AppendRun(numbered.data, numbered.positions, to.log.next_offset, TRANSACTIONS, to.next_number)
        to.give(run)
        self._in_flight += len(run.data)
        self._give_to_log(to.log, run, partial(self._appended, to), lags=lags)

    def _appended(self, to: CopyTarget, runs: Sequence[AppendRun], error: BrokerError | None, append_ms: int) -> None:
        for run in runs:
            if error is None:
                to.take_in(ProducerRange(run.producer_id, run.first_number, run.first_offset, len(run.positions)))
            self._in_flight -= len(run.data)
        if isinstance(error, UnknownTopic):
            to.gone = True
        elif error is not None:
            self._error = self._error or error
        self._moved.set()
        if self.when_stored and not self._in_flight and self.is_complete:
            self.when_stored()
            self.when_stored = None

    async def _wait_for_at_most(self, size: int) -> None:
        while self._in_flight > size:
            await self._moved.wait()
