"""Consumer groups as tools see them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

import msgspec

from qb.core.groups.committed_offsets import CommittedOffset, OffsetStore
from qb.core.groups.group_coordinator import GroupCoordinator
from qb.core.groups.rebalance import GroupMember, GroupMembership, GroupPartition
from qb.core.wire.errors import UnknownGroup

LISTED = 100  # partitions of a group in an overview
NONE_DECLARED: Mapping[str, Collection[str]] = MappingProxyType({})


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """A member, and how long it has been silent."""

    member: str
    topics: list[str]
    partitions: tuple[GroupPartition, ...]  # held
    waiting: tuple[GroupPartition, ...]  # in its share, not held yet
    synced: bool  # with the newest generation
    session_timeout: float
    silent_for: float


class GroupPartitionReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far the group has come in a partition. None: no holder, nothing committed, or no such partition any more."""

    topic: str
    partition: int
    member: str | None
    committed: int | None
    end: int | None
    lag: int | None  # end - committed, or - 0 if nothing is committed
    updated_ms: int | None


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A group in a list."""

    group: str
    state: str
    members: int
    topics: list[str]


class GroupOverview(msgspec.Struct, frozen=True, kw_only=True):
    """A group at a glance."""

    group: str
    state: str
    members: int
    lag: int
    lag_by_topic: dict[str, int]
    fault: str | None
    partitions: list[GroupPartitionReport]  # none if they are more than LISTED: then describe the group
    partitions_omitted: int


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """All about a group. Without members it has no generation: 0."""

    group: str
    state: str
    generation: int
    fault: str | None  # why its timeouts are not looked after, or None
    members: list[MemberReport]
    partitions: list[GroupPartitionReport]


def list_groups(
    groups: GroupCoordinator, offsets: OffsetStore, declared: Mapping[str, Collection[str]] = NONE_DECLARED
) -> Iterator[GroupSummary]:
    """Yield every group that has members or committed offsets or was declared for some topics, sorted by name."""
    for name in sorted(groups.names() | offsets.groups() | declared.keys()):
        yield _summary(name, groups.get(name), offsets.newest(name), declared.get(name, ()))


def lags_of(
    groups: GroupCoordinator, offsets: OffsetStore, group: str, declared: Collection[str], ends: Mapping[str, list[int]]
) -> dict[str, int]:
    """Return how far a group is behind in each topic, given the visible ends of all partitions of its topics."""
    known, newest = groups.get(group), offsets.newest(group)
    whole = {topic for member in known.members.values() for topic in member.topics} if known else set()
    lags: dict[str, int] = {}
    for topic in sorted(topic for topic in {*whole, *declared, *newest} if ends.get(topic)):
        committed = newest.get(topic, {})
        counted = ends[topic]
        if topic not in whole and topic not in declared:
            counted = [end for partition, end in enumerate(counted) if partition in committed]
        lags[topic] = sum(counted) - sum(committed.values())
    return lags


def partitions_of(
    groups: GroupCoordinator, offsets: OffsetStore, group: str, declared_for: Collection[GroupPartition] = ()
) -> list[GroupPartition]:
    """Return the partitions that describe_group() wants to know the ends of. Raises UnknownGroup."""
    known, committed = groups.get(group), offsets.of_group(group)
    if known is None and not committed and not declared_for:
        raise UnknownGroup(group)
    if known is None:
        return sorted({*committed, *declared_for})
    return sorted(
        {*committed, *declared_for, *known.holders}.union(*(member.share for member in known.members.values()))
    )


def describe_group(
    groups: GroupCoordinator,
    offsets: OffsetStore,
    group: str,
    ends: Mapping[GroupPartition, int],
    now: float,
    fault: str | None = None,
) -> GroupReport:
    """Return members, assignment, committed offsets and lag, given the ends of partitions_of(). Raises UnknownGroup."""
    known, committed = groups.get(group), offsets.of_group(group)
    holders = known.holders if known else {}
    return GroupReport(
        group=group,
        partitions=[
            _partition(each, holders.get(each), committed.get(each), ends.get(each))
            for each in partitions_of(groups, offsets, group, ends)
        ],
        state=state_in_words(known),
        generation=known.generation if known else 0,
        fault=fault,
        members=_members(known, now) if known else [],
    )


def state_in_words(group: GroupMembership | None) -> str:
    """Return `empty`, `stable`, or `rebalancing` with the members that it waits for."""
    if group is None:
        return "empty"
    late = sorted(name for name, member in group.members.items() if not group.is_synced(member))
    return f"rebalancing: waiting for {', '.join(late)} to sync" if late else "stable"


def _summary(
    name: str,
    group: GroupMembership | None,
    committed: Collection[str],
    declared_for: Collection[str],
) -> GroupSummary:
    members = group.members.values() if group else ()
    topics = {topic for member in members for topic in member.topics} | {*committed}
    topics.update(declared_for)
    return GroupSummary(group=name, state=state_in_words(group), members=len(members), topics=sorted(topics))


def _members(group: GroupMembership, now: float) -> list[MemberReport]:
    held: dict[str, list[GroupPartition]] = {}
    for each, name in sorted(group.holders.items()):
        held.setdefault(name, []).append(each)
    return [_member(group, member, held.get(name, []), now) for name, member in sorted(group.members.items())]


def _member(group: GroupMembership, member: GroupMember, held: Collection[GroupPartition], now: float) -> MemberReport:
    return MemberReport(
        member=member.member,
        topics=sorted(member.topics),
        partitions=tuple(held),
        waiting=group.awaited(member),
        synced=group.is_synced(member),
        session_timeout=member.session_timeout,
        silent_for=round(now - member.heard, 3),
    )


def _partition(
    each: GroupPartition, member: str | None, committed: CommittedOffset | None, end: int | None
) -> GroupPartitionReport:
    return GroupPartitionReport(
        topic=each.topic,
        partition=each.partition,
        member=member,
        committed=committed.offset if committed else None,
        end=end,
        lag=None if end is None else end - (committed.offset if committed else 0),
        updated_ms=committed.updated_ms if committed else None,
    )
