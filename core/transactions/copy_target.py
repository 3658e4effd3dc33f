"""One log that a transaction goes to, and how far it has come there."""

from __future__ import annotations

from typing import Any

import msgspec

from qb.core.wire.errors import UnknownTopic
from qb.storage.engine import AppendRun, PartitionLog, ProducerRange
from qb.storage.stages.transaction_records import CommittedShare, ReservedPartition


class CopyTarget:
    """One log that a transaction goes to, and how far it has come."""

    def __init__(self, log: PartitionLog, held: ReservedPartition, first_number: int) -> None:
        self.log = log
        self.held = held
        self.gone = False  # the topic was deleted, and its messages with it
        self.stored = 0  # messages of the transaction that are durable in it
        self.given = 0  # those, and those that are on their way
        self.seen = 0  # messages for it that this pass has come by
        self._first_number = first_number
        self._first_offset = self._last_offset = held.end_offset
        self._first_given = held.end_offset  # the offset of the first message that this pass has given

    @property
    def is_complete(self) -> bool:
        return self.gone or self.stored == self.held.messages

    @property
    def next_number(self) -> int:
        return self._first_number + self.given

    @property
    def share(self) -> CommittedShare:
        """What is durable in the log."""
        return CommittedShare(self.held.topic, self.held.partition, self._first_offset, self._last_offset, self.stored)

    @property
    def given_share(self) -> CommittedShare:
        """What the log was given in one go."""
        first, count = self._first_given, self.given
        return CommittedShare(self.held.topic, self.held.partition, first, first + count - 1, count)

    @property
    def is_next(self) -> bool:
        """Would the log store what it is given now right behind what readers see, and nothing of it before?"""
        return not self.stored and self.log.next_offset == self.log.end_offset

    @property
    def is_given(self) -> bool:
        """Does the log have all of it, durable or on its way?"""
        return self.given == self.held.messages

    def give(self, run: AppendRun) -> None:
        """Note that a run is on its way."""
        if not self.given:
            self._first_given = run.first_offset
        self.given += len(run.positions)

    @property
    def progress(self) -> dict[str, Any]:
        held = self.held
        return {**msgspec.structs.asdict(held), "copied": self.stored}

    def check_writable(self) -> None:
        """Raises why nothing can be added to the log. A topic that was deleted needs nothing."""
        try:
            self.log.check_writable()
        except UnknownTopic:
            self.gone = True

    def take_in(self, found: ProducerRange) -> None:
        """Take note of numbers that the log holds. Those of earlier transactions are smaller than ours, and a log takes
        transactions in the order of their numbers: one that holds larger numbers holds all of ours.
        """
        before = found.first_number - self._first_number  # how many of ours come before the first of these
        stored = min(before + found.count, self.held.messages)
        if stored <= self.stored:
            return
        if before <= 0:
            self._first_offset = found.first_offset - before
        self.stored = stored
        self._last_offset = found.first_offset + stored - 1 - before
