"""Keeps the garbage collector from walking a million cursors."""

from __future__ import annotations

import gc

FREEZE_AT = 20_000  # cursors that came: a full collection walks up to ten objects for each


class KeptCursors:
    """Counts the cursors that have come, and takes them out of the collector's sight from time to time.

    A cursor is part of no cycle: when its subscription is deleted, it is freed by its reference count all the same. All
    else that is alive then is taken out too, so this is done seldom, and after young garbage was collected.
    """

    def __init__(self) -> None:
        self._walked = 0

    def add(self, cursors: int) -> None:
        """So many have come. Never blocks for longer than a collection of young objects."""
        self._walked += cursors
        if self._walked >= FREEZE_AT:
            gc.collect(1)
            gc.freeze()
            self._walked = 0
