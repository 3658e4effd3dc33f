"""How far a client has come with its connection, as a table; no threads, tasks or sockets."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Phase(StrEnum):
    """How far the link has come."""

    DOWN = "down"  # no connection is tried for
    CONNECTING = "connecting"
    GREETING = "greeting"  # there is a socket, and the broker has not welcomed us on it
    UP = "up"  # callers may send
    BACKING_OFF = "backing off"  # until the next attempt


class PhaseEvent(StrEnum):
    """What happens to the link."""

    ATTEMPT = "attempt"  # it begins to connect
    CONNECTED = "connected"
    WELCOMED = "welcomed"
    LOST = "lost"  # the attempt failed, or the connection ended
    ENDED = "ended"  # close() was called: no further attempt


PHASES: Mapping[tuple[Phase, PhaseEvent], Phase] = {
    (Phase.DOWN, PhaseEvent.ATTEMPT): Phase.CONNECTING,
    (Phase.CONNECTING, PhaseEvent.CONNECTED): Phase.GREETING,
    (Phase.CONNECTING, PhaseEvent.LOST): Phase.BACKING_OFF,
    (Phase.GREETING, PhaseEvent.WELCOMED): Phase.UP,
    (Phase.GREETING, PhaseEvent.LOST): Phase.BACKING_OFF,
    (Phase.UP, PhaseEvent.LOST): Phase.BACKING_OFF,
    (Phase.BACKING_OFF, PhaseEvent.ATTEMPT): Phase.CONNECTING,
    (Phase.BACKING_OFF, PhaseEvent.ENDED): Phase.DOWN,
}  # a pair that is not here is a fault of ours


def next_phase(phase: Phase, event: PhaseEvent) -> Phase:
    """Return the phase after an event. Raises RuntimeError if the event cannot happen in this phase."""
    try:
        return PHASES[phase, event]
    except KeyError:
        raise RuntimeError(f"a connection that is {phase} cannot be: {event}") from None
