"""Carries out what the owner's decisions ask for: one writer of the journal, from its takeover to its end."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from functools import partial

from qb.replication.journal.append_window import Action, AppendWindow, Commit, Committed, Look, Send, Tenure
from qb.replication.journal.journal_records import MOST_RECORD_BYTES, MOST_WINDOW
from qb.replication.journal.journal_store import Answer, JournalError, JournalStore, StoredRecord, Timers
from qb.replication.journal.record_chain import ChainPoint
from qb.replication.journal.takeover import READ_AT_ONCE, ReadOn, TakenOver, Takeover, TakeoverStep

logger = logging.getLogger(__name__)

WINDOW = 64

TakeoverDone = Callable[[TakenOver | JournalError], None]


class JournalWriter:
    """All methods belong to the event loop's thread, and none of them blocks."""

    def __init__(
        self,
        store: JournalStore,
        timers: Timers,
        owner: str,
        *,
        window: int = WINDOW,
        draw: random.Random | None = None,
    ) -> None:
        """Write as `owner`, with at most `window` appends in flight. `draw` gives the random numbers of tenures."""
        if not 0 < window <= MOST_WINDOW:
            raise ValueError(f"the window must be from 1 to {MOST_WINDOW}, not {window}")
        self._store, self._timers, self._owner, self._window = store, timers, owner, window
        self._draw = draw or random.SystemRandom()
        self._most_record_bytes = min(MOST_RECORD_BYTES, store.most_bytes)
        self._appends: AppendWindow | None = None
        self._tenure: Tenure | None = None
        self._point = ChainPoint()
        self._taking: Takeover | None = None  # the takeover that is under way

    @property
    def in_flight(self) -> int:
        """How many records are open, those that wait for room in the window among them."""
        return self._appends.in_flight + self._appends.waiting if self._appends else 0

    @property
    def point(self) -> ChainPoint:
        """Where a reader goes on behind the last payload that is known to be stored; its caller has been called."""
        return self._appends.point if self._appends else self._point

    @property
    def failure(self) -> JournalError | None:
        """Why it writes no more."""
        return self._appends.failure if self._appends else None

    def take_over(self, point: ChainPoint, done: TakeoverDone) -> None:
        """Fence all owners before us, reading on from a point; then `done` is called once with the outcome."""
        self._run(Takeover(point, self._owner, self._draw.getrandbits(64), self._window), partial(self._taken, done))

    def give_up(self) -> None:
        """Stop a takeover that is under way: `done` is not called. A fence that was sent may be stored nevertheless."""
        self._taking = None

    def _taken(self, done: TakeoverDone, outcome: TakenOver | JournalError) -> None:
        if isinstance(outcome, TakenOver):
            self._tenure, self._point = outcome
            self._appends = AppendWindow(outcome.tenure, self._window, self._most_record_bytes, outcome.point)
        done(outcome)

    def append(self, payload: bytes, committed: Committed) -> None:
        """Append behind everything that was appended before.

        `committed` is called once, in order: with the position, or with why this owner will never know: Fenced,
        RecordsLost. It is never called inside append().
        """
        assert self._appends is not None, "take_over() comes first"
        actions = self._appends.append(payload, committed)
        if self._appends.failure is None:
            self._carry_out(actions)
        else:
            self._timers.call_later(0, partial(self._carry_out, actions))

    def stop(self, error: JournalError) -> None:
        """Write nothing more; everything that is open is answered with the error. A takeover is given up."""
        self.give_up()
        if self._appends is not None and self._appends.failure is None:
            self._timers.call_later(0, partial(self._carry_out, self._appends.fail(error)))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Send first and commit then: a caller that appends again when it is called comes behind what is sent here."""
        commits = [action for action in actions if isinstance(action, Commit)]
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Look):
                self._store.look(action.position, 1, partial(self._found, action.position))
            elif not isinstance(action, Commit):
                self._fence_anew()
        for commit in commits:
            try:
                commit.committed(commit.outcome)
            except Exception:
                logger.exception("a callback of the journal failed")

    def _send(self, send: Send) -> None:
        if send.pause:
            self._timers.call_later(send.pause, partial(self._send, send._replace(pause=0.0)))
        elif self.failure is None:
            self._store.write(send.position - 1, (send.data,), partial(self._answered, send.position))

    def _answered(self, position: int, answer: Answer) -> None:
        assert self._appends is not None
        self._carry_out(self._appends.answered(position, answer))

    def _found(self, position: int, records: Sequence[StoredRecord] | None) -> None:
        assert self._appends is not None
        data = next((each.data for each in records or () if each.position == position), None)
        self._carry_out(self._appends.found(position, data))

    def _fence_anew(self) -> None:
        takeover = Takeover(self._point, self._owner, self._draw.getrandbits(64), self._window, instead_of=self._tenure)
        self._run(takeover, self._refenced)

    def _refenced(self, outcome: TakenOver | JournalError) -> None:
        assert self._appends is not None
        if isinstance(outcome, TakenOver):
            self._tenure, self._point = outcome
            self._carry_out(self._appends.refenced(outcome.tenure, outcome.point))
        else:
            self._carry_out(self._appends.fail(outcome))

    def _run(self, takeover: Takeover, done: TakeoverDone) -> None:
        """Carry out a takeover, step by step, unless it is given up."""
        self._taking = takeover

        def carry_out(step: TakeoverStep) -> None:
            if isinstance(step, ReadOn):
                self._timers.call_later(step.pause, partial(self._store.look, step.first, READ_AT_ONCE, read))
            elif isinstance(step, TakenOver):
                done(step)
            else:
                self._store.write(step.after, step.records, answered)

        def read(records: Sequence[StoredRecord] | None) -> None:
            if self._taking is not takeover:
                return
            try:
                step = takeover.read(records)
            except JournalError as error:
                done(error)
            else:
                carry_out(step)

        def answered(answer: Answer) -> None:
            if self._taking is takeover:
                carry_out(takeover.answered(answer))

        carry_out(takeover.start())
