"""What a transaction is made of on the client's side.

Messages become DATA frames, gathered for each partition (Draft); these are cut into what one STAGE frame carries
(cut) and counted (StageBook); docs/TRANSACTIONS.md says what the broker makes of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

from qb.clients.protocol.client_errors import QBError, RequestTimedOut, UnknownPartition, UnknownTopic, refusal
from qb.clients.protocol.partition_spread import SpreadPiece, TopicRoutes
from qb.clients.protocol.publish_frames import Body
from qb.clients.protocol.unacked_publishes import HeldStageFrame, UnackedBatch
from qb.core.wire.errors import Code
from qb.core.wire.frames import LENGTH, MAX_PROPERTIES, OVERHEAD, Frames, MessageType, encode_frame, frame_length

STAGE_BYTES = 1_000_000  # of messages that one STAGE frame carries, unless a single one is longer
STAGE_HEAD = 1_024  # that a STAGE frame is longer than what it carries, at most
DRAFT_BYTES = 8_000_000  # that are gathered at most, over all partitions, before they are staged
ABORT_PATIENCE = 1.0  # seconds that a failed block waits for its abort: a stage that is left alone expires

Target = tuple[str, int]  # topic and partition


class TransactionShare(NamedTuple):
    """What a transaction put into one partition. Messages of others may lie between its first and its last."""

    topic: str
    partition: int
    first_offset: int
    last_offset: int
    messages: int


class TransactionReceipt(NamedTuple):
    """A committed transaction. Of a number smaller than the last one nothing is known but that it is committed.

    Attributes:
        transaction: The name of the transaction.
        number: Its number among those of the same name, or None.
        replayed: It was committed before this was asked for, and nothing was added now; or this was asked for again by
            itself, because the first answer was lost.
        messages: How many messages it has.
        partitions: Which partitions got how many of them, and where.
        timestamp: The broker's clock at the commit, in milliseconds since 1970.
        durability: As a receipt says it: "replicated", "fsynced" or "written".
        abandoned: An operator gave it up: only what `partitions` says of it is visible.
    """

    transaction: str
    number: int | None
    replayed: bool
    messages: int
    partitions: tuple[TransactionShare, ...]
    timestamp: int  # the broker's clock, ms since 1970
    durability: str  # "replicated", "fsynced" or "written"
    abandoned: bool = False  # an operator gave it up: only what `partitions` says of it is visible

    @property
    def time(self) -> datetime:
        """The time of the commit in UTC."""
        return datetime.fromtimestamp(self.timestamp / 1000, UTC)


def receipt_in(answer: Mapping[str, Any]) -> TransactionReceipt:
    """Return the receipt that a commit was answered with."""
    shares = tuple(
        TransactionShare(*(share[name] for name in TransactionShare._fields)) for share in answer["partitions"]
    )
    known = {name: answer[name] for name in TransactionReceipt._fields if name in answer}
    return TransactionReceipt(**{**known, "partitions": shares})


def stages_named(stages: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the stages of a commit for the wire."""
    return [{"stage": stage, "messages": messages} for stage, messages in stages]


class StagePortion(NamedTuple):
    """Whole DATA frames for one partition: what Stage.add() takes."""

    topic: str
    partition: int
    frames: Body
    count: int  # type: ignore[assignment]  # hides tuple.count(), which is of no use here


class TransactionDraft:
    """Messages that are not staged yet: DATA frames, gathered for each partition."""

    def __init__(self) -> None:
        self.topics: set[str] = set()  # of all messages so far
        self._frames: dict[Target, bytearray] = {}
        self._counts: dict[Target, int] = {}
        self._size = 0
        self._spoilt: QBError | None = None

    @contextmanager
    def complete(self) -> Iterator[None]:
        """What is raised inside may leave half of something: the messages must not be committed any more."""
        try:
            yield
        except BaseException as error:
            self._spoilt = self._spoilt or (error if isinstance(error, QBError) else _interrupted())
            raise

    def whole(self, limit: int) -> bytes | None:
        """Return all messages as the body of a TRANSACTION frame; None if it would be longer than `limit`.

        Raises why the messages must not be committed.
        """
        if self._spoilt is not None:
            raise self._spoilt
        if self._size > limit:
            return None
        body = b"".join(
            encode_frame(MessageType.STAGE, properties={"topic": topic, "partition": str(partition)}, body=frames)
            for (topic, partition), frames in self._frames.items()
        )
        return body if len(body) <= limit else None

    def add(self, topic: str, pieces: Iterable[SpreadPiece]) -> Iterator[StagePortion]:
        """Take messages; yield what is to be staged now."""
        self.topics.add(topic)
        for piece in pieces:
            frames = piece.form.frames(0, piece.bodies, MessageType.DATA)
            yield from self._make_room((topic, piece.partition), len(frames))
            self._put((topic, piece.partition), frames, len(piece.bodies))

    def _make_room(self, key: Target, size: int) -> Iterator[StagePortion]:
        if len(self._frames.get(key, b"")) + size > STAGE_BYTES:
            yield from self._take(key)
        if self._size + size > DRAFT_BYTES:
            yield from self.take_all()

    def _put(self, key: Target, frames: Frames, count: int) -> None:
        self._frames.setdefault(key, bytearray()).extend(frames)
        self._counts[key] = self._counts.get(key, 0) + count
        self._size += len(frames)

    def take_all(self) -> list[StagePortion]:
        """Return everything that is left, to be staged."""
        return [portion for key in list(self._frames) for portion in self._take(key)]

    def _take(self, key: Target) -> Iterator[StagePortion]:
        if (frames := self._frames.pop(key, None)) is not None:
            self._size -= len(frames)
            yield StagePortion(*key, frames, self._counts.pop(key))


