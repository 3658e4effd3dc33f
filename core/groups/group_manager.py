"""Consumer groups as the doors call them: members, assignments and committed offsets, on the real clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import trio

from qb.core.groups.committed_offsets import OffsetCommit, OffsetStore
from qb.core.groups.declared_groups import DeclaredGroups
from qb.core.groups.group_coordinator import SESSION_TIMEOUT, GroupCoordinator, MemberStanding
from qb.core.groups.group_reports import (
    LISTED,
    GroupOverview,
    GroupReport,
    GroupSummary,
    describe_group,
    lags_of,
    list_groups,
    partitions_of,
    state_in_words,
)
from qb.core.groups.rebalance import GroupPartition
from qb.core.pacing import portions
from qb.core.positions import resolve
from qb.core.settings import ServerSettings
from qb.core.wire.clock import now_ms
from qb.core.wire.errors import BadRequest, LimitReached
from qb.core.wire.names import check_name
from qb.storage.engine import Engine
from qb.storage.faults import FIRST_DELAY, Faults

_GENERATION = "groups/generation"
_SAFETY = 1_000  # generations that may be given out beyond the one that is stored; a start begins behind them
MAX_COMMITS = 10_000  # partitions that one commit names: they are stored in one step
GROUPS_AT_ONCE = 20  # whose deadlines are looked at between two checkpoints


class GroupCommit(msgspec.Struct, frozen=True, array_like=True):
    """The next offset to handle of a partition."""

    topic: str
    partition: int
    offset: int


class GroupManager:
    """Every consumer group of the broker."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._most = settings.max_groups
        self._most_members, self._most_offsets = settings.max_members_in_all, settings.max_committed_offsets
        self._offsets = OffsetStore(engine.metadata)
        self._declared = DeclaredGroups(engine.metadata)
        saved = engine.metadata.get(_GENERATION)
        counts = {name: topic.partitions for name, topic in engine.topics().items()}
        generation = saved.value + _SAFETY if saved else 0
        self._stored_generation = saved.value if saved else -_SAFETY
        self._groups = GroupCoordinator(counts, generation, settings.max_group_members)
        self._faults = Faults()
        self._changed = trio.Event()

    def __len__(self) -> int:
        """How many groups there are."""
        return len(self._names())

    async def run(self) -> None:
        """Remove members whose deadlines have passed, until cancelled."""
        await self._offsets.keep_only(self._engine.topics())
        await self._declared.keep_only(self._engine.topics())
        while True:
            not_before = trio.current_time() + FIRST_DELAY if self._faults else 0.0
            with trio.move_on_at(max(self._groups.next_deadline(), not_before)):
                await self._changed.wait()
            self._changed = trio.Event()
            async for some in portions(list(self._groups), GROUPS_AT_ONCE):
                for group in some:
                    with self._faults.contained(_timeouts(group.name)):
                        self._groups.tick_group(group, trio.current_time())

    def topic_changed(self, topic: str, partitions: int) -> None:
        """A topic has so many partitions now; 0: it is deleted."""
        self._groups.partitions_changed(topic, partitions, trio.current_time())
        self._changed.set()

    async def topic_deleted(self, topic: str) -> None:
        """Forget what all groups have committed for a topic that is gone."""
        self.topic_changed(topic, 0)
        await self._offsets.delete_topic(topic)
        await self._declared.delete_topic(topic)

    # Members

    async def join(
        self,
        group: str,
        member: str,
        topics: Sequence[str],
        session_timeout: float = SESSION_TIMEOUT,
        rebalance_timeout: float | None = None,
        simple: bool = False,
    ) -> MemberStanding:
        """Make it a member. Raises BadName, BadRequest, UnknownTopic, LimitReached."""
        self._check_room(group)
        self._check_members(group, member)
        standing = self._groups.join(
            group,
            member,
            topics,
            trio.current_time(),
            session_timeout=session_timeout,
            rebalance_timeout=rebalance_timeout,
            simple=simple,
        )
        return await self._noted(standing)

    async def sync(self, group: str, member: str, generation: int) -> MemberStanding:
        """The member has given up what it does not keep: grant it the rest. Raises UnknownMember, StaleGeneration."""
        return await self._noted(self._groups.sync(group, member, generation, trio.current_time()))

    async def heartbeat(self, group: str, member: str, generation: int | None = None) -> MemberStanding:
        """The member is alive. Raises UnknownGroup, UnknownMember, StaleGeneration."""
        standing = self._groups.heartbeat(group, member, trio.current_time(), generation)  # no deadline comes nearer
        await self._store_generation(standing.generation)
        return standing

    async def leave(self, group: str, member: str) -> dict[str, Any]:
        """Remove the member and free its partitions. Raises UnknownGroup, UnknownMember."""
        self._groups.leave(group, member, trio.current_time())
        self._changed.set()
        return {}

    async def _noted(self, standing: MemberStanding) -> MemberStanding:
        self._changed.set()
        self._engine.metadata.put_soon(_GENERATION, standing.generation)
        await self._store_generation(standing.generation)
        return standing

    async def _store_generation(self, generation: int) -> None:
        """Return when no start, and no other broker that takes over, can give a generation out again.

        So a member of before is refused, whatever it holds by then: its generation is older than all that follow.
        """
        if generation > self._stored_generation + _SAFETY:
            await self._engine.metadata.put(_GENERATION, generation)
            self._stored_generation = max(self._stored_generation, generation)

    # Offsets

    async def commit(
        self,
        group: str,
        offsets: Sequence[GroupCommit],
        member: str | None = None,
        generation: int | None = None,
    ) -> dict[str, Any]:
        """Store how far the group has come; returns when it is durable. With a member, only what it holds.

        Raises UnknownTopic, UnknownPartition, OffsetOutOfRange, UnknownMember, StaleGeneration, LimitReached, and
        BadRequest for more than MAX_COMMITS.
        """
        if len(offsets) > MAX_COMMITS:
            raise BadRequest(
                f"a commit names at most {MAX_COMMITS} partitions, not {len(offsets)}; send several of them"
            )
        self._check_room(group)
        commits = []
        async for some in portions(offsets):
            commits += [self._checked(each) for each in some]
        if (member is None) != (generation is None):
            raise BadRequest("a commit names both member and generation, or neither")
        if member is not None and generation is not None:
            partitions = [GroupPartition(commit.topic, commit.partition) for commit in commits]
            self._groups.check_commit(group, member, generation, partitions)
        self._check_offsets(group, commits)
        await self._offsets.commit(group, commits, now_ms())
        return {"committed": len(commits)}

    def _checked(self, commit: GroupCommit) -> OffsetCommit:
        log = self._engine.log(commit.topic, commit.partition)
        return OffsetCommit(commit.topic, commit.partition, commit.offset, log.first_offset, log.end_offset)

    def _check_room(self, group: str) -> None:
        """Raises LimitReached if this would be one group too many."""
        if self._is_known(group):
            return
        known = len(self._names())
        if known >= self._most:
            raise LimitReached(f"the broker has {known} groups", self._most, "QB_MAX_GROUPS")

    def _check_members(self, group: str, member: str) -> None:
        """Raises LimitReached if this would be one member too many of all groups together."""
        known = self._groups.get(group)
        if known is not None and member in known.members:
            return
        members = sum(len(each.members) for each in self._groups)
        if members >= self._most_members:
            raise LimitReached(f"all groups have {members} members", self._most_members, "QB_MAX_MEMBERS_IN_ALL")

    def _check_offsets(self, group: str, commits: Sequence[OffsetCommit]) -> None:
        """Raises LimitReached if these would be offsets of too many partitions of all groups together."""
        known = self._offsets.newest(group)
        new = {(each.topic, each.partition) for each in commits if each.partition not in known.get(each.topic, ())}
        if new and self._offsets.count + len(new) > self._most_offsets:
            text = f"all groups have committed {self._offsets.count} offsets, and {len(new)} more are too many"
            raise LimitReached(text, self._most_offsets, "QB_MAX_COMMITTED_OFFSETS")

    def _is_known(self, group: str) -> bool:
        return any(group in names for names in (self._groups.names(), self._offsets.groups(), self._declared.groups()))

    def _names(self) -> set[str]:
        return self._groups.names() | self._offsets.groups() | self._declared.groups()

    async def committed(self, group: str, topic: str | None = None, consistent: bool = False) -> list[dict[str, Any]]:
        """Return what a group has committed, of all topics or of one."""
        if consistent:
            await self._engine.confirm_current()
        found = self._offsets.of_group(group)
        return [
            {"topic": at.topic, "partition": at.partition, "offset": it.offset, "updated_ms": it.updated_ms}
            for at, it in found.items()
            if topic is None or at.topic == topic
        ]

    def committed_offset(self, group: str, topic: str, partition: int) -> int | None:
        """Return how far a group has come in a partition, or None."""
        found = self._offsets.committed(group, topic, partition)
        return found.offset if found else None

    async def reset(self, group: str, topic: str, to: int | str, partition: int | None = None) -> list[dict[str, Any]]:
        """Commit an offset or a time for a topic's partitions while the group has no members. Raises GroupInUse."""
        self._groups.check_unused(group)
        known = self._engine.topics().get(topic)
        chosen = [partition] if partition is not None else range(known.partitions if known else 1)
        offsets = [GroupCommit(topic, each, await resolve(self._engine.log(topic, each), to)) for each in chosen]
        await self.commit(group, offsets)
        return await self.committed(group, topic)

    # Tools

    async def declare(self, group: str, topic: str) -> int:
        """Declare a group for that topic before it has members or commits; returns when it was declared, in ms.

        The same again changes nothing. Durable on return. Raises BadName, UnknownTopic, LimitReached.
        """
        self._engine.log(topic, 0)
        self._check_room(group)
        return await self._declared.declare(group, topic, now_ms())

    def check_known(self, group: str) -> None:
        """Raises UnknownGroup, unless it has members, has committed something or was declared; BadName."""
        partitions_of(self._groups, self._offsets, check_name("group", group), self._declared_for(group))

    def _declared_for(self, group: str) -> list[GroupPartition]:
        topics = self._engine.topics()
        return [
            GroupPartition(name, number)
            for name in self._declared.topics(group)
            if name in topics
            for number in range(topics[name].partitions)
        ]

    async def list_all(self) -> Sequence[Any]:
        """Return every group that has members or committed offsets or was declared, by name."""
        listed: list[GroupSummary] = []
        declared = {name: self._declared.topics(name) for name in self._declared.groups()}
        async for some in portions(list_groups(self._groups, self._offsets, declared), GROUPS_AT_ONCE):
            listed += some
        return listed

    async def overviews(self, most: int | None = None) -> list[GroupOverview]:
        """Return every group, or the first so many by name, at a glance."""
        found: list[GroupOverview] = []
        ends: dict[str, list[int]] = {}  # of a topic, read once
        async for some in portions(sorted(self._names())[:most], GROUPS_AT_ONCE):
            found += [self._overview(name, ends) for name in some if self._is_known(name)]
        return found

    def _overview(self, group: str, ends: dict[str, list[int]]) -> GroupOverview:
        known, declared = self._groups.get(group), self._declared.topics(group)
        topics = {*self._offsets.newest(group), *declared}
        if known:
            topics.update(*(member.topics for member in known.members.values()))
        for topic in topics - ends.keys():
            ends[topic] = self._topic_ends(topic)
        lags = lags_of(self._groups, self._offsets, group, declared, ends)
        count = sum(len(ends[topic]) for topic in topics)
        return GroupOverview(
            group=group,
            state=state_in_words(known),
            members=len(known.members) if known else 0,
            lag=sum(lags.values()),
            lag_by_topic=lags,
            fault=self._faults.text(_timeouts(group)),
            partitions=self.view(group).partitions if count <= LISTED else [],
            partitions_omitted=count if count > LISTED else 0,
        )

    def _topic_ends(self, topic: str) -> list[int]:
        known = self._engine.topics().get(topic)
        return [self._engine.log(topic, each).end_offset for each in range(known.partitions if known else 0)]

    async def describe(self, group: str) -> Any:
        """Return members, assignment, committed, end and lag. Raises UnknownGroup."""
        return self.view(group)

    def view(self, group: str) -> GroupReport:
        """The same, without waiting."""
        ends = self._ends(partitions_of(self._groups, self._offsets, group, self._declared_for(group)))
        fault = self._faults.text(_timeouts(group))
        return describe_group(self._groups, self._offsets, group, ends, trio.current_time(), fault)

    def _ends(self, partitions: Sequence[GroupPartition]) -> Mapping[GroupPartition, int]:
        topics = self._engine.topics()
        return {
            each: self._engine.log(each.topic, each.partition).end_offset
            for each in partitions
            if each.topic in topics and each.partition < topics[each.topic].partitions
        }

    async def delete(self, group: str) -> dict[str, Any]:
        """Forget a group and its offsets. Raises GroupInUse, UnknownGroup."""
        self._groups.check_unused(group)
        self.check_known(group)
        await self._declared.delete_group(group)
        if group in self._offsets.groups():
            await self._offsets.delete_group(group)
        return {}


def _timeouts(group: str) -> str:
    """Return what a group's fault is noted under."""
    return f"the timeouts of group {group}"
