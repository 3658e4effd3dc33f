"""Who reads the socket of a blocking client, as a table; no threads, no sockets.

The link's thread reads it, or the callers do, each of which then reads until its own answer has come. That spares a
change of threads for each call. The thread stands aside while such calls follow each other closely, and never while the
broker pushes messages or a caller waits for many answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Duty(StrEnum):
    """Who reads the socket."""

    READS = "reads"  # the thread
    NEEDED = "needed"  # the thread, and it does not stand aside at its next turn
    MAY_LEAVE = "may leave"  # the thread, until its next turn: a caller would read for itself
    ASIDE = "aside"  # callers; the thread looks again after a while
    IN_USE = "in use"  # callers, and one has read since the thread has looked
    BULK = "bulk"  # the thread alone: a caller waits for many answers
    PUSHES = "pushes"  # the thread alone: the broker pushes on this connection


class DutyEvent(StrEnum):
    """What changes who reads the socket."""

    TURN = "turn"  # the thread is about to read
    ELAPSED = "elapsed"  # the thread has stood aside for a while
    CALLER_READ = "caller read"  # a caller has read for itself, or would have
    NEED = "need"  # a caller waits for something that no caller reads
    BULK_BEGAN = "bulk began"
    BULK_ENDED = "bulk ended"  # of the last caller that waits for many answers
    PUSHED = "pushed"
    LOST = "lost"  # the connection has ended, and the next one starts anew


def _duties() -> dict[tuple[Duty, DutyEvent], Duty]:
    """Return the table: an event that is not named for a state leaves it as it is."""
    table = {(state, event): state for state in Duty for event in DutyEvent}
    for state in Duty:
        table[state, DutyEvent.LOST] = Duty.READS
        table[state, DutyEvent.PUSHED] = Duty.PUSHES
        if state is not Duty.PUSHES:
            table[state, DutyEvent.BULK_BEGAN] = Duty.BULK
    return table | {
        (Duty.READS, DutyEvent.CALLER_READ): Duty.MAY_LEAVE,
        (Duty.READS, DutyEvent.NEED): Duty.NEEDED,
        (Duty.NEEDED, DutyEvent.TURN): Duty.READS,
        (Duty.MAY_LEAVE, DutyEvent.TURN): Duty.ASIDE,
        (Duty.MAY_LEAVE, DutyEvent.NEED): Duty.NEEDED,
        (Duty.ASIDE, DutyEvent.CALLER_READ): Duty.IN_USE,
        (Duty.ASIDE, DutyEvent.ELAPSED): Duty.READS,
        (Duty.ASIDE, DutyEvent.NEED): Duty.READS,
        (Duty.IN_USE, DutyEvent.ELAPSED): Duty.ASIDE,
        (Duty.IN_USE, DutyEvent.NEED): Duty.MAY_LEAVE,
        (Duty.BULK, DutyEvent.BULK_ENDED): Duty.READS,
    }


DUTIES: Mapping[tuple[Duty, DutyEvent], Duty] = _duties()
ASIDE = frozenset({Duty.ASIDE, Duty.IN_USE})  # the thread leaves the socket to callers
ALONE = frozenset({Duty.BULK, Duty.PUSHES})  # callers do not read


class ReadingDuty:
    """Who reads the socket now. Not safe to share between threads without a lock, but for looking at `state`."""

    __slots__ = ("_bulk", "state")

    def __init__(self) -> None:
        self.state = Duty.READS
        self._bulk = 0  # callers that wait for many answers

    def on(self, event: DutyEvent) -> None:
        """Take note of an event."""
        self.state = DUTIES[self.state, event]

    def changes_at(self, event: DutyEvent) -> bool:
        """Would an event change anything?"""
        return DUTIES[self.state, event] is not self.state

    def begin_bulk(self) -> None:
        """A caller waits for many answers."""
        self._bulk += 1
        self.on(DutyEvent.BULK_BEGAN)

    def end_bulk(self) -> None:
        """It waits no more."""
        self._bulk -= 1
        if not self._bulk:
            self.on(DutyEvent.BULK_ENDED)

    def lost(self) -> None:
        """The connection has ended; who waits for many answers waits for those of the next one."""
        self.on(DutyEvent.LOST)
        if self._bulk:
            self.on(DutyEvent.BULK_BEGAN)
