"""What a record of changes of the metadata means for topics, logs and stages. Decided from the changes alone."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import NamedTuple

import msgspec

from qb.storage.engine import Topic
from qb.storage.log.log_extents import KEY as EXTENT
from qb.storage.metadata.metadata_records import StoredValue
from qb.storage.stages.stage_store import NOTED, NotedStage

TOPIC = "topic/"


class DroppedMessages(NamedTuple):
    """All messages of a log before an offset."""

    topic: str
    partition: int
    first_offset: int


class CellChanges(NamedTuple):
    """What comes and goes with a record of changes."""

    removed: list[Topic]
    created: list[Topic]
    grown: list[Topic]
    begun: dict[str, NotedStage]
    ended: list[str]
    dropped: list[DroppedMessages]

    @property
    def are_short(self) -> bool:
        """Do no files come or go?"""
        return not any(self)


def cell_changes(
    changes: Mapping[str, StoredValue | None], topics: Mapping[str, Topic], stages: Container[str]
) -> CellChanges:
    """Return what the changes mean where there are these topics and stages."""
    found = CellChanges([], [], [], {}, [], [])
    for key, value in changes.items():
        if key.startswith(TOPIC):
            _take_topic(found, topics.get(key.removeprefix(TOPIC)), value)
        elif key.startswith(NOTED):
            _take_stage(found, key.removeprefix(NOTED), value, stages)
        elif key.startswith(EXTENT) and value is not None:
            topic, _, partition = key.removeprefix(EXTENT).partition("/")
            if partition:
                found.dropped.append(DroppedMessages(topic, int(partition), msgspec.json.decode(value.data)[0]))
    return found


def _take_topic(found: CellChanges, known: Topic | None, value: StoredValue | None) -> None:
    wanted = None if value is None else msgspec.json.decode(value.data, type=Topic)
    if known is not None and (wanted is None or wanted.number != known.number):
        found.removed.append(known)
        known = None
    if wanted is not None and known is None:
        found.created.append(wanted)
    elif wanted is not None:
        found.grown.append(wanted)


def _take_stage(found: CellChanges, stage_id: str, value: StoredValue | None, stages: Container[str]) -> None:
    if value is None:
        found.ended.append(stage_id)
    elif stage_id not in stages:
        found.begun[stage_id] = msgspec.json.decode(value.data, type=NotedStage)
