"""All consumer groups: joining, heartbeats, rebalances, timeouts, and the fence before commits.

docs/GROUPS.md is the contract. Nothing here waits or has a clock: `now` is in seconds on any clock that never goes
back. Only groups that have members are kept. The owner calls tick() at next_deadline().
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping
from math import inf

import msgspec

from qb.core.groups.rebalance import GroupMember, GroupMembership, GroupPartition
from qb.core.wire.errors import (
    BadRequest,
    GroupInUse,
    LimitReached,
    StaleGeneration,
    UnknownGroup,
    UnknownMember,
    UnknownTopic,
)
from qb.core.wire.names import check_name

SESSION_TIMEOUT = 10.0
REBALANCE_TIMEOUT = 60.0
SHORTEST_TIMEOUT, LONGEST_TIMEOUT = 1.0, 3600.0
MAX_MEMBERS = 1_000  # of one group, unless it is set
MAX_TOPICS = 100  # of one member


class MemberStanding(msgspec.Struct, frozen=True, kw_only=True):
    """Where a member stands: the answer to join, sync and heartbeat."""

    generation: int  # the newest one
    synced: int  # the one to commit with; 0: none yet
    rebalance: bool  # give up what `partitions` does not list, then sync `generation`
    partitions: tuple[GroupPartition, ...]  # all that it may go on with or take up now
    waiting: tuple[GroupPartition, ...]  # what comes as soon as others have given it up


class GroupCoordinator:
    """Every group that has members. Each method decides at once; none leaves anything half done when it raises."""

    def __init__(
        self, counts: Mapping[str, int] | None = None, last_generation: int = 0, max_members: int = MAX_MEMBERS
    ) -> None:
        """Know the topics and how many partitions each has; generations start after `last_generation`."""
        self._max_members = max_members
        self._counts = dict(counts or {})
        self._groups: dict[str, GroupMembership] = {}
        self._generation = last_generation  # of all groups: a group that comes back never gets a number again

    # Requests of members

    def join(
        self,
        group: str,
        member: str,
        topics: Collection[str],
        now: float,
        *,
        session_timeout: float = SESSION_TIMEOUT,
        rebalance_timeout: float | None = None,
        simple: bool = False,
    ) -> MemberStanding:
        """Make it a member, in the place of any other of that id. A simple one holds its partitions at once.

        Raises BadName, BadRequest, UnknownTopic, LimitReached.
        """
        if rebalance_timeout is None:
            rebalance_timeout = max(REBALANCE_TIMEOUT, session_timeout)
        self._check_join(group, member, topics)
        _check_timeout("session_timeout", session_timeout, SHORTEST_TIMEOUT)
        _check_timeout("rebalance_timeout", rebalance_timeout, session_timeout)
        newcomer = GroupMember(member, frozenset(topics), session_timeout, rebalance_timeout, simple, heard=now)
        known = self._groups.setdefault(group, GroupMembership(group))
        former = known.members.get(member)
        if former and former.simple and simple and former.topics == newcomer.topics:
            former.session_timeout, former.heard = session_timeout, now
            return self._standing(known, former)
        if former:
            known.drop(member)
        known.members[member] = newcomer
        self._rebalance(known, now)
        newcomer.joined = known.generation
        return self._standing(known, newcomer)

    def sync(self, group: str, member: str, generation: int, now: float) -> MemberStanding:
        """The member has given up what this generation takes from it: grant it the rest.

        Changes no holder if a newer generation has begun; the standing says so. Raises as heartbeat() does.
        """
        known, caller = self._note_alive(group, member, generation, now)
        if generation == known.generation and not known.is_synced(caller):
            known.release(caller)
            known.grant()
        return self._standing(known, caller)

    def heartbeat(self, group: str, member: str, now: float, generation: int | None = None) -> MemberStanding:
        """The member is alive. Raises UnknownGroup, UnknownMember; StaleGeneration if another joined under its id."""
        return self._standing(*self._note_alive(group, member, generation, now))

    def leave(self, group: str, member: str, now: float) -> None:
        """The member holds nothing and wants nothing. Raises UnknownGroup, UnknownMember."""
        known, _ = self._find(group, member)
        self._drop(known, [member], now)

    # Events of the broker

    def tick(self, now: float) -> list[tuple[str, str]]:
        """Remove the members whose deadlines have passed; return them as (group, member)."""
        return [(group.name, member) for group in self for member in self.tick_group(group, now)]

    def tick_group(self, group: GroupMembership, now: float) -> list[str]:
        """Remove the members of one group whose deadlines have passed; return them."""
        late = [each.member for each in group.members.values() if each.deadline <= now]
        if late:
            self._drop(group, late, now)
        return late

    def next_deadline(self) -> float:
        """Return when tick() is to be called at the latest; infinity if no group has members."""
        return min((member.deadline for group in self for member in group.members.values()), default=inf)

    def partitions_changed(self, topic: str, count: int, now: float) -> None:
        """The topic has so many partitions now; 0: it is deleted."""
        if self._counts.get(topic, 0) == count:
            return
        if count:
            self._counts[topic] = count
        else:
            del self._counts[topic]
        for group in self:
            if any(topic in member.topics for member in group.members.values()):
                self._rebalance(group, now)

    def topic_deleted(self, topic: str, now: float) -> None:
        """The topic is gone. Its consumers stay members, and get it again should it come back."""
        self.partitions_changed(topic, 0, now)

    # Questions of others

    def check_commit(self, group: str, member: str, generation: int, partitions: Iterable[GroupPartition]) -> None:
        """Return if the member may commit for all of them; store in the same step of the event loop.

        Raises UnknownGroup, UnknownMember, StaleGeneration.
        """
        known, caller = self._find(group, member)
        if generation != caller.synced:
            synced = f"has synced {caller.synced}" if caller.synced else "has synced none yet"
            raise StaleGeneration(f"a commit for generation {generation} is refused: {member!r} {synced}")
        for each in partitions:
            if known.holders.get(each) != member:
                raise StaleGeneration(f"{member!r} does not hold {each.topic}/{each.partition} in {generation}")

    def check_unused(self, group: str) -> None:
        """Raises GroupInUse if the group has members."""
        if group in self._groups:
            raise GroupInUse(group, len(self._groups[group].members))

    def names(self) -> KeysView[str]:
        """Return every group that has members."""
        return self._groups.keys()

    def get(self, group: str) -> GroupMembership | None:
        """Return a group to look at, or None if it has no members."""
        return self._groups.get(group)

    def __iter__(self) -> Iterator[GroupMembership]:
        """Return every group that has members, to look at, sorted by name."""
        return iter([group for _, group in sorted(self._groups.items())])

    # Inside

    def _find(self, group: str, member: str) -> tuple[GroupMembership, GroupMember]:
        known = self._groups.get(group)
        if known is None:
            raise UnknownGroup(group)
        if member not in known.members:
            raise UnknownMember(group, member)
        return known, known.members[member]

    def _note_alive(
        self, group: str, member: str, generation: int | None, now: float
    ) -> tuple[GroupMembership, GroupMember]:
        known, caller = self._find(group, member)
        if generation is not None and not caller.joined <= generation <= known.generation:
            raise StaleGeneration(
                f"generation {generation} is none of {member!r}, which joined in {caller.joined}: "
                "another has joined under this id, so join again under a new one"
            )
        caller.heard = now
        return known, caller

    def _drop(self, group: GroupMembership, members: Iterable[str], now: float) -> None:
        for member in members:
            group.drop(member)
        self._rebalance(group, now)

    def _rebalance(self, group: GroupMembership, now: float) -> None:
        self._generation += 1
        group.rebalance(self._generation, self._counts, now)
        if not group.members:
            del self._groups[group.name]

    def _standing(self, group: GroupMembership, member: GroupMember) -> MemberStanding:
        return MemberStanding(
            generation=group.generation,
            synced=member.synced,
            rebalance=not group.is_synced(member),
            partitions=group.held(member),
            waiting=group.awaited(member),
        )

    def _check_join(self, group: str, member: str, topics: Collection[str]) -> None:
        check_name("group", group)
        check_name("member", member)
        if not 1 <= len(topics) <= MAX_TOPICS:
            raise BadRequest(f"a member consumes 1 to {MAX_TOPICS} topics, not {len(topics)}")
        for topic in topics:
            if topic not in self._counts:
                raise UnknownTopic(check_name("topic", topic))
        known = self._groups.get(group)
        if known and member not in known.members and len(known.members) >= self._max_members:
            raise LimitReached(
                f"group {group!r} has {len(known.members)} members", self._max_members, "QB_MAX_GROUP_MEMBERS"
            )


def _check_timeout(name: str, value: float, least: float) -> None:
    if not least <= value <= LONGEST_TIMEOUT:
        raise BadRequest(f"{name} must be from {least:g} to {LONGEST_TIMEOUT:g} seconds, not {value:g}")
