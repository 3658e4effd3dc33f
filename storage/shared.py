"""storage.shared: what the logs of one engine, and the partitions of one topic, have in common.

May import: core.errors, storage.files, storage.measures, storage.pace, storage.tail, storage.threads, storage.together,
    the standard library.
Never: trio, any one log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from core.errors import LogDamaged
from storage.files import OpenFiles
from storage.measures import Measures
from storage.pace import Pace
from storage.tail import LastReads, Memory
from storage.threads import Workers
from storage.together import Together

HOUR_MS = 3_600_000


class LogSettings(Protocol):
    """What a log asks of the settings."""

    @property
    def fsync_on_write(self) -> bool: ...
    @property
    def segment_bytes(self) -> int: ...
    @property
    def segment_hours(self) -> float: ...
    @property
    def max_pending_bytes(self) -> int: ...


class Shared(NamedTuple):
    """What all logs of an engine have in common."""

    settings: LogSettings
    clock: Callable[[], int]  # ms
    files: OpenFiles
    writers: Workers
    memory: Memory
    reads: LastReads
    measures: Measures
    together: Together
    pace: Pace


class Health:
    """Whether a topic may be used: one damaged partition stops all of it, since nobody can tell what is missing."""

    def __init__(self) -> None:
        self.damage: LogDamaged | None = None
