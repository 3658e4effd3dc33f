"""The owner's decisions: what it sends, what it knows to be stored, what it sends again, when it is fenced.

No I/O and no clock: answers in, actions out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from qb.replication.journal.journal_records import (
    MOST_WINDOW,
    Data,
    Fragment,
    JournalRecord,
    decode,
    encode,
    fragments,
)
from qb.replication.journal.journal_store import Answer, Fenced, JournalError
from qb.replication.journal.record_chain import ChainPoint, extended

PAUSES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # seconds before a record is sent again

Committed = Callable[[int | JournalError], None]  # with the position of its last record, or why it is not known


class Tenure(NamedTuple):
    """What a takeover gives: the right to write, until the next one."""

    epoch: int
    writer: int
    position: int  # the end of the journal behind the fence
    valid: int  # its last valid record


class Send(NamedTuple):
    """Write a record behind position - 1."""

    position: int
    data: bytes
    pause: float = 0.0


class Look(NamedTuple):
    """Read what is stored at a position, and give it to found()."""

    position: int


class Commit(NamedTuple):
    """A payload is stored for good."""

    committed: Committed
    outcome: int | JournalError


class FenceAnew(NamedTuple):
    """A record that belongs to no owner has taken a position: write a fence of our own, then call refenced()."""


Action = Send | Look | Commit | FenceAnew


class PendingState(Enum):
    """What is known of a record."""

    SENT = "sent"
    STORED = "stored"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    LOOKING = "looking"


@dataclass(slots=True)
class Payload:
    """What a caller gave, until all of it is stored."""

    data: bytes
    committed: Committed


@dataclass(slots=True)
class PendingRecord:
    """A record that is not known to be stored with all before it."""

    position: int
    data: bytes
    payload: Payload | None  # the payload that exists with it
    state: PendingState = PendingState.SENT
    attempts: int = 0


class AppendWindow:
    """The appends of one owner. At most `window` positions are open at a time."""

    def __init__(self, tenure: Tenure, window: int, most_record_bytes: int, point: ChainPoint | None = None) -> None:
        """`point` is the one behind the fence."""
        assert 0 < window <= MOST_WINDOW
        self.point = self._stored_to = (
            point or ChainPoint()
        )  # behind the last payload that is wholly stored; behind the last record
        self._tenure = tenure
        self._window = window
        self._most_record_bytes = most_record_bytes
        self._last = tenure.position  # the position of the newest record
        self._valid = tenure.valid
        self._payloads: deque[Payload] = deque()  # not wholly stored, oldest first
        self._waiting: deque[tuple[Fragment, Payload | None]] = deque()
        self._pending: deque[PendingRecord] = deque()
        self.failure: JournalError | None = None
        self._is_refencing = False

    @property
    def in_flight(self) -> int:
        """How many positions are open."""
        return len(self._pending)

    @property
    def waiting(self) -> int:
        """How many records wait for room in the window."""
        return len(self._waiting)

    def append(self, data: bytes, committed: Committed) -> list[Action]:
        """Take one more payload. Its outcome is reported by a Commit."""
        if self.failure is not None:
            return [Commit(committed, self.failure)]
        payload = Payload(data, committed)
        self._payloads.append(payload)
        self._cut(payload)
        return list(self._fill())

    def _cut(self, payload: Payload) -> None:
        pieces = [*fragments(payload.data, self._most_record_bytes)]
        self._waiting.extend((piece, None) for piece in pieces[:-1])
        self._waiting.append((pieces[-1], payload))

    def _fill(self) -> Iterator[Action]:
        """Send what the window has room for."""
        while self._waiting and len(self._pending) < self._window and not self._is_refencing:
            fragment, payload = self._waiting.popleft()
            record = JournalRecord(fragment.kind, *self._tenure[:2], previous=self._valid, payload=fragment.data)
            self._last = self._valid = self._last + 1
            self._pending.append(PendingRecord(self._last, encode(record), payload))
            assert self._last - self._pending[0].position < self._window, "an expectation lies beyond the fence"
            yield Send(self._last, self._pending[-1].data)

    def answered(self, position: int, answer: Answer) -> list[Action]:
        """Take the answer to a Send."""
        pending = self._at(position)
        if pending is None or pending.state is PendingState.STORED:
            return []
        if answer is Answer.STORED:
            pending.state = PendingState.STORED
            return self._advance()
        if pending.state is not PendingState.SENT:
            return []
        pending.state = PendingState.REFUSED if answer is Answer.REFUSED else PendingState.UNKNOWN
        return self._resolve() if pending is self._pending[0] else []

    def _at(self, position: int) -> PendingRecord | None:
        index = position - self._pending[0].position if self._pending else -1
        return self._pending[index] if 0 <= index < len(self._pending) else None

    def _resolve(self) -> list[Action]:
        """Only the oldest open record is resolved: those behind it cannot be stored before it is."""
        oldest = self._pending[0]
        if oldest.state is PendingState.REFUSED:
            oldest.state = PendingState.LOOKING
            return [Look(oldest.position)]
        return [self._again(oldest)]

    def _again(self, pending: PendingRecord) -> Send:
        """Send it with the same expectation: if it is stored already, the second copy is refused."""
        pending.state = PendingState.SENT
        pause = PAUSES[min(pending.attempts, len(PAUSES) - 1)]
        pending.attempts += 1
        return Send(pending.position, pending.data, pause)

    def _advance(self) -> list[Action]:
        """Commit the stored prefix, send again what was refused behind it, and fill the window."""
        actions: list[Action] = []
        oldest = self._pending[0]
        while self._pending and self._pending[0].state is PendingState.STORED:
            stored = self._pending.popleft()
            self._stored_to = extended(self._stored_to, stored.position, stored.data)
            if stored.payload is not None:
                self.point = self._stored_to
                self._payloads.popleft()
                actions.append(Commit(stored.payload.committed, stored.position))
        if oldest.state is not PendingState.STORED:
            return actions
        for each in self._pending:
            if each.state in (PendingState.REFUSED, PendingState.UNKNOWN):
                each.state, each.attempts = PendingState.SENT, 0
                actions.append(Send(each.position, each.data))
        return actions + list(self._fill())

    def found(self, position: int, data: Data | None) -> list[Action]:
        """Take what a Look found; None: nothing, or the read failed. Only a record that is found decides."""
        pending = self._at(position)
        if pending is None or pending.state is not PendingState.LOOKING:
            return []
        if data is None:
            return [self._again(pending)]
        if data == pending.data:
            pending.state = PendingState.STORED
            return self._advance()
        record = decode(data)
        if record is not None and record.epoch > self._tenure.epoch:
            return self.fail(Fenced(record.epoch))
        self._is_refencing = True
        return [FenceAnew()]

    def refenced(self, tenure: Tenure, point: ChainPoint | None = None) -> list[Action]:
        """Go on behind a fence of our own: payloads that are not wholly stored are sent again, at new positions."""
        self._tenure, self._last, self._valid = tenure, tenure.position, tenure.valid
        self.point = self._stored_to = point or ChainPoint()
        self._is_refencing = False
        self._pending.clear()
        self._waiting.clear()
        for payload in self._payloads:
            self._cut(payload)
        return list(self._fill())

    def fail(self, error: JournalError) -> list[Action]:
        """Answer everything that is open, and all that comes later, with an error. Nothing more is sent."""
        self.failure = error
        actions: list[Action] = [Commit(payload.committed, error) for payload in self._payloads]
        self._payloads.clear()
        self._pending.clear()
        self._waiting.clear()
        return actions
