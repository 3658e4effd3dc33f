"""What the broker asks of whatever keeps its messages.

`local` keeps batches in files. Nothing in `core` may assume files: it sees only what stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import msgspec

from qb.core.wire.errors import BrokerError
from qb.storage.measures import Measures


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as it was asked for. None means: as the broker is set."""

    topic: str
    partitions: int = 1
    retention_hours: float | None = None
    retention_bytes: int | None = None
    created_ms: int = 0
    uid: str | msgspec.UnsetType = msgspec.UNSET  # of a replicated topic: a random number that no namesake has
    made_by: str | msgspec.UnsetType = msgspec.UNSET  # the user in whose quotas it counts; UNSET: in none

    @property
    def maker(self) -> str:
        """The user in whose quotas it counts; empty: in none."""
        return self.made_by if isinstance(self.made_by, str) else ""

    @property
    def number(self) -> int:
        """The unique id as a number; 0: it is not replicated."""
        return int(self.uid, 16) if isinstance(self.uid, str) else 0


class AppendRun(NamedTuple):
    """Consecutive DATA frames on their way into a log, with their offsets already in them."""

    data: bytes | bytearray
    positions: Sequence[int]  # where each frame starts in data
    first_offset: int
    producer_id: int = 0  # 0: not idempotent
    first_number: int = 0  # the producer's number of the first frame; the others follow by one


# The producer that all transactions are in the logs; ids of peers are below it. It is never forgotten.
TRANSACTIONS = 2**63


class ProducerRange(NamedTuple):
    """Publish numbers of one producer that a log holds: number + i is at first_offset + i."""

    producer_id: int
    first_number: int
    first_offset: int
    count: int  # type: ignore[assignment]  # tuple.count() is not needed here


class StoredChunk(NamedTuple):
    """Stored frames in offset order, seals among them, as they lie in the log."""

    first_offset: int
    data: bytes  # holds them, and perhaps others before and after
    positions: Sequence[int]  # where each DATA frame starts in data
    end: int = 0  # where the last one ends, or the seal behind it

    @property
    def next_offset(self) -> int:
        return self.first_offset + len(self.positions)

    @property
    def size(self) -> int:
        """How many bytes the frames take."""
        return self.end - self.positions[0] if self.positions else 0

    def first(self, count: int) -> StoredChunk:
        """Return the first `count` of them."""
        if len(self.positions) <= count:
            return self
        return self._replace(positions=self.positions[:count], end=self.positions[count])

    @property
    def view(self) -> memoryview:
        """The frames and nothing else, not copied."""
        return memoryview(self.data)[self.positions[0] : self.end] if self.positions else memoryview(b"")

    @property
    def frames(self) -> bytes:
        """The frames and nothing else."""
        return self.data[self.positions[0] : self.end] if self.positions else b""


class LogState(msgspec.Struct, frozen=True, kw_only=True):
    """One partition as tools see it."""

    partition: int
    first_offset: int
    next_offset: int
    bytes: int
    segments: int
    status: str  # ok, held, poisoned, damaged
    reason: str | None = None


# Called in the event loop with runs that were given with it, one after another, and None and their append time in ms,
# or why nothing of them was kept. What it returns is called when all runs of the same step have been answered: all
# answers of a step are made first, and sent then, which is quicker than one after the other.
Done = Callable[[Sequence[AppendRun], BrokerError | None, int], Callable[[], None] | None]


