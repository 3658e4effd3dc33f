"""The stages that take messages, and when each was last used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

import trio

from qb.core.settings import ServerSettings
from qb.core.wire.errors import BrokerError, LimitReached, OutOfSequence, UnknownStage
from qb.storage.engine import Engine, StageLog, Where

logger = logging.getLogger(__name__)

Answer = Callable[
    [BrokerError | None, int], None
]  # called once: with the refusal, or with how many messages the stage holds


class OpenStages:
    """Every open stage. The engine may know others: those that are being committed, or that are about to be deleted."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._used: dict[str, float] = {}
        self._beginning = 0  # stages that are being made

    def __iter__(self) -> Iterator[StageLog]:
        return iter([self._engine.stages()[stage_id] for stage_id in self._used])

    def __contains__(self, stage_id: str) -> bool:
        return stage_id in self._used

    def get(self, stage_id: str) -> StageLog:
        """Return an open stage. Raises UnknownStage."""
        if stage_id not in self._used:
            raise UnknownStage(
                f"stage {stage_id[:80]!r} is not open: its transaction was committed or aborted, or nothing was "
                f"staged in it for {self._settings.transaction_timeout:g} s; begin again"
            )
        return self._engine.stages()[stage_id]

    def idle(self, stage: StageLog) -> float:
        """Return for how many seconds a stage has not been used."""
        return trio.current_time() - self._used[stage.stage_id]

    async def begin(self, transaction: str, number: int | None) -> StageLog:
        """Make a stage, durably; it takes messages after open(). Raises LimitReached, DiskFull, Internal."""
        most = self._settings.max_open_stages
        if len(self._used) + self._beginning >= most:
            raise LimitReached("no more stages can be opened now; commit or abort some", most, "QB_MAX_OPEN_STAGES")
        self._beginning += 1
        try:
            return await self._engine.begin_stage(transaction, number)
        finally:
            self._beginning -= 1

    def open(self, stage_ids: Iterable[str]) -> None:
        """Take messages for these from now on."""
        self._used |= dict.fromkeys(stage_ids, trio.current_time())

    def close(self, stage_ids: Iterable[str]) -> None:
        """Take none any more."""
        for stage_id in stage_ids:
            self._used.pop(stage_id, None)

    def take(self, stage_id: str, where: Where, first: int, count: int, frame: bytes, answer: Answer) -> StageLog:
        """Take a STAGE frame with `count` proved messages; `answer` is called when they are durable. Does not block.

        Raises UnknownStage, UnknownTopic, UnknownPartition, OutOfSequence, LogPoisoned.
        """
        stage = self.get(stage_id)
        self._engine.log(*where)

        def done(error: BrokerError | None, append_ms: int) -> None:
            answer(error, stage.messages)

        if first + count <= stage.taken:
            stage.repeat(frame, where, first, count, done)
        elif first != stage.taken:
            raise OutOfSequence(f"stage {stage_id!r} was given {stage.taken} messages so far, not {first}")
        else:
            stage.append(frame, where, count, done)
        self._used[stage_id] = trio.current_time()
        return stage

    async def delete(self, stage_ids: Iterable[str]) -> None:
        """End stages, whether open or not: nothing more is taken for them from now on, and their space is freed."""
        ended = list(stage_ids)
        self.close(ended)
        try:
            await self._engine.delete_stages(ended)
        except BrokerError as error:
            logger.warning("stages could not be deleted; the next start finds them again: %s", error)

    async def expire(self) -> None:
        """End the stages that have not been used for too long."""
        settled = [stage for stage in self if stage.taken == stage.messages]
        await self.delete([each.stage_id for each in settled if self.idle(each) > self._settings.transaction_timeout])
