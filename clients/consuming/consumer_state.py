"""What a member of a consumer group has to say, and when; answers in, requests out.

docs/GROUPS.md, "What a member does", is the contract. One request is on its way at a time: next_ask() names it, and
answered(), refused() or unanswered() takes what became of it. `now` is in seconds on a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NamedTuple
from uuid import uuid4

from qb.clients.consuming.assigned_partitions import AssignedPartition, AssignedPartitions, PartitionProgress
from qb.clients.consuming.consumer_options import ConsumerOptions
from qb.clients.protocol.client_errors import QBError, RequestRefused, StaleGeneration
from qb.clients.protocol.message import Message
from qb.core.wire.errors import Code

EAGER = 0.2  # seconds between heartbeats while others have still to give up what will be ours
PAUSE = 0.2  # seconds after a failure

_NOT_A_MEMBER = {Code.UNKNOWN_GROUP, Code.UNKNOWN_MEMBER, Code.STALE_GENERATION}
_HOPELESS = {Code.BAD_REQUEST, Code.BAD_NAME, Code.UNKNOWN_TOPIC}  # a join would be refused again and again
_NOT_COMMITTABLE = {Code.OFFSET_OUT_OF_RANGE, Code.UNKNOWN_TOPIC, Code.UNKNOWN_PARTITION}


class ConsumerRequest(NamedTuple):
    """A request to the broker."""

    method: str
    arguments: dict[str, Any]


class PendingCommit:
    """A commit that the program waits for."""

    def __init__(self, offsets: Mapping[AssignedPartition, int]) -> None:
        self.offsets = dict(offsets)  # what is still to be committed
        self.error: QBError | None = None

    @property
    def settled(self) -> bool:
        return not self.offsets or self.error is not None


class ConsumerState:
    """One consumer, through all its memberships."""

    def __init__(self, options: ConsumerOptions, new_id: Callable[[], str] = lambda: uuid4().hex) -> None:
        self.options = options
        self.assigned = AssignedPartitions(options.terms)
        self.sure_until = -inf  # until then no other member can hold what we hold: hand out nothing later
        self.error: QBError | None = None  # why this consumer cannot go on
        self.over = False  # it has left
        self._new_id = new_id
        self._member = new_id()
        self._joined = self._leaving = self._rebalance = False
        self._generation = self._synced = 0
        self._heartbeat_at = self._retry_at = -inf
        self._commit_at = inf
        self._wishes: list[PendingCommit] = []
        self._singly: dict[AssignedPartition, int] = {}  # to be committed one by one, because not all of them can be

    # What to say

    def next_ask(self, now: float) -> ConsumerRequest | None:
        """Return the request to send now."""
        if now < self._retry_at:
            return None
        if not self._joined:
            return self._join()
        if now >= self._heartbeat_at:
            return self._ask("heartbeat_group", generation=self._generation)
        return (
            self._commit(dict(list(self._singly.items())[:1]))
            or self._give_up()
            or (self._leave() if self._leaving else self._sync() or self._find_positions())
            or self._commit(self._due_commits(now))
        )

    def due(self, now: float) -> float:
        """Return when there will be something to ask or to fetch, unless something happens before."""
        if self.error is not None:
            return inf
        if self._retry_at > now:
            return self._retry_at
        return min(self._heartbeat_at, self._commit_at, self.assigned.next_retry(now))

    def _ask(self, method: str, **arguments: Any) -> ConsumerRequest:
        return ConsumerRequest(method, {"group": self.options.group_id, "member": self._member, **arguments})

    def _join(self) -> ConsumerRequest | None:
        if self.over or self.error is not None:
            return None
        topics = self.options.topics
        timeouts = {name: getattr(self.options, name) for name in ("session_timeout", "rebalance_timeout")}
        return self._ask("join_group", topics=topics, **timeouts)

    def _give_up(self) -> ConsumerRequest | None:
        """Commit what is handled of the partitions that we have to give up, then forget them."""
        stopped = self.assigned.to_give_up()
        if self.options.auto_commit and (ask := self._commit(self.assigned.handled(stopped))):
            return ask
        self.assigned.drop(stopped)
        return None

    def _sync(self) -> ConsumerRequest | None:
        if not self._rebalance or any(held.stopped for held in self.assigned):
            return None
        return self._ask("sync_group", generation=self._generation)

    def _leave(self) -> ConsumerRequest | None:
        return None if len(self.assigned) else self._ask("leave_group")

    def _find_positions(self) -> ConsumerRequest | None:
        unplaced = self._unplaced()
        if any(not held.is_new for held in unplaced):
            return ConsumerRequest("committed_offsets", {"group": self.options.group_id})
        return ConsumerRequest("offsets", unplaced[0].partition._asdict()) if unplaced else None

    def _unplaced(self) -> list[PartitionProgress]:
        return [held for held in self.assigned if held.position is None and not held.stopped]

    def _due_commits(self, now: float) -> dict[AssignedPartition, int]:
        offsets: dict[AssignedPartition, int] = {}
        if now >= self._commit_at:
            offsets = self.assigned.handled(self.assigned)
            self._commit_at = now + self.options.commit_interval
        for wish in self._wishes:
            offsets |= wish.offsets
        return offsets

    def _commit(self, offsets: Mapping[AssignedPartition, int]) -> ConsumerRequest | None:
        if not offsets:
            return None
        listed = [[*partition, offset] for partition, offset in offsets.items()]
        return self._ask("commit_offsets", offsets=listed, generation=self._synced)

    # What became of it

    def answered(self, ask: ConsumerRequest, answer: Any, sent: float) -> None:
        """Take in the answer to a request that was sent at that time."""
        match ask.method:
            case "join_group":
                self._joined = True
                self._commit_at = sent + self.options.commit_interval if self.options.auto_commit else inf
                self._stand(answer, sent)
            case "sync_group" | "heartbeat_group":
                self._stand(answer, sent)
            case "committed_offsets":
                self._place({AssignedPartition(at["topic"], at["partition"]): at["offset"] for at in answer})
            case "offsets":
                self._place_new(AssignedPartition(**ask.arguments), answer["first"], answer["next"])
            case "commit_offsets":
                self._committed(_offsets_in(ask))
            case "leave_group":
                self._start_over(_gone())

    def _stand(self, standing: Mapping[str, Any], sent: float) -> None:
        self._generation, self._synced = standing["generation"], standing["synced"]
        self._rebalance = standing["rebalance"]
        self.sure_until = sent + self.options.session_timeout
        pause = self.options.session_timeout / 3
        self._heartbeat_at = sent + (min(EAGER, pause) if standing["waiting"] else pause)
        if not self._leaving:
            self.assigned.allow({AssignedPartition(*each) for each in standing["partitions"]})

    def _place(self, committed: Mapping[AssignedPartition, int]) -> None:
        for held in self._unplaced():
            if (offset := committed.get(held.partition)) is not None:
                held.begin(offset, offset)
            held.is_new = offset is None

    def _place_new(self, partition: AssignedPartition, first: int, end: int) -> None:
        held = self.assigned.get(partition)
        if held is not None and held.position is None:
            start = {"earliest": first, "latest": end}.get(str(self.options.start))
            held.begin(min(max(int(self.options.start), first), end) if start is None else start, None)

    def _committed(self, offsets: Mapping[AssignedPartition, int]) -> None:
        for partition, offset in offsets.items():
            self.assigned.committed(partition, offset)
            self._singly.pop(partition, None)
            for wish in self._wishes:
                if wish.offsets.get(partition) == offset:
                    del wish.offsets[partition]
        self._wishes = [wish for wish in self._wishes if not wish.settled]

    def refused(self, ask: ConsumerRequest, error: RequestRefused, now: float) -> None:
        """The broker said no."""
        if ask.method == "leave_group":
            self._start_over(error)
        elif ask.method == "commit_offsets":
            self._commit_refused(_offsets_in(ask), error, now)
        elif ask.method == "join_group" and error.code in _HOPELESS:
            self.error = error
        elif error.code in _NOT_A_MEMBER:
            self._start_over(error)
        else:
            self._heartbeat_at = self._retry_at = now + PAUSE

    def _commit_refused(self, offsets: Mapping[AssignedPartition, int], error: RequestRefused, now: float) -> None:
        if error.code in _NOT_COMMITTABLE and len(offsets) > 1:
            self._singly = dict(offsets)  # to find out which of them it is
            return
        self._disappoint(offsets, error)
        if error.code in _NOT_COMMITTABLE:
            self._committed(offsets)  # there is nothing left to commit to
        elif error.code == Code.STALE_GENERATION:
            self.assigned.drop(self.assigned.to_give_up())
            self._singly.clear()
            self._heartbeat_at = now
        elif error.code in _NOT_A_MEMBER:
            self._start_over(error)
        else:
            self._retry_at = now + PAUSE

    def unanswered(self, ask: ConsumerRequest, now: float) -> None:
        """It is not known whether the broker has received it; sending it again does no harm."""
        self._retry_at = now + PAUSE
        if ask.method == "leave_group":
            self._start_over(_gone())

    def connection_lost(self) -> None:
        """Hand out nothing more before a heartbeat is answered."""
        self.sure_until = self._heartbeat_at = -inf

    def _start_over(self, error: QBError) -> None:
        """We are no member any more: drop everything and join under a new id, unless it was time to go."""
        self.over = self._leaving
        self.assigned.clear()
        self._member, self._joined, self.sure_until = self._new_id(), False, -inf
        self._singly.clear()
        for wish in self._wishes:
            wish.error = error
        self._wishes.clear()

    def _disappoint(self, offsets: Mapping[AssignedPartition, int], error: QBError) -> None:
        for wish in self._wishes:
            if wish.offsets.keys() & offsets.keys():
                wish.error = error
        self._wishes = [wish for wish in self._wishes if not wish.settled]

    # What the program wants

    def take(self, now: float) -> PartitionProgress | None:
        """Return a partition with messages to hand out, if it is certainly ours. Raises what keeps us from going on."""
        if self.error is not None:
            raise self.error
        return self.assigned.take() if now < self.sure_until else None

    def wish_commit(self, message: Message | None) -> PendingCommit:
        """Commit all that was handed out, or up to one message. Raises StaleGeneration if that is not ours."""
        if message is None:
            if self.assigned.lost:
                raise StaleGeneration(Code.STALE_GENERATION, "what is in hand belongs to another consumer now")
            self.assigned.all_is_handled()
            wish = PendingCommit(self.assigned.handled(self.assigned))
        else:
            held = self._find(AssignedPartition(message.topic, message.partition))
            held.handled = max(held.handled, message.offset + 1)
            wish = PendingCommit({held.partition: message.offset + 1})
        if not wish.settled:
            self._wishes.append(wish)
        return wish

    def give_up_wish(self, wish: PendingCommit) -> None:
        """Its caller does not wait for it any more."""
        self._wishes = [other for other in self._wishes if other is not wish]

    def seek(self, partition: AssignedPartition, offset: int) -> None:
        """Go on from another offset. Raises StaleGeneration if the partition is not ours, or not for much longer."""
        if self._find(partition).stopped:
            raise StaleGeneration(Code.STALE_GENERATION, f"this consumer has to give up {partition}")
        self.assigned.seek(partition, offset)

    def _find(self, partition: AssignedPartition) -> PartitionProgress:
        held = self.assigned.get(partition)
        if held is None:
            raise StaleGeneration(Code.STALE_GENERATION, f"this consumer does not hold {partition}")
        return held

    def leave(self) -> None:
        """Commit what is handled (not what is in hand) and leave; `over` says when that is done."""
        self._leaving = True
        self.over = not self._joined
        self.assigned.stop_all()


def _offsets_in(ask: ConsumerRequest) -> dict[AssignedPartition, int]:
    return {AssignedPartition(topic, partition): offset for topic, partition, offset in ask.arguments["offsets"]}


def _gone() -> QBError:
    return StaleGeneration(Code.STALE_GENERATION, "this consumer has left its group")
