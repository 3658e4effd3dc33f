"""A subscription in service, and what it has decided but not seen carried out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from weakref import ref

import trio

from qb.core.push.delivery_sinks import DeliverySink
from qb.core.push.partition_turns import PartitionTurns
from qb.core.push.stored_slices import READ_BYTES, KnownKeys
from qb.core.subscriptions.messages.deadlines import NEVER
from qb.core.subscriptions.push_decisions import DeadLetterDecision, Decision
from qb.core.subscriptions.snapshot import SnapshotChanges
from qb.core.subscriptions.subscription import Subscription
from qb.core.wire.errors import UnknownSubscription
from qb.storage.engine import PartitionLog, StoredChunk
from qb.storage.faults import Fault


class SaveSchedule:
    """When a subscription is to be saved. It does not keep it alive: the two are no cycle."""

    __slots__ = ("_active", "began", "due", "fault", "took", "waiters")

    def __init__(self, active: ActiveSubscription) -> None:
        self._active = ref(active)
        self.due = NEVER  # set by Deadlines
        self.began = 0.0  # when its last snapshot was taken
        self.took = 0.0  # seconds that taking it cost
        self.fault = Fault(f"saving of subscription {active.name}")
        self.waiters: list[SaveWaiter] = []  # for the next snapshot that is taken

    @property
    def active(self) -> ActiveSubscription | None:
        """The subscription; None if it is no more."""
        return self._active()


class SaveWaiter:
    """A task that waits until a snapshot is durable."""

    def __init__(self) -> None:
        self._done = trio.Event()
        self._error: Exception | None = None

    def end(self, error: Exception | None) -> None:
        """Let it go on; with an error if the snapshot could not be taken or stored."""
        self._error = error
        self._done.set()

    async def wait(self) -> None:
        """Return when the snapshot is durable. Raises what kept it from being so."""
        await self._done.wait()
        if self._error is not None:
            raise self._error


class PendingSave(NamedTuple):
    """What has changed in a subscription, on its way to the disk."""

    active: ActiveSubscription
    changes: SnapshotChanges
    waiters: list[SaveWaiter]


class ActiveSubscription:
    """A subscription in service: its state, its logs, and where its subscribers are reached."""

    def __init__(
        self,
        name: str,
        topic: str,
        created_ms: int,
        subscription: Subscription,
        logs: Mapping[int, PartitionLog],
        made_by: str = "",
    ) -> None:
        """`made_by` is the user in whose quotas it counts; empty: in none."""
        self.name = name
        self.topic = topic
        self.created_ms = created_ms
        self.made_by = made_by
        self.subscription = subscription
        self.logs = logs  # replaced as a whole, never changed: it may be iterated over while others run
        self.sinks: dict[str, DeliverySink] = {}
        self.unread = PartitionTurns()  # partitions that may have more to read, if joined
        self.behind = False  # did its last round leave messages unread?
        self.delivered_messages = 0  # since the start
        self.delivered_bytes = 0
        self.service = Fault(f"subscription {name}")  # while it has one, it is suspended
        self.gone = False
        self.due = NEVER  # when decide() is to be called again; set by Deadlines
        self.serving = False  # is a task of its own busy with it?
        self.again = False  # it changed while it was being served
        self.unfinished: PushRound | None = None  # what a round left for a task, since it has to wait
        self.saving = SaveSchedule(self)
        self.known_keys = KnownKeys()
        self.message_bytes = float(READ_BYTES)  # of the messages read last; as large as can be until we know

    @property
    def fault(self) -> str | None:
        """Why it cannot be served or saved; None: it has no fault."""
        return self.service.text or self.saving.fault.text

    def check_in_service(self) -> None:
        """Raises UnknownSubscription once it has been removed: nothing may be stored for it any more."""
        if self.gone:
            raise UnknownSubscription(self.name)

    def bytes_for(self, count: int) -> int:
        """Estimate the size in bytes of `count` messages, so that no more is read than is wanted."""
        return min(READ_BYTES, int(count * self.message_bytes) + 1)

    def note_size(self, chunk: StoredChunk) -> None:
        """Learn how large messages are."""
        if chunk.positions:
            self.message_bytes = chunk.size / len(chunk.positions)

    def ends(self) -> dict[int, int]:
        """Return the visible end of each partition."""
        return {partition: log.end_offset for partition, log in self.logs.items()}

    def with_unread(self, partitions: Iterable[int]) -> Iterator[int]:
        """Yield those of these partitions that have messages beyond what is at hand."""
        upcoming, logs = self.subscription.upcoming, self.logs
        return (partition for partition in partitions if upcoming(partition) < logs[partition].end_offset)

    def to_read(self, now: float) -> Iterator[tuple[int, PartitionLog, int, int]]:
        """Yield where there are messages that could go out: partition, log, offset, and about how many bytes.

        Only partitions that have moved since they were last read to their ends are looked at, some of them a round.
        """
        for sink in self.sinks.values():
            self.subscription.block(sink.name, sink.full)
        room = self.subscription.room()
        if not self.unread:
            return
        if not room:
            self.subscription.wait_for_room()
            return
        share = -(-room // self.unread.begin_round(now))
        for partition in self.unread:
            each, wanted = self.logs[partition], self.subscription.wanted(partition)
            if wanted and wanted.start < each.first_offset:
                self.subscription.advance(partition, each.first_offset)
                wanted = self.subscription.wanted(partition)
            count = min(len(wanted), share, each.end_offset - wanted.start)
            if wanted.start >= each.end_offset:
                self.unread.discard(partition)
            elif count > 0:
                yield partition, each, wanted.start, self.bytes_for(min(len(wanted), share))
                room -= count
                if room <= 0:
                    return

    def to_save(self) -> PendingSave:
        """Return what is to be made durable: what has changed since the last time, for those that wait for it."""
        waiters, self.saving.waiters = self.saving.waiters, []
        return PendingSave(self, self.subscription.changes(), waiters)


class PushRound(NamedTuple):
    """What a subscription has decided, on its way to be carried out."""

    decisions: list[Decision]
    chunks: Mapping[int, StoredChunk]  # what was read for it, by partition
    subscribers: Mapping[str, tuple[DeliverySink, int]]  # where each was reached, and its last SETTLE that counted

    @property
    def needs_saved_state(self) -> bool:
        """True if there is a redelivery or a dead letter: the state that led to it has to be durable first."""
        return any(isinstance(decision, DeadLetterDecision) or decision.attempt > 1 for decision in self.decisions)

    def without(self, count: int) -> PushRound | None:
        """Return it without the first decisions; None if none are left."""
        return self._replace(decisions=self.decisions[count:]) if count < len(self.decisions) else None
