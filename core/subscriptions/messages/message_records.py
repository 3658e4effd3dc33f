"""A message with a history, and a subscriber's death that no message is charged with yet."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from qb.core.subscriptions.messages.deadlines import NEVER


class MessageState(Enum):
    """Where a recorded message is. Fresh messages have no record."""

    LEASED = auto()
    READY = auto()  # goes out as soon as there is a window
    BACKING_OFF = auto()  # in backoff
    ISOLATED = auto()  # to be offered alone
    DEAD_LETTERING = auto()  # its dead letter is being written
    SETTLED = auto()  # the record is dead; a queue that still has it skips it


class UnexplainedDeath:
    """A subscriber's death that could have been the work of several messages, its suspects."""

    __slots__ = ("explained", "number", "partitions")

    def __init__(self, number: int) -> None:
        self.number = number  # by which the suspects of one death are known together after a restart
        self.explained = False
        self.partitions: set[int] = set()  # of its suspects


class MessageRecord(msgspec.Struct, eq=False, gc=False):
    """One message that has been delivered before, or, in key_shared, looked at.

    There may be a million, so the garbage collector walks none; it is part of no cycle.
    """

    partition: int
    offset: int
    attempts: int = 0  # deliveries made
    key: str | None = None  # known in key_shared alone
    failures: int = 0  # deliveries that are held against it
    state: MessageState = MessageState.READY
    due: float = NEVER  # when its backoff ends
    reason: str = ""  # of its last failure
    holder: str = ""  # the subscriber that has it, or had it last
    alone: bool = False  # offered in isolation from now on
    deaths: tuple[UnexplainedDeath, ...] = ()  # of which it is a suspect, or was until they were explained

    @property
    def suspicions(self) -> tuple[UnexplainedDeath, ...]:
        """The deaths of which it is a suspect and that no message is charged with."""
        return tuple(death for death in self.deaths if not death.explained) if self.deaths else ()

    def suspect_of(self, death: UnexplainedDeath) -> None:
        """Make it a suspect of one more death."""
        self.deaths = (*self.suspicions, death)
        death.partitions.add(self.partition)

    def clear(self) -> None:
        """End suspicion and isolation: a handler has survived this message."""
        self.deaths = ()
        self.alone = False
