"""A message with a history, and a subscriber's death that no message is charged with yet."""

from __future__ import annotations

from enum import Enum, auto

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


class MessageRecord:
    """One message that has been delivered before, or, in key_shared, looked at."""

    __slots__ = (
        "alone",
        "attempts",
        "deaths",
        "due",
        "failures",
        "holder",
        "key",
        "offset",
        "partition",
        "reason",
        "state",
    )

    def __init__(self, partition: int, offset: int, attempts: int = 0, key: str | None = None) -> None:
        self.partition = partition
        self.offset = offset
        self.key = key  # known in key_shared alone
        self.attempts = attempts  # deliveries made
        self.failures = 0  # deliveries that are held against it
        self.state = MessageState.READY
        self.due = NEVER  # when its backoff ends
        self.reason = ""  # of its last failure
        self.holder = ""  # the subscriber that has it, or had it last
        self.alone = False  # offered in isolation from now on
        self.deaths: tuple[UnexplainedDeath, ...] = ()  # of which it is a suspect, or was until they were explained

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
