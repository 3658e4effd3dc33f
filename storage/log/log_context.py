"""What the logs of one engine, and the partitions of one topic, have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from qb.core.wire.errors import LogDamaged
from qb.storage.commit.commit_step import CommitSteps
from qb.storage.commit.committer import Committer
from qb.storage.commit.completions import Completions
from qb.storage.commit.sync_pace import SyncPace
from qb.storage.commit.writer_threads import WriterThreads
from qb.storage.files import OpenFiles
from qb.storage.log.log_extents import LogExtents
from qb.storage.log.recent_batches import LastReads, RecentMemory
from qb.storage.measures import Measures

HOUR_MS = 3_600_000


class LogSettings(Protocol):
    """What a log asks of the settings."""

    @property
    def segment_bytes(self) -> int: ...
    @property
    def segment_hours(self) -> float: ...
    @property
    def max_pending_bytes(self) -> int: ...


class LogContext(NamedTuple):
    """What all logs of an engine have in common."""

    settings: LogSettings
    clock: Callable[[], int]  # ms
    files: OpenFiles
    writers: WriterThreads  # for what makes nothing durable: indexes, reading again
    committer: Committer
    memory: RecentMemory
    reads: LastReads
    measures: Measures
    commit_steps: CommitSteps
    completions: Completions
    pace: SyncPace
    extents: LogExtents


class TopicHealth:
    """Whether a topic may be used: one damaged partition stops all of it, since what is missing is unknown."""

    def __init__(self) -> None:
        self.damage: LogDamaged | None = None