class PartitionLog(Protocol):
    """An append-only row of records with dense offsets. All methods belong to the event loop's thread."""

    topic: str
    partition: int
    published_messages: int  # since the engine was opened
    published_bytes: int  # of their frames and seals

    @property
    def first_offset(self) -> int:
        """The oldest offset kept."""

    @property
    def end_offset(self) -> int:
        """The visible end: one past the newest record that readers may see.

        All before it is durable: here or, after release() with `shown_to`, in what the caller keeps.
        """

    @property
    def durable_offset(self) -> int:
        """One past the newest record that is durable in this log; beyond the visible end only while that is held."""

    @property
    def next_offset(self) -> int:
        """What the next run given to append() must start with."""

    @property
    def has_room(self) -> bool:
        """False while so much waits to be written that publishers should not be read."""

    def check_writable(self) -> None:
        """Raises what append() would raise now: LogDamaged, LogPoisoned, UnknownTopic."""

    def hold(self, end_offset: int | None = None, reason: str | None = None) -> None:
        """From now on nothing becomes visible: for a transaction, which is to be seen as a whole.

        With `end_offset`, nothing from there on is visible either: for a start that finds one unfinished.
        With `reason`, the state of the log says that it is held, and why.
        """

    def release(self, shown_to: int = 0) -> None:
        """Move the visible end to the durable one, and go on moving it. Watchers are called after this step.

        `shown_to`: show all before this offset, though it is only on its way to the disk. The caller keeps it durably,
        and gives it to the log again after a kill, at the same offsets. If it cannot be written, the log is poisoned.
        """

    def append(self, run: AppendRun, done: Done, *, lags: bool = False) -> None:
        """Take a run into the batch that is gathering. Does not block; `done` gets the outcome.

        `lags`: no caller waits for the outcome, so that the batch may wait a little for others.
        Runs that follow each other in a batch, and whose `done` are equal, are answered by one call. `done` is never
        called inside append(), but when storage has finished its own step. Raises LogDamaged, LogPoisoned.
        """

    async def wait_for_room(self) -> None:
        """Return when has_room."""

    def write_now(self) -> None:
        """Begin to write what has gathered, also what may lag."""

    def read_recent(self, offset: int, max_bytes: int) -> StoredChunk | None:
        """Return what memory has from `offset` on, or None: ask read(). Does not block."""

    async def read(self, offset: int, max_bytes: int) -> StoredChunk:
        """Return records from `offset` on: at least one if there is one, else an empty chunk at the end.

        Ends at the visible end and near max_bytes. Raises OffsetOutOfRange, LogDamaged.
        """

    async def read_whole(self, offset: int, max_bytes: int) -> StoredChunk:
        """Return stored batches as a whole: from the one on that holds `offset`, to the end of one near max_bytes.

        So it may begin before `offset`. Only the visible end cuts a batch. Raises as read().
        """

    async def read_durable(self, offset: int, max_bytes: int) -> StoredChunk:
        """Return durable records from `offset` on, visible or not: at least one. Nothing of it may be shown to readers.

        Ends near max_bytes. Raises OffsetOutOfRange, LogDamaged, UnknownTopic.
        """

    async def offset_for_time(self, time_ms: int) -> int:
        """Return the first offset appended at or after that time, or the end."""

    def ranges(self) -> Iterable[ProducerRange]:
        """Return what the log remembers of its producers, oldest first; for the start of the broker."""

    def state(self) -> LogState:
        """Return the log as tools see it."""

    def watch(self, moved: Callable[[], None]) -> Callable[[], None]:
        """Call `moved` in the event loop when the visible end has moved or the log is deleted; returns how to stop.

        It is called when storage has finished its own step, and once for all that has moved in it.
        """


Where = tuple[str, int]  # topic, partition
# Called once in the event loop: with None and the time in ms, or with why nothing of it was kept.
Settled = Callable[[BrokerError | None, int], None]


class StagedMessages(NamedTuple):
    """Staged messages for one partition."""

    topic: str
    partition: int
    count: int  # type: ignore[assignment]
    frames: bytearray  # DATA frames as they came, for the reader to number


class StageLog(Protocol):
    """Messages of one transaction that are durable, in order, and cannot be read before they are committed.

    All methods belong to the event loop's thread.
    """

    stage_id: str
    transaction: str
    number: int | None
    failure: BrokerError | None  # why nothing more is taken; it cannot be committed either

    @property
    def messages(self) -> int:
        """How many are durable."""

    @property
    def taken(self) -> int:
        """How many were given to append(): durable, or on their way."""

    @property
    def counts(self) -> Mapping[Where, int]:
        """How many are durable for each partition."""

    @property
    def size(self) -> int:
        """How many bytes it takes."""

    @property
    def has_room(self) -> bool:
        """False while so much waits to be written that publishers should not be read."""

    async def wait_for_room(self) -> None:
        """Return when has_room."""

    def append(self, frame: bytes, where: Where, count: int, done: Settled) -> None:
        """Take a STAGE frame whose body is `count` proved messages. Does not block; `done` gets the outcome.

        A failure takes back everything that is not durable. Raises `failure`.
        """

    def repeat(self, frame: bytes, where: Where, first: int, count: int, done: Settled) -> None:
        """Take a STAGE frame again whose messages were all taken before. Does not block; `done` gets the outcome.

        None: the same messages are durable under the same numbers. Else OutOfSequence, LogDamaged, Internal, or why
        what was taken could not be kept.
        """

    async def read(self, position: int, max_bytes: int) -> tuple[Sequence[StagedMessages], int]:
        """Return messages from a position on (0: the front), and the position behind them; none at the end.

        Raises LogDamaged, Internal.
        """


