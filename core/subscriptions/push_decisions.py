"""What a subscription asks the broker to do."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class PushDecision(msgspec.Struct, frozen=True, gc=False):
    """Push these messages, in this order, to this subscriber: it holds them from now on."""

    subscriber: str
    partition: int
    runs: tuple[range, ...]
    attempt: int  # above 1: first make a snapshot durable that was taken since
    suspects: bool = False  # of an unexplained death: to be handled one at a time

    @property
    def size(self) -> int:
        """How many messages."""
        return sum(map(len, self.runs))


class DeadLetterDecision(NamedTuple):
    """Publish this message to the dead-letter topic, then call dead_lettered(), or dead_letter_failed()."""

    partition: int
    offset: int
    attempts: int
    reason: str


Decision = PushDecision | DeadLetterDecision
