"""Messages that a producer sends together, and what became of each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from qb.clients.producing.message_notes import MessageNote
from qb.clients.protocol.publish_frames import MixedPublishForm, PublishForm
from qb.clients.protocol.receipts import Receipt
from qb.clients.protocol.unacked_publishes import StoredPublishes, UnackedBatch

NOT_ACKED = StoredPublishes(0, 0, -1, -1, 0, "none", False)  # stands for an answer that is not waited for


def messages_are(count: int, topic: str) -> str:
    """Begin a sentence about some messages."""
    return f"1 message for topic {topic} is" if count == 1 else f"{count} messages for topic {topic} are"


class Delivery(NamedTuple):
    """What became of one message of a producer: what `on_delivery` is called with.

    Attributes:
        value: The body.
        key: The key, if it has one.
        receipt: Where it is stored; None if it failed.
        error: Why it failed; None if it is stored.
    """

    value: bytes
    key: str | None
    receipt: Receipt | None
    error: Exception | None


class _Settled(NamedTuple):
    """What became of some messages of a batch: an answer that covers just them, or an error."""

    indexes: Sequence[int]
    answer: StoredPublishes | Exception


class SendBatch:
    """Messages in the order in which they were sent; handles refer to it, and it lets go of bodies when settled."""

    __slots__ = (
        "_by_index",
        "_left",
        "_settled",
        "bodies",
        "due",
        "enough",
        "error",
        "failed",
        "lock",
        "notes",
        "number",
        "reported",
        "settled",
        "size",
        "topic",
        "waiters",
    )

    def __init__(self, topic: str, number: int, due: float, lock: Any) -> None:
        self.topic, self.number, self.due = topic, number, due
        self.lock = lock  # guards `waiters`, and `settled` against being missed by one that is about to wait
        self.bodies: list[bytes] = []
        self.notes: list[MessageNote | None] | None = None  # None: no message has anything beside its body
        self.size = 0  # in bytes, with what frames add
        self.enough = 0  # bytes that make it full
        self.settled = False  # is it known what became of all of them?
        self.failed = 0  # how many messages
        self.error: Exception | None = None  # of the first of them
        self.reported = False  # has a handle raised an error of this batch?
        self.waiters: list[Any] = []  # woken when all is settled
        self._left = 0
        self._settled: list[_Settled] = []
        self._by_index: dict[int, tuple[int, StoredPublishes | Exception]] | None = None

    def note(self, note: MessageNote) -> None:
        """Note what the message that was added last has beside its body."""
        if self.notes is None:
            self.notes = []
        self.notes += [None] * (len(self.bodies) - 1 - len(self.notes))
        self.notes.append(note)

    def all_notes(self) -> list[MessageNote | None] | None:
        """Return one note for each body; None if there are none at all."""
        if self.notes is not None:
            self.notes += [None] * (len(self.bodies) - len(self.notes))
        return self.notes

    def close(self) -> None:
        """Take no more messages."""
        self._left = len(self.bodies)

    def settle(self, indexes: Sequence[int], answer: StoredPublishes | Exception) -> bool:
        """Note what became of some messages, each of them once; True if that was the last of the batch.

        Then those who wait for its handles are woken.
        """
        self._settled.append(_Settled(indexes, answer))
        self._left -= len(indexes)
        if isinstance(answer, Exception):
            self.failed += len(indexes)
            self.error = self.error or answer
        if not self._left:
            self._announce()
        return not self._left

    def _announce(self) -> None:
        self.settled = True
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter.wake()

    def settle_all(self, error: Exception) -> None:
        """Nothing will be known of any of its messages here."""
        self._settled = [_Settled(range(len(self.bodies)), error)]
        self.settled = True

    def finish(self) -> None:
        """Let go of the bodies: all is settled and reported."""
        self.bodies, self.notes = [], None

    def receipt(self, index: int) -> Receipt:
        """Return the receipt of one message. Raises why there is none."""
        start, answer = self._outcome(index)
        if isinstance(answer, Exception):
            self.reported = True
            raise answer
        return answer.receipt(self.topic, index - start)

    def failure(self, index: int) -> Exception | None:
        """Return why a message was not stored; None if it was."""
        answer = self._outcome(index)[1]
        if not isinstance(answer, Exception):
            return None
        self.reported = True
        return answer

    def described(self, index: int) -> str:
        """Describe what is known of a message, for people."""
        if not self.settled:
            return f"for topic {self.topic}, pending"
        answer = self._outcome(index)[1]
        return f"failed: {answer}" if isinstance(answer, Exception) else repr(self.receipt(index))

    def _outcome(self, index: int) -> tuple[int, StoredPublishes | Exception]:
        """Return the answer for a message, and the index that its offset would belong to."""
        first = self._settled[0]
        if len(self._settled) == 1 and isinstance(first.indexes, range):
            return first.indexes.start, first.answer
        if self._by_index is None:
            self._by_index = {
                each: (each - at, settled.answer)
                for settled in self._settled
                for at, each in enumerate(settled.indexes)
            }
        return self._by_index[index]

    def deliveries(self) -> Iterator[Delivery]:
        """Yield what became of each message, before finish()."""
        notes = self.all_notes()
        for index, body in enumerate(self.bodies):
            note = notes[index] if notes is not None else None
            error = self.failure(index)
            yield Delivery(body, note.key if note else None, None if error else self.receipt(index), error)


class SendPiece:
    """Messages of one batch for one partition, sent together. The link calls release() when all are answered."""

    __slots__ = (
        "attempts",
        "batch",
        "bodies",
        "deadline",
        "forms",
        "indexes",
        "not_before",
        "on_answered",
        "partition",
        "span",
        "unacked",
    )

    def __init__(
        self,
        batch: SendBatch,
        partition: int | None,
        indexes: Sequence[int],
        forms: PublishForm | Sequence[PublishForm],
        bodies: Sequence[bytes],
    ) -> None:
        self.batch, self.partition, self.indexes, self.forms, self.bodies = batch, partition, indexes, forms, bodies
        self.unacked: UnackedBatch | None = None  # once it is sent
        self.deadline = self.not_before = 0.0
        self.attempts = 0  # that were refused
        self.on_answered: Callable[[SendPiece], None] | None = None
        self.span: Any = None  # from sending it to its answers, if the program traces

    def release(self) -> None:
        """All of it is answered, or given up; called by the link."""
        if self.on_answered is not None:
            self.on_answered(self)

    @property
    def form(self) -> PublishForm:
        """The form of its messages, or of each of them."""
        if isinstance(self.forms, PublishForm):
            return self.forms
        return MixedPublishForm([form.parts for form in self.forms])

    @property
    def properties(self) -> Iterator[Mapping[str, str]]:
        """The properties of those of its messages that have some."""
        notes = self.batch.all_notes() or ()
        for index in self.indexes if notes else ():
            note = notes[index]
            if note is not None and note.properties:
                yield note.properties

    def part(self, start: int, stop: int) -> SendPiece:
        """Return a part of it, to be sent again."""
        forms = self.forms if isinstance(self.forms, PublishForm) else self.forms[start:stop]
        piece = SendPiece(self.batch, self.partition, self.indexes[start:stop], forms, self.bodies[start:stop])
        piece.attempts = self.attempts
        return piece
