"""Publishes and stagings that the broker has not answered yet, kept byte for byte.

Many publishes travel as one batch, and are answered in any cut and, over several partitions, in any order. Each number
is answered once: a second answer to a retry changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from qb.clients.protocol.client_errors import PublishUncertain, QBError
from qb.clients.protocol.receipts import Receipt, StoredRun
from qb.core.wire.frames import Frames, frame_length
from qb.core.wire.runs.publish_table import as_publishes, is_publish_run

MAX_BATCHES = 32_768  # the broker remembers numbers in ranges, and so many of those for one that publishes alone


class StoredPublishes(NamedTuple):
    """A run of publishes that the broker has stored: number + i is at offset + i."""

    number: int
    size: int
    partition: int
    offset: int
    timestamp: int
    durability: str
    duplicate: bool
    unverified: bool = False  # a duplicate of what is gone, so that it could not be compared

    def receipt(self, topic: str, index: int = 0) -> Receipt:
        """Return the receipt of one of them."""
        offset = self.offset if self.offset < 0 else self.offset + index
        return Receipt(topic, self.partition, offset, self.timestamp, self.durability, self.duplicate, self.unverified)


class HeldStageFrame(NamedTuple):
    """A STAGE frame whose messages the broker has."""

    number: int
    size: int
    messages: int  # in the stage by now


class RefusedPublishes(NamedTuple):
    """A run of publishes, or a STAGE frame, that will never be stored, or of which it is not known."""

    number: int
    size: int
    error: QBError


Answer = StoredPublishes | HeldStageFrame | RefusedPublishes


class UnackedBatch:
    """Publishes with consecutive numbers, sent together by one caller; or one STAGE frame."""

    __slots__ = ("_answered", "answers", "codec", "count", "data", "first", "left", "waiter")

    def __init__(self, first: int, count: int, data: Frames, waiter: Any = None, codec: str | None = None) -> None:
        self.first, self.count, self.data = first, count, data
        self.left = count  # how many are not answered yet
        self.answers: list[Answer] = []
        self.codec = codec  # that compresses it on its way
        self.waiter = waiter  # belongs to the caller that sent the batch
        self._answered = bytearray(count)  # 1 for each number that has its answer

    def answer(self, answer: Answer) -> None:
        """Note the answer for those numbers of ours that it covers and that have none yet."""
        if answer.number == self.first and answer.size == self.count == self.left:
            self._answered = bytearray(b"\1") * self.count
            self.answers.append(answer)
            self.left = 0  # last, as below
            return
        start = max(answer.number - self.first, 0)
        stop = min(answer.number + answer.size - self.first, self.count)
        while start < stop and (start := self._answered.find(0, start, stop)) >= 0:
            end = self._answered.find(1, start, stop)
            end = stop if end < 0 else end
            self._answered[start:end] = b"\1" * (end - start)
            self.answers.append(_part(answer, self.first + start, end - start))
            self.left -= end - start  # last: who sees 0 here sees all answers
            start = end

    @property
    def first_unanswered(self) -> int:
        """How many frames come before the first unanswered one; there must be one."""
        return self._answered.find(0)

    def unanswered(self) -> Frames:
        """Return the frames without an answer, and only these: one that was refused must not be stored after all."""
        if self.left == self.count:
            return self.data
        return b"".join(frame for frame, done in zip(_frames(self.data), self._answered, strict=True) if not done)

    def receipt(self, topic: str) -> Receipt:
        """Return the receipt of a batch of one. Raises why it was not stored, or PublishUncertain."""
        if self.left:
            raise PublishUncertain("the broker did not answer in time: the message may or may not be stored")
        answer = self.answers[0]
        if isinstance(answer, RefusedPublishes):
            raise answer.error
        assert isinstance(answer, StoredPublishes)
        return answer.receipt(topic)

    def stored_runs(self, index: int) -> list[StoredRun]:
        """Return what is stored, in order; `index` is what the caller counts as the batch's first body."""
        stored = [answer for answer in self.answers if isinstance(answer, StoredPublishes)]
        stored.sort()
        return [StoredRun(index + run.number - self.first, run.size, run.partition, run.offset) for run in stored]

    def failure(self) -> RefusedPublishes | None:
        """Return the first refusal by number."""
        refused = [answer for answer in self.answers if isinstance(answer, RefusedPublishes)]
        return min(refused, key=attrgetter("number"), default=None)


def _frames(data: Frames) -> Iterator[memoryview]:
    data = as_publishes(data) if is_publish_run(data) else data
    position, view = 0, memoryview(data)
    while position < len(data):
        length = frame_length(data, position)
        yield view[position : position + length]
        position += length


def _part(answer: Answer, number: int, size: int) -> Answer:
    """Return the answer for a part of what it covers."""
    if (number, size) == (answer.number, answer.size):
        return answer
    if not isinstance(answer, StoredPublishes):
        return answer._replace(number=number, size=size)
    return answer._replace(number=number, size=size, offset=answer.offset + number - answer.number)


class UnackedPublishes:
    """Batches in the order of their numbers, until all of a batch is answered."""

    def __init__(self, max_numbers: int, max_bytes: int, max_batches: int = MAX_BATCHES) -> None:
        self._max_numbers, self._max_bytes, self._max_batches = max_numbers, max_bytes, max_batches
        self._firsts: list[int] = []
        self._batches: list[UnackedBatch] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number < self._firsts[at] + self._batches[at].count

    @property
    def is_empty(self) -> bool:
        """Is everything answered?"""
        return not self._batches

    def has_room(self, next_number: int) -> bool:
        """False while so much is unanswered that nothing more should be sent.

        Counts from the oldest unanswered number: that is how far back the broker has to remember.
        """
        if not self._batches:
            return True
        return (
            next_number - self._firsts[0] < self._max_numbers
            and self._bytes < self._max_bytes
            and len(self._batches) < self._max_batches
        )

    def add(self, batch: UnackedBatch) -> None:
        """Keep a batch whose numbers are above all others."""
        self._firsts.append(batch.first)
        self._batches.append(batch)
        self._bytes += len(batch.data)

    def answer(self, answer: Answer) -> list[UnackedBatch]:
        """Hand the answer to the batches that it covers; return and forget those that are complete now."""
        end = answer.number + answer.size
        at = max(bisect_right(self._firsts, answer.number) - 1, 0)
        complete: list[UnackedBatch] = []
        while at < len(self._batches) and self._firsts[at] < end:
            batch = self._batches[at]
            batch.answer(answer)
            if batch.left:
                at += 1
            else:
                complete.append(batch)
                self._forget(at)
        return complete

    def abandon(self, batch: UnackedBatch) -> None:
        """Forget a batch, so that it is not sent again; late answers to it are ignored."""
        at = bisect_right(self._firsts, batch.first) - 1
        if at >= 0 and self._batches[at] is batch:
            self._forget(at)

    def abandon_all(self, error: QBError) -> list[UnackedBatch]:
        """Forget every batch and answer what it lacks with `error`; return them."""
        batches, self._batches, self._firsts, self._bytes = self._batches, [], [], 0
        for batch in batches:
            batch.answer(RefusedPublishes(batch.first, batch.count, error))
        return batches

    def unanswered(self) -> list[tuple[str | None, Frames, int]]:
        """Return all that has to be sent again on a new connection, in order: codec, frames, the first's number."""
        return [(batch.codec, batch.unanswered(), batch.first + batch.first_unanswered) for batch in self._batches]

    def _forget(self, at: int) -> None:
        self._bytes -= len(self._batches[at].data)
        del self._batches[at], self._firsts[at]
