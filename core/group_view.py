"""core.group_view: consumer groups as tools see them.

May import: core.errors, core.groups, core.membership, core.offsets, msgspec, the standard library.
Never: trio, time, storage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from core.errors import UnknownGroup
from core.groups import Groups
from core.membership import Group, Member, Partition
from core.offsets import Committed, Offsets

NOTHING_MADE: Mapping[str, Collection[str]] = MappingProxyType({})


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """A member, and how long it has been silent."""

    member: str
    topics: list[str]
    partitions: tuple[Partition, ...]  # held
    waiting: tuple[Partition, ...]  # in its share, not held yet
    synced: bool  # with the newest generation
    session_timeout: float
    silent_for: float


class PartitionView(msgspec.Struct, frozen=True, kw_only=True):
    """How far the group has come in a partition. None: nobody, nothing, or no such partition any more."""

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


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """All about a group. Without members it has no generation: 0."""

    group: str
    state: str
    generation: int
    members: list[MemberView]
    partitions: list[PartitionView]


def list_groups(
    groups: Groups, offsets: Offsets, made: Mapping[str, Collection[str]] = NOTHING_MADE
) -> list[GroupSummary]:
    """Return every group that has members or committed offsets or was made for some topics, sorted by name."""
    names = sorted({group.name for group in groups} | set(offsets.groups()) | set(made))
    return [_summary(name, groups.get(name), offsets.of_group(name), made.get(name, ())) for name in names]


def partitions_of(
    groups: Groups, offsets: Offsets, group: str, made_for: Collection[Partition] = ()
) -> list[Partition]:
    """Return the partitions that describe_group() wants to know the ends of. Raises UnknownGroup."""
    known, committed = groups.get(group), offsets.of_group(group)
    if known is None and not committed and not made_for:
        raise UnknownGroup(group)
    if known is None:
        return sorted({*committed, *made_for})
    return sorted({*committed, *made_for, *known.holders}.union(*(member.share for member in known.members.values())))


def describe_group(
    groups: Groups, offsets: Offsets, group: str, ends: Mapping[Partition, int], now: float
) -> GroupView:
    """Return members, assignment, committed offsets and lag, given the ends of partitions_of(). Raises UnknownGroup."""
    known, committed = groups.get(group), offsets.of_group(group)
    holders = known.holders if known else {}
    return GroupView(
        group=group,
        partitions=[
            _partition(each, holders.get(each), committed.get(each), ends.get(each))
            for each in partitions_of(groups, offsets, group, ends)
        ],
        state=state_in_words(known),
        generation=known.generation if known else 0,
        members=[_member(known, member, now) for _, member in sorted(known.members.items())] if known else [],
    )


def state_in_words(group: Group | None) -> str:
    """Return `empty`, `stable`, or `rebalancing` and whom it waits for."""
    if group is None:
        return "empty"
    late = sorted(name for name, member in group.members.items() if not group.is_synced(member))
    return f"rebalancing: waiting for {', '.join(late)} to sync" if late else "stable"


def _summary(
    name: str, group: Group | None, committed: Mapping[Partition, Committed], made_for: Collection[str]
) -> GroupSummary:
    members = group.members.values() if group else ()
    topics = {topic for member in members for topic in member.topics} | {each.topic for each in committed}
    topics.update(made_for)
    return GroupSummary(group=name, state=state_in_words(group), members=len(members), topics=sorted(topics))


def _member(group: Group, member: Member, now: float) -> MemberView:
    return MemberView(
        member=member.member,
        topics=sorted(member.topics),
        partitions=tuple(each for each in sorted(group.holders) if group.holders[each] == member.member),
        waiting=group.awaited(member),
        synced=group.is_synced(member),
        session_timeout=member.session_timeout,
        silent_for=round(now - member.heard, 3),
    )


def _partition(each: Partition, member: str | None, committed: Committed | None, end: int | None) -> PartitionView:
    return PartitionView(
        topic=each.topic,
        partition=each.partition,
        member=member,
        committed=committed.offset if committed else None,
        end=end,
        lag=None if end is None else end - (committed.offset if committed else 0),
        updated_ms=committed.updated_ms if committed else None,
    )