def _interrupted() -> QBError:
    return QBError("an earlier call was interrupted: what the stage holds is not known")


class StageBundle(NamedTuple):
    """What one STAGE frame carries."""

    frames: memoryview
    count: int  # type: ignore[assignment]  # hides tuple.count(), which is of no use here


def cut(frames: Body, count: int, max_message_size: int) -> list[StageBundle]:
    """Cut whole DATA frames into bundles of at most STAGE_BYTES, or of one message that is longer.

    None is longer than the broker takes. What fits into one bundle is not looked at, and nothing is copied. Raises
    MessageTooLarge, BadRequest.
    """
    view, limit = memoryview(frames).cast("B"), OVERHEAD + MAX_PROPERTIES + max_message_size - STAGE_HEAD
    enough = min(STAGE_BYTES, limit)
    if len(view) <= enough:
        return [StageBundle(view, count)] if view else []
    bundles, start, inside = list[StageBundle](), 0, 0
    for at, length in _frames_in(view):
        if length > limit:
            text = f"a message of {length} bytes, properties included, is over this broker's limit of {limit}"
            raise refusal(Code.MESSAGE_TOO_LARGE, text)
        if inside and at + length - start > enough:
            bundles.append(StageBundle(view[start:at], inside))
            start, inside = at, 0
        inside += 1
    bundles.append(StageBundle(view[start:], inside))
    if (found := sum(bundle.count for bundle in bundles)) != count:
        raise refusal(Code.BAD_REQUEST, f"there are {found} frames, not {count}")
    return bundles


def _frames_in(view: memoryview) -> Iterator[tuple[int, int]]:
    """Yield position and length of each frame. Raises BadRequest for what is no row of whole frames."""
    at = 0
    while at < len(view):
        length = frame_length(view, at) if len(view) - at >= LENGTH.size else 0
        if not OVERHEAD <= length <= len(view) - at:
            raise refusal(Code.BAD_REQUEST, f"there is no whole frame at byte {at} of {len(view)}")
        yield at, length
        at += length


class StageLedger:
    """What one stage was given, and what became of it."""

    def __init__(self, stage_id: str, abandon: Callable[[UnackedBatch], None]) -> None:
        """`abandon` is called for what is not to be sent again."""
        self.stage_id = stage_id
        self.messages = 0  # that it was given
        self.held = 0  # that the broker is known to have
        self.pending: deque[UnackedBatch] = deque()
        self._abandon = abandon
        self._spoilt: QBError | None = None

    def properties(self, topic: str, partition: int) -> dict[str, str]:
        """Return the properties of the next STAGE frame."""
        place = {"stage": self.stage_id, "topic": topic, "partition": str(partition)}
        return place | {"first": str(self.messages)}

    def add(self, batch: UnackedBatch, count: int) -> None:
        """Note that a STAGE frame was sent, with so many messages."""
        self.pending.append(batch)
        self.messages += count

    def collect(self) -> None:
        """Take in the answers, oldest first. Raises what the broker refused: later ones are only its consequence."""
        while self.pending and not self.pending[0].left:
            batch = self.pending.popleft()
            if refused := batch.failure():
                raise refused.error
            self.held = max(answer.messages for answer in batch.answers if isinstance(answer, HeldStageFrame))

    def unanswered(self) -> RequestTimedOut:
        """For who has waited for answers in vain."""
        unsure = self.messages - self.held
        return RequestTimedOut(f"the broker did not answer in time; {unsure} messages may or may not be staged")

    @contextmanager
    def whole(self) -> Iterator[None]:
        """What is raised inside spoils the stage: what it holds is not known any more, so it must not be committed."""
        if self._spoilt is not None:
            raise self._spoilt
        try:
            yield
        except BaseException as error:
            self.spoil(error if isinstance(error, QBError) else _interrupted())
            raise

    def spoil(self, error: QBError) -> None:
        """Whatever is asked of the stage from now on raises this; nothing of it is sent again."""
        self._spoilt = self._spoilt or error
        for batch in self.pending:
            self._abandon(batch)
        self.pending.clear()


def unlearn(routes: TopicRoutes, topics: Iterable[str], error: BaseException) -> None:
    """Forget what was known about these topics, if the error says that it is out of date."""
    if isinstance(error, UnknownTopic | UnknownPartition):
        for topic in topics:
            routes.forget(topic)
