"""How a subscription is kept in the metadata.

`subscription/<name>` has it as it was made. What has changed since lies under `cursor/<name>/<partition>`, and under
`cursor/<name>/head` for what is not of one partition. So a save costs as much as has moved, however many partitions the
topic has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

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


def load(metadata: Metadata) -> Iterator[SavedSubscription]:
    """Yield every subscription that is kept."""
    heads: dict[str, SnapshotHead] = {}
    cursors: dict[str, list[PartitionSnapshot]] = {}
    for key, entry in metadata.under("cursor/").items():
        _, name, part = key.split("/")
        if part == _HEAD:
            heads[name] = msgspec.convert(entry.value, SnapshotHead)
        else:
            cursors.setdefault(name, []).append(msgspec.convert(entry.value, PartitionSnapshot))
    for key, entry in metadata.under("subscription/").items():
        name, made = key.partition("/")[2], entry.value
        snapshot = msgspec.convert(made["snapshot"], SubscriptionSnapshot)
        whole = merged(snapshot, heads.get(name), cursors.get(name, ()))
        yield SavedSubscription(name, made["topic"], made["created_ms"], whole, made.get("made_by", ""))


def value_of(topic: str, created_ms: int, snapshot: SubscriptionSnapshot, made_by: str) -> dict[str, Any]:
    """Return the value of a new subscription, to be stored under key_of()."""
    value = {"topic": topic, "created_ms": created_ms, "snapshot": msgspec.to_builtins(snapshot)}
    return {**value, "made_by": made_by} if made_by else value


def changed(name: str, changes: SnapshotChanges) -> dict[str, Any]:
    """Return what is to be stored of a subscription that has changed, by key."""
    values = {f"cursor/{name}/{each.partition}": msgspec.to_builtins(each) for each in changes.partitions}
    if changes.head is not None:
        values[f"cursor/{name}/{_HEAD}"] = msgspec.to_builtins(changes.head)
    return values


def key_of(name: str) -> str:
    """Return where a subscription is kept as it was made."""
    return f"subscription/{name}"


def all_keys(name: str, partitions: Iterable[int]) -> list[str]:
    """Return every key that belongs to a subscription and its cursors, given the partitions that it has."""
    parts = [str(partition) for partition in partitions]
    return [key_of(name), *(f"cursor/{name}/{part}" for part in (*parts, _HEAD))]