class MetadataEntry(NamedTuple):
    """A metadata value and the version that compare-and-set compares."""

    value: Any
    version: int


class Metadata(Protocol):
    """Small durable facts under path-like keys; values are what JSON can carry. Reads come from memory."""

    def get(self, key: str) -> MetadataEntry | None:
        """Return the value under `key`."""

    def under(self, prefix: str) -> Mapping[str, MetadataEntry]:
        """Return every entry whose key starts with `prefix`, sorted by key; there should be no more than thousands."""

    def keys(self) -> list[str]:
        """Return all keys, in any order: for those who read millions of entries in portions."""

    def watch(self, prefix: str, changed: Callable[[Mapping[str, Any | None]], None]) -> None:
        """Call `changed` with all values under a prefix, now, and with those that have changed (None: gone) later.

        It is called in the step in which a change becomes durable, before its writer goes on; it must not raise.
        """

    async def put(self, key: str, value: Any, *, expected: int | None = None) -> int:
        """Store durably and return the new version. Raises VersionConflict if `expected` (0: absent) is not it."""

    async def delete(self, *keys: str) -> None:
        """Remove durably, all of them or none; absent keys are no error."""

    def put_soon(self, key: str, value: Any | None) -> None:
        """Store (None: remove) with the next transaction, without waiting: for state that may lag a little."""

    async def put_all(self, values: Mapping[str, Any | None]) -> None:
        """Store (None: remove) durably, all of them or none."""

    def put_then(self, values: Mapping[str, Any], done: Callable[[BrokerError | None], None]) -> None:
        """Store durably in one step, without waiting; then `done` is called with None, or with what went wrong."""

    async def flush(self) -> None:
        """Return when everything given so far is durable."""


class CommitStep(Protocol):
    """The appends of one block, once it has ended."""

    at_once: bool  # were they made durable at its end?


class VersionConflict(Exception):
    """The entry was changed by another writer first."""


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a start found."""

    topics: int
    messages: int
    cut_bytes: int = 0  # torn tails, never acked
    rebuilt_indexes: int = 0
    notes: tuple[str, ...] = ()  # a sentence for each thing an operator should know: adopted, damaged, cut


class Engine(Protocol):
    """Keeps topics and their logs."""

    recovery: RecoveryReport
    metadata: Metadata
    measures: Measures

    @property
    def durability(self) -> str:
        """What a receipt promises: "fsynced", "written" or "replicated"."""

    def topics(self) -> Mapping[str, Topic]:
        """Return every topic by name."""

    def log(self, topic: str, partition: int) -> PartitionLog:
        """Return a log. Raises UnknownTopic, UnknownPartition."""

    def commit_step(self, idle: bool) -> AbstractContextManager[CommitStep]:
        """Let all appends inside the block share their log's next batch. Nothing may be awaited in it.

        `idle`: only one peer is being served, so that a short batch may be made durable at the end of the block.
        """

    def before_commits(self, prepare: Callable[[], None]) -> bool:
        """Have `prepare` called once at the end of the open commit_step(), before its commits begin.

        What it writes shares the syncs of the step. Returns False, and does nothing, if no step is open.
        """

    async def create_topic(self, topic: Topic) -> Topic:
        """Make the topic durably; the name has been checked. Raises TopicExists."""

    async def add_partitions(self, topic: str, partitions: int) -> Topic:
        """Give the topic that many partitions in all, durably; it never has fewer than before. Raises UnknownTopic."""

    async def delete_topic(self, topic: str) -> None:
        """Forget the topic and free its space. Waiting appends are refused. Raises UnknownTopic."""

    def stages(self) -> Mapping[str, StageLog]:
        """Return every stage by its id."""

    async def begin_stage(self, transaction: str, number: int | None) -> StageLog:
        """Make a stage durably, with an id that was never used. Raises DiskFull, Internal."""

    async def delete_stages(self, stages: Iterable[str]) -> None:
        """Forget these durably and free their space; absent ones are no error. Appends under way are refused."""

    async def confirm_current(self) -> None:
        """Return when what is read here has everything that any broker had acked before the call.

        Clocks have no part in that. Raises ShuttingDown.
        """

    async def free_bytes(self) -> int:
        """Return how much can still be stored, as far as the system knows."""

    async def run(self) -> None:
        """Write, sync, drop and prove until cancelled; when cancelled, first finish what append() was given."""

    def close(self) -> None:
        """Release files and the lock. Nothing else may be called after."""
