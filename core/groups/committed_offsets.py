"""How far each group has come, kept durably.

docs/GROUPS.md is the contract. The values are kept in the metadata under `offset/<group>/<topic>/<partition>`; this
module keeps only an index of the partitions of each group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping
from typing import NamedTuple

import msgspec

from qb.core.groups.rebalance import GroupPartition
from qb.core.wire.errors import BrokerError, OffsetOutOfRange, UnknownGroup
from qb.core.wire.names import check_name
from qb.storage.engine import Metadata

_PREFIX = "offset/"


class OffsetCommit(NamedTuple):
    """The next offset to handle, and what the log holds: it must lie from `first` to `end`."""

    topic: str
    partition: int
    offset: int
    first: int
    end: int


class CommittedOffset(msgspec.Struct, frozen=True):
    """A committed offset as it is stored."""

    offset: int
    updated_ms: int


class OffsetStore:
    """The committed offsets of all groups. All methods belong to the event loop's thread; reads do not block."""

    def __init__(self, metadata: Metadata) -> None:
        """Find what was committed before."""
        self._metadata = metadata
        self.count = 0  # partitions with an offset, of all groups together
        self._index: dict[str, dict[str, dict[int, int]]] = {}  # the newest offset by group, topic and partition
        for key, entry in metadata.under(_PREFIX).items():
            _, group, topic, partition = key.split("/")
            self._note(group, GroupPartition(topic, int(partition)), entry.value["offset"])

    async def commit(self, group: str, commits: Collection[OffsetCommit], now_ms: int) -> None:
        """Store all of them in one transaction, or none if one is out of range; returns when they are durable.

        Raises BadName, OffsetOutOfRange; DiskFull or another BrokerError if they could not be stored.
        """
        check_name("group", group)
        for each in commits:
            if not each.first <= each.offset <= each.end:
                raise OffsetOutOfRange(each.topic, each.partition, each.offset, each.first, each.end)
        for each in commits:  # no await before flush(): what is given in one step goes into one transaction
            partition = GroupPartition(each.topic, each.partition)
            self._metadata.put_soon(_key(group, partition), {"offset": each.offset, "updated_ms": now_ms})
            self._note(group, partition, each.offset)
        try:
            await self._metadata.flush()
        except BrokerError:
            for each in commits:
                self._read_again(group, GroupPartition(each.topic, each.partition))
            raise

    def committed(self, group: str, topic: str, partition: int) -> CommittedOffset | None:
        """Return what is committed durably, or None."""
        entry = self._metadata.get(_key(group, GroupPartition(topic, partition)))
        return entry and msgspec.convert(entry.value, CommittedOffset)

    def of_group(self, group: str) -> dict[GroupPartition, CommittedOffset]:
        """Return all that a group has committed, sorted by topic and partition."""
        found = {each: self.committed(group, *each) for each in sorted(self._partitions(group))}
        return {each: committed for each, committed in found.items() if committed}

    def newest(self, group: str) -> Mapping[str, Mapping[int, int]]:
        """Return the newest offset that a group has committed by topic and partition; it may not be durable yet."""
        return self._index.get(group, {})

    def groups(self) -> KeysView[str]:
        """Return every group that has committed something."""
        return self._index.keys()

    async def delete_group(self, group: str) -> None:
        """Forget a group; durable on return. Raises UnknownGroup. The caller checks first that it has no members."""
        if group not in self._index:
            raise UnknownGroup(group)
        await self._delete([(group, each) for each in self._partitions(group)])

    async def delete_topic(self, topic: str) -> None:
        """Forget what all groups have committed for a topic; durable on return."""
        await self._delete([(group, each) for group, each in self._all() if each.topic == topic])

    async def keep_only(self, topics: Collection[str]) -> None:
        """Forget what was committed for topics that are not there any more; for the start of the broker."""
        await self._delete([(group, each) for group, each in self._all() if each.topic not in topics])

    def _all(self) -> Iterable[tuple[str, GroupPartition]]:
        return ((group, each) for group in self._index for each in self._partitions(group))

    def _partitions(self, group: str) -> Iterator[GroupPartition]:
        for topic, offsets in self._index.get(group, {}).items():
            yield from (GroupPartition(topic, partition) for partition in offsets)

    def _note(self, group: str, partition: GroupPartition, offset: int) -> None:
        offsets = self._index.setdefault(group, {}).setdefault(partition.topic, {})
        self.count += partition.partition not in offsets
        offsets[partition.partition] = offset

    def _read_again(self, group: str, partition: GroupPartition) -> None:
        """Note what the metadata has of a partition."""
        entry = self._metadata.get(_key(group, partition))
        if entry is not None:
            self._note(group, partition, entry.value["offset"])
        elif partition.partition in self._index.get(group, {}).get(partition.topic, {}):
            self._drop(group, partition)

    def _drop(self, group: str, partition: GroupPartition) -> None:
        topics = self._index[group]
        del topics[partition.topic][partition.partition]
        self.count -= 1
        if not topics[partition.topic]:
            del topics[partition.topic]
        if not topics:
            del self._index[group]

    async def _delete(self, gone: Collection[tuple[str, GroupPartition]]) -> None:
        if not gone:
            return
        for group, each in gone:
            self._drop(group, each)
        try:
            await self._metadata.delete(*(_key(group, each) for group, each in gone))
        except BrokerError:  # all of it is still there
            for group, each in gone:
                self._read_again(group, each)
            raise


def _key(group: str, partition: GroupPartition) -> str:
    return f"{_PREFIX}{group}/{partition.topic}/{partition.partition}"
