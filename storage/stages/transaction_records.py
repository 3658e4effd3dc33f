"""What is stored of a transaction, and what that means for a client that asks about it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from qb.core.wire.errors import BadRequest, UnknownStage
from qb.storage.engine import StageLog, Where

KEY = "transaction/"  # where decisions are kept in the metadata, by transaction


class NamedStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stage that a commit names, and how many messages it must hold."""

    stage: str
    messages: int


class CommittedShare(msgspec.Struct, frozen=True):
    """What a transaction has put into one partition. Messages of others may lie between the two offsets."""

    topic: str
    partition: int
    first_offset: int
    last_offset: int
    messages: int


class CommittedTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that is over: visible as a whole, unless it was abandoned."""

    transaction: str
    number: int | None
    replayed: bool = False  # it had been committed before this was asked for
    abandoned: bool = False  # an operator gave it up: only `messages` of it are there
    messages: int = 0
    partitions: list[CommittedShare] = []
    timestamp: int = 0  # when it was decided, in ms
    durability: str = ""


class ReservedPartition(msgspec.Struct, frozen=True):
    """A partition that the transaction goes to."""

    topic: str
    partition: int
    end_offset: int  # its visible end before: none of the transaction's messages lies before it
    messages: int

    @property
    def where(self) -> Where:
        return self.topic, self.partition


class DecidedMessages(msgspec.Struct, frozen=True):
    """Messages for one partition that lie in the decision itself: its transaction needs no stage."""

    topic: str
    partition: int
    messages: int
    frames: bytes  # whole DATA frames, back to back

    @property
    def where(self) -> Where:
        return self.topic, self.partition


class TransactionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The line that makes a transaction committed; without a receipt its messages are yet to be copied."""

    transaction: str
    number: int | None
    stages: list[NamedStage] = []
    partitions: list[ReservedPartition] = []
    content: list[DecidedMessages] = []  # its messages, if they are not in stages
    first_number: int = 0  # of its messages, in each of its logs
    timestamp: int = 0  # when it was decided, in ms; 0: by a broker that did not note it
    receipt: CommittedTransaction | None = None

    @property
    def key(self) -> str:
        return KEY + self.transaction

    @property
    def encoded(self) -> str:
        """The metadata's value: one text takes much less memory than the same as a mapping."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, value: object) -> TransactionRecord:
        """Return the record in a metadata value; brokers before this wrote a mapping."""
        return msgspec.json.decode(value, type=cls) if isinstance(value, str) else msgspec.convert(value, cls)

    @property
    def name(self) -> str:
        """What people call it."""
        return repr(self.transaction) if self.number is None else f"{self.transaction!r} number {self.number}"

    def covers(self, number: int | None) -> bool:
        """Does this line say that the transaction with that number is committed? Raises BadRequest."""
        if number is None and self.number is None:
            return True
        if number is None or self.number is None:
            used, asked = ("with", "without one") if number is None else ("without", "with one")
            raise BadRequest(f"transaction {self.transaction!r} is used {used} numbers and cannot be used {asked}")
        return number <= self.number

    def ends(self, stage: StageLog) -> bool:
        """Is the stage of no more use once this is committed?"""
        if stage.transaction != self.transaction:
            return False
        return stage.number is None or self.number is None or stage.number <= self.number

    def replay(self, number: int | None, durability: str) -> CommittedTransaction:
        """Return the receipt for a client that asks again; of an older number only that it was committed is known."""
        if self.receipt is not None and number == self.number:
            return msgspec.structs.replace(self.receipt, replayed=True)
        return CommittedTransaction(transaction=self.transaction, number=number, replayed=True, durability=durability)


def ended(decision: TransactionRecord, receipt: CommittedTransaction) -> TransactionRecord:
    """Return what is remembered of a transaction that is over."""
    return msgspec.structs.replace(decision, stages=[], partitions=[], content=[], receipt=receipt)


def check_stage(stage: StageLog, transaction: str, number: int | None, messages: int) -> None:
    """Raises unless the stage belongs to the transaction and holds exactly so many messages."""
    if (stage.transaction, stage.number) != (transaction, number):
        raise UnknownStage(f"stage {stage.stage_id!r} belongs to another transaction: {stage.transaction!r}")
    if stage.failure is not None:
        raise stage.failure.with_traceback(None)
    if not stage.messages == stage.taken == messages:
        on_their_way = stage.taken - stage.messages
        more = f", and {on_their_way} more are on their way" if on_their_way else ""
        raise UnknownStage(f"stage {stage.stage_id!r} holds {stage.messages} messages{more}, not {messages}")


def add_up(stages: Iterable[StageLog]) -> dict[Where, int]:
    """Return how many messages the stages hold for each partition."""
    totals: dict[Where, int] = {}
    for stage in stages:
        for where, count in stage.counts.items():
            totals[where] = totals.get(where, 0) + count
    return totals
