"""One consumer group: which member should have which partition, and which has it.

docs/GROUPS.md is the contract. A member's share is where its partitions should be; `holders` is where they are. A
partition leaves its holder only by release() or drop() and finds a new one only by grant(): so it never has two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple


class GroupPartition(NamedTuple):
    """One log of a topic."""

    topic: str
    partition: int


@dataclass(slots=True)
class GroupMember:
    """One consumer, from its join until it leaves, dies or is replaced."""

    member: str
    topics: frozenset[str]
    session_timeout: float
    rebalance_timeout: float
    simple: bool  # knows no generations: counts as synced at every moment
    heard: float  # when it was last heard from
    joined: int = 0  # the generation that its join began; an older one belongs to an earlier member of that id
    synced: int = 0  # the newest generation for which it has given up what is not in its share
    sync_by: float = inf  # it is removed if it has not synced the newest generation by then
    share: tuple[GroupPartition, ...] = ()

    @property
    def deadline(self) -> float:
        """When it is removed unless it is heard from."""
        return min(self.heard + self.session_timeout, self.sync_by)


def share_out(topics: Mapping[str, Collection[str]], counts: Mapping[str, int]) -> dict[str, list[GroupPartition]]:
    """Return each member's partitions: of a topic's m members, sorted by id, number p mod m gets partition p."""
    shares: dict[str, list[GroupPartition]] = {member: [] for member in topics}
    for topic in sorted(set().union(*topics.values())):
        members = sorted(member for member in topics if topic in topics[member])
        for partition in range(counts.get(topic, 0)):
            shares[members[partition % len(members)]].append(GroupPartition(topic, partition))
    return shares


@dataclass(slots=True)
class GroupMembership:
    """The members of a group and the partitions they hold."""

    name: str
    generation: int = 0
    members: dict[str, GroupMember] = field(default_factory=dict)
    holders: dict[GroupPartition, str] = field(default_factory=dict)

    def rebalance(self, generation: int, counts: Mapping[str, int], now: float) -> None:
        """Compute the shares anew; a member keeps what it must give up until release() or drop()."""
        self.generation = generation
        self.holders = {each: name for each, name in self.holders.items() if each.partition < counts.get(each.topic, 0)}
        shares = share_out({name: member.topics for name, member in self.members.items()}, counts)
        for name, member in self.members.items():
            member.share = tuple(shares[name])
            member.sync_by = min(member.sync_by, now + member.rebalance_timeout)
            if member.simple:
                self.release(member)
        self.grant()

    def release(self, member: GroupMember) -> None:
        """Free what the member holds outside its share: it has given that up for the newest generation."""
        self._free(member.member, keep=member.share)
        member.synced = self.generation
        member.sync_by = inf

    def drop(self, name: str) -> None:
        """Forget a member and free all that it holds."""
        del self.members[name]
        self._free(name, keep=())

    def _free(self, name: str, keep: Collection[GroupPartition]) -> None:
        kept = set(keep)
        for each in [each for each, holder in self.holders.items() if holder == name and each not in kept]:
            del self.holders[each]

    def grant(self) -> None:
        """Give what is free to the member whose share it is in, if that has synced."""
        for member in self.members.values():
            if self.is_synced(member):
                free = [each for each in member.share if each not in self.holders]
                self.holders.update(dict.fromkeys(free, member.member))

    def is_synced(self, member: GroupMember) -> bool:
        return member.synced == self.generation

    def held(self, member: GroupMember) -> tuple[GroupPartition, ...]:
        """Return what the member has and keeps."""
        return tuple(each for each in member.share if self.holders.get(each) == member.member)

    def awaited(self, member: GroupMember) -> tuple[GroupPartition, ...]:
        """Return what is in the member's share and not yet with it."""
        return tuple(each for each in member.share if self.holders.get(each) != member.member)
