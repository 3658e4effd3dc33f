"""The decision of a transaction: all of a commit is checked in one step, and becomes the line that is to be written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qb.core.pacing import spend
from qb.core.transactions.open_stages import OpenStages
from qb.core.transactions.unfinished_transactions import TransactionRequest, UnfinishedTransaction
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BadRequest, DiskFull, PartitionHeld
from qb.storage.engine import TRANSACTIONS, Engine, StageLog, Where
from qb.storage.stages.transaction_records import ReservedPartition, TransactionRecord, add_up, check_stage

SPARE_BYTES = 16 * 2**20  # that a commit leaves on the disk


class Decisions:
    """Makes lines. In the logs all transactions are one producer, whose numbers go on from one line to the next."""

    def __init__(self, engine: Engine, opened: OpenStages, unfinished: Sequence[TransactionRecord]) -> None:
        """`unfinished`: the lines that a start has found without a receipt."""
        self._engine = engine
        self._opened = opened
        self._next_number = self._first_free_number(unfinished)

    def _first_free_number(self, unfinished: Sequence[TransactionRecord]) -> int:
        """Return a number larger than any that a message of a transaction has in a log."""
        used = [line.first_number + held.messages for line in unfinished for held in line.partitions]
        for topic in self._engine.topics().values():
            for partition in range(topic.partitions):
                ranges = self._engine.log(topic.topic, partition).ranges()
                used += [each.first_number + each.count for each in ranges if each.producer_id == TRANSACTIONS]
        return max(used, default=1)

    def decide(
        self, request: TransactionRequest, free: int, unfinished: Iterable[UnfinishedTransaction]
    ) -> TransactionRecord:
        """Return the line of a commit; `free` bytes are left, and `unfinished` ones hold their partitions.

        Raises why it cannot be done.
        """
        spend(len(request.stages))
        stages = self._check_stages(request)
        size = sum(stage.size for stage in stages) + sum(len(each.frames) for each in request.content)
        if size and free < size + SPARE_BYTES:
            raise DiskFull(f"the transaction needs {size} bytes and the disk has {free} left")
        totals = add_up(stages) or {each.where: each.messages for each in request.content}
        partitions = [self._reserve(where, count, unfinished) for where, count in sorted(totals.items())]
        decision = TransactionRecord(
            transaction=request.transaction,
            number=request.number,
            stages=list(request.stages),
            partitions=partitions,
            content=list(request.content),
            first_number=self._next_number,
            timestamp=now_ms(),
        )
        self._next_number += max([held.messages for held in partitions], default=0)
        return decision

    def _check_stages(self, request: TransactionRequest) -> list[StageLog]:
        stages = [self._opened.get(named.stage) for named in request.stages]
        if len({stage.stage_id for stage in stages}) < len(stages):
            raise BadRequest("a commit must name each stage once")
        for stage, named in zip(stages, request.stages, strict=True):
            check_stage(stage, request.transaction, request.number, named.messages)
        return stages

    def _reserve(self, where: Where, messages: int, unfinished: Iterable[UnfinishedTransaction]) -> ReservedPartition:
        log = self._engine.log(*where)
        log.check_writable()
        for each in unfinished:
            if each.copying.holds(where):
                raise PartitionHeld(f"{where[0]}/{where[1]} takes no other transaction now: {each.reason}")
        return ReservedPartition(*where, log.end_offset, messages)
