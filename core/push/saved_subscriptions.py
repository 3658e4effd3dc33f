"""How a subscription is kept in the metadata.

`subscription/<name>` has it as it was made. What has changed since lies under `cursor/<name>/<partition>`, and under
`cursor/<name>/head` for what is not of one partition. So a save costs as much as has moved, however many partitions the
topic has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from qb.core.pacing import portions
from qb.core.subscriptions.snapshot import (
    PartitionSnapshot,
    SnapshotChanges,
    SnapshotHead,
    SubscriptionSnapshot,
    merged,
)
from qb.storage.engine import Metadata

_HEAD = "head"


class SavedSubscription(NamedTuple):
    """A subscription as the metadata has it."""

    name: str
    topic: str
    created_ms: int
    snapshot: SubscriptionSnapshot
    made_by: str


async def load(metadata: Metadata) -> Iterator[SavedSubscription]:
    """Return every subscription that is kept; none may change meanwhile. Others run in between."""
    heads: dict[str, SnapshotHead] = {}
    cursors: dict[str, list[PartitionSnapshot]] = {}
    made: list[str] = []
    async for portion in portions(metadata.keys()):
        for key in portion:
            if key.startswith("cursor/") and (entry := metadata.get(key)) is not None:
                _, name, part = key.split("/")
                if part == _HEAD:
                    heads[name] = msgspec.convert(entry.value, SnapshotHead)
                else:
                    cursors.setdefault(name, []).append(msgspec.convert(entry.value, PartitionSnapshot))
            elif key.startswith("subscription/"):
                made.append(key)
    return _whole(metadata, sorted(made), heads, cursors)


def _whole(
    metadata: Metadata,
    keys: Iterable[str],
    heads: Mapping[str, SnapshotHead],
    cursors: dict[str, list[PartitionSnapshot]],
) -> Iterator[SavedSubscription]:
    """Yield each as it was made, with what has changed since."""
    for key in keys:
        if (entry := metadata.get(key)) is None:
            continue
        name, made = key.partition("/")[2], entry.value
        snapshot = msgspec.convert(made["snapshot"], SubscriptionSnapshot)
        whole = merged(snapshot, heads.get(name), cursors.pop(name, ()))
        yield SavedSubscription(name, made["topic"], made["created_ms"], whole, made.get("made_by", ""))


def value_of(topic: str, created_ms: int, snapshot: SubscriptionSnapshot, made_by: str) -> dict[str, Any]:
    """Return the value of a new subscription, to be stored under key_of()."""
    value = {"topic": topic, "created_ms": created_ms, "snapshot": msgspec.to_builtins(snapshot)}
    return {**value, "made_by": made_by} if made_by else value


def changed(name: str, changes: SnapshotChanges) -> Mapping[str, PartitionSnapshot | SnapshotHead]:
    """Return what is to be stored of a subscription that has changed, by key."""
    values: dict[str, PartitionSnapshot | SnapshotHead] = {
        f"cursor/{name}/{each.partition}": each for each in changes.partitions
    }
    if changes.head is not None:
        values[f"cursor/{name}/{_HEAD}"] = changes.head
    return values


def key_of(name: str) -> str:
    """Return where a subscription is kept as it was made."""
    return f"subscription/{name}"


def all_keys(name: str, partitions: Iterable[int]) -> list[str]:
    """Return every key that belongs to a subscription and its cursors, given the partitions that it has."""
    parts = [str(partition) for partition in partitions]
    return [key_of(name), *(f"cursor/{name}/{part}" for part in (*parts, _HEAD))]
