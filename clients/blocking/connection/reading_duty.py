"""Who reads the socket of a blocking client, as a table; no threads, no sockets.

The link's thread reads it, or the callers do, each of which then reads until its own answer has come. That spares a
change of threads for each call. The thread stands aside while such calls follow each other closely, and never while a
caller waits for many answers.

Of what the broker pushes, the thread that handles it reads the next message itself: it is idle then. The link's thread
stands aside once it has given that one something to handle, and comes back when a handler runs for longer than a
moment. Where several threads handle messages, the link's thread reads alone.
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
    GIVEN = "given"  # the same, until its next turn: the handlers' thread has something to handle, and reads then
    HANDLERS = "handlers"  # the handlers' thread when it is idle, and callers while it is not
    SPREAD = "spread"  # the thread alone: several threads handle what the broker pushes


class DutyEvent(StrEnum):
    """What changes who reads the socket."""

    TURN = "turn"  # the thread is about to read
    ELAPSED = "elapsed"  # the thread has stood aside for a while, and no other reads
    CALLER_READ = "caller read"  # a caller has read for itself, or would have
    NEED = "need"  # a caller waits for something that no caller reads
    BULK_BEGAN = "bulk began"
    BULK_ENDED = "bulk ended"  # of the last caller that waits for many answers
    PUSHED = "pushed"
    GIVEN = "given"  # what was pushed goes to the one thread of the handlers
    SPREAD = "spread"  # what was pushed goes to one of several threads
    HANDLER_WAITS = "handler waits"  # that one thread waits for messages, and does not read
    LOST = "lost"  # the connection has ended, and the next one starts anew


def _duties() -> dict[tuple[Duty, DutyEvent], Duty]:
    """Return the table: an event that is not named for a state leaves it as it is."""
    table = {(state, event): state for state in Duty for event in DutyEvent}
    for state in Duty:
        table[state, DutyEvent.LOST] = Duty.READS
        if state not in PUSHING:
            table[state, DutyEvent.PUSHED] = Duty.PUSHES
            table[state, DutyEvent.BULK_BEGAN] = Duty.BULK
        else:
            table[state, DutyEvent.SPREAD] = Duty.SPREAD
    for event in (DutyEvent.NEED, DutyEvent.BULK_BEGAN, DutyEvent.HANDLER_WAITS):
        table[Duty.GIVEN, event] = table[Duty.HANDLERS, event] = Duty.PUSHES
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
        (Duty.PUSHES, DutyEvent.GIVEN): Duty.GIVEN,
        (Duty.GIVEN, DutyEvent.TURN): Duty.HANDLERS,
        (Duty.HANDLERS, DutyEvent.ELAPSED): Duty.PUSHES,
    }


PUSHING = frozenset({Duty.PUSHES, Duty.GIVEN, Duty.HANDLERS, Duty.SPREAD})  # the broker pushes on this connection
DUTIES: Mapping[tuple[Duty, DutyEvent], Duty] = _duties()
ASIDE = frozenset({Duty.ASIDE, Duty.IN_USE, Duty.HANDLERS})  # the thread leaves the socket to others
ALONE = frozenset({Duty.BULK, Duty.PUSHES, Duty.GIVEN, Duty.SPREAD})  # callers do not read


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

    def given(self, *, alone: bool) -> None:
        """What was pushed goes to the handlers' thread; is it `alone`, or one of several?"""
        if not alone:
            self.on(DutyEvent.SPREAD)
        elif not self._bulk:
            self.on(DutyEvent.GIVEN)

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
