"""What a producer has to do next: pure, without clocks and locks.

A batch is filled by callers until it is full, due or flushed. It is cut into pieces, which are sent in order and wait
for their answers, many at a time. So that the order in a partition holds, a piece that was refused for a reason that
may pass is sent again only when nothing is in flight, before anything else, and only if no later message of its
partition was stored meanwhile: else its messages fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby
from math import inf
from typing import NamedTuple

from qb.clients.producing.producer_options import ProducerOptions
from qb.clients.producing.send_batch import NOT_ACKED, SendBatch, SendPiece
from qb.clients.protocol.client_errors import MessageTooLarge, PublishUncertain
from qb.clients.protocol.unacked_publishes import RefusedPublishes, StoredPublishes
from qb.core.wire.errors import Code

MAY_PASS = frozenset({Code.DISK_FULL})  # refusals after which nothing was kept, and that may not come again


class _Refused(NamedTuple):
    """A run of a piece that may be sent again; `number` is the one that it was sent with."""

    number: int
    piece: SendPiece
    start: int
    stop: int
    error: Exception


class SendQueue:
    """Batches from the first message to the last answer."""

    def __init__(self, options: ProducerOptions) -> None:
        self._options = options
        self.ready: deque[SendBatch] = deque()  # full, due or flushed
        self.answered: deque[SendBatch] = deque()  # all is settled; to be reported and finished
        self.in_hand: SendBatch | SendPiece | None = None  # what the sender works on
        self._outgoing: deque[SendPiece] = deque()
        self._in_flight: dict[int, SendPiece] = {}  # by the first number, in order
        self._refused: list[_Refused] = []
        self._newest_stored: dict[int | None, int] = {}  # a number of each partition, while anything is in flight

    @property
    def is_idle(self) -> bool:
        """Is there nothing to send and nothing to wait for?"""
        return not (self.ready or self._outgoing or self._in_flight or self._refused or self.in_hand)

    def next_step(self, now: float) -> SendBatch | SendPiece | None:
        """Return a batch to cut, a piece to send, or one in flight that waits in vain; None: wait()."""
        self.in_hand = self._next_step(now)
        return self.in_hand

    def _next_step(self, now: float) -> SendBatch | SendPiece | None:
        expired = next(iter(self._in_flight.values()), None)
        if expired is not None and expired.deadline <= now:
            return expired
        if self._refused and not self._in_flight:
            self._send_again(now)
        if self._outgoing:
            return self._outgoing.popleft() if not self._refused and self._outgoing[0].not_before <= now else None
        return self.ready.popleft() if self.ready and not self._refused else None

    def wait(self, now: float) -> float:
        """Return after how many seconds next_step() has something, if nothing else happens until then."""
        oldest = next(iter(self._in_flight.values()), None)
        times = [oldest.deadline] if oldest is not None else []
        times += [self._outgoing[0].not_before] if self._outgoing and not self._refused else []
        return min(times, default=inf) - now

    def cut(self, pieces: Sequence[SendPiece], limit: int) -> None:
        """Send the pieces of a batch next; bodies longer than `limit` fail."""
        self.in_hand = None
        for piece in pieces:
            if piece.batch.size <= limit or max(map(len, piece.bodies)) <= limit:
                self._outgoing.append(piece)
            else:
                self._cut_out_long(piece, limit)

    def _cut_out_long(self, piece: SendPiece, limit: int) -> None:
        for too_long, run in groupby(range(len(piece.bodies)), lambda at: len(piece.bodies[at]) > limit):
            positions = list(run)
            start, stop = positions[0], positions[-1] + 1
            if too_long:
                text = f"a body is longer than this broker's limit of {limit} bytes"
                self.fail(piece, MessageTooLarge(Code.MESSAGE_TOO_LARGE, text), start, stop)
            else:
                self._outgoing.append(piece.part(start, stop))

    def sent(self, piece: SendPiece, deadline: float) -> None:
        """A piece is numbered and on its way; `deadline` is when to stop waiting for its answers."""
        assert piece.unacked is not None
        self.in_hand = None
        piece.deadline = deadline
        self._in_flight[piece.unacked.first] = piece
        if not self._options.waits_for_acks:
            where = -1 if piece.partition is None else piece.partition
            self._settle(piece, 0, len(piece.bodies), NOT_ACKED._replace(partition=where))

    def fail(self, piece: SendPiece, error: Exception, start: int = 0, stop: int | None = None) -> None:
        """Messages of a piece are not stored, for good."""
        self._settle(piece, start, len(piece.bodies) if stop is None else stop, error)

    def answer(self, piece: SendPiece) -> Exception | None:
        """Take in the answers to a piece; what has none is uncertain. Returns an error that no handle can report."""
        unacked = piece.unacked
        assert unacked is not None
        if self._in_flight.pop(unacked.first, None) is None:
            return None
        if not self._options.waits_for_acks:
            refused = unacked.failure()
            return refused.error if refused is not None else None
        if unacked.left:
            text = "the broker did not answer in time: the message may or may not be stored"
            unacked.answer(RefusedPublishes(unacked.first, unacked.count, PublishUncertain(text)))
        for answer in unacked.answers:
            start = answer.number - unacked.first
            if isinstance(answer, StoredPublishes):
                newest = self._newest_stored.get(piece.partition, 0)
                self._newest_stored[piece.partition] = max(newest, answer.number)
                self._settle(piece, start, start + answer.size, answer)
            elif isinstance(answer, RefusedPublishes):
                self._refuse(_Refused(answer.number, piece, start, start + answer.size, answer.error))
        if not self._in_flight and not self._refused:
            self._newest_stored.clear()
        return None

    def _refuse(self, run: _Refused) -> None:
        code = getattr(run.error, "code", None)
        if code in MAY_PASS and run.piece.attempts < self._options.retries:
            self._refused.append(run)
        else:
            self.fail(run.piece, run.error, run.start, run.stop)

    def _send_again(self, now: float) -> None:
        """Nothing is in flight: have what was refused sent again, unless it would come behind a later message."""
        refused, self._refused = sorted(self._refused, key=lambda run: run.number), []
        again: list[SendPiece] = []
        for run in refused:
            if run.number < self._newest_stored.get(run.piece.partition, 0):
                self.fail(run.piece, run.error, run.start, run.stop)
                continue
            piece = run.piece.part(run.start, run.stop)
            piece.attempts, piece.not_before = piece.attempts + 1, now + self._options.retry_backoff
            again.append(piece)
        self._newest_stored.clear()
        self._outgoing.extendleft(reversed(again))

    def _settle(self, piece: SendPiece, start: int, stop: int, answer: StoredPublishes | Exception) -> None:
        if piece.batch.settle(piece.indexes[start:stop], answer):
            self.answered.append(piece.batch)

    @property
    def in_flight(self) -> list[SendPiece]:
        """What is sent and not answered."""
        return list(self._in_flight.values())

    def give_up(self, error: Exception) -> None:
        """Fail all that is not in flight, and not settled."""
        in_hand, self.in_hand = self.in_hand, None
        if isinstance(in_hand, SendBatch):
            self.ready.appendleft(in_hand)
        elif in_hand is not None and in_hand.unacked is None:
            self._outgoing.appendleft(in_hand)
        for piece in self._outgoing:
            self.fail(piece, error)
        for run in self._refused:
            self.fail(run.piece, error, run.start, run.stop)
        for batch in self.ready:
            if batch.settle(range(len(batch.bodies)), error):
                self.answered.append(batch)
        self._outgoing.clear()
        self.ready.clear()
        self._refused = []
