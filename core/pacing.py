"""Loops over what a peer sent: bounded portions with checkpoints between them, and a count of the items.

One request may name a hundred thousand things. A loop over them that never awaits holds the event loop, and with it all
other peers. Code that can await uses `portions`; code that must finish within one step of the event loop has a limit on
its input and calls `spend` with the number of items, once a run and not once a message. `counted` lets a test assert
that no step handled more than MOST_AT_ONCE items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Generic, TypeVar

import trio

Item = TypeVar("Item")

AT_ONCE = 1_000  # items in a portion: at about 5 µs each, 5 ms
MOST_AT_ONCE = 10_000  # items between two checkpoints of a task: 50 ms at the same pace


class StepCount:
    """The items that the running task has handled since its last checkpoint, and the most that any task has."""

    __slots__ = ("items", "most")

    def __init__(self) -> None:
        self.items = 0
        self.most = 0


_step = StepCount()


def spend(items: int) -> None:
    """Count items that were, or are about to be, handled without a checkpoint in between. Never blocks."""
    _step.items += items
    if _step.items > _step.most:
        _step.most = _step.items


class Portions(Generic[Item]):
    """What `portions` returns: an async iterator over lists of items."""

    def __init__(self, items: Iterable[Item], size: int) -> None:
        self._items = iter(items)
        self._size = size
        self._begun = False

    def __aiter__(self) -> Portions[Item]:
        return self

    async def __anext__(self) -> list[Item]:
        portion = list(islice(self._items, self._size))
        if not portion:
            raise StopAsyncIteration
        if self._begun:
            await trio.lowlevel.checkpoint()
            _step.items = 0
        self._begun = True
        spend(len(portion))
        return portion


def portions(items: Iterable[Item], size: int = AT_ONCE) -> Portions[Item]:
    """Return the items in lists of at most `size`, for `async for`, with a checkpoint between two lists.

    Other tasks run at a checkpoint, and the caller can be cancelled there: what must be done as a whole is prepared in
    portions and applied afterwards. `items` must not change meanwhile: pass a copy of what others change.
    Items that cost more than a few microseconds each need a smaller `size`.

    Example:
        >>> async for portion in portions(commits):
        ...     checked += [check(commit) for commit in portion]
    """
    return Portions(items, size)


class _StepBoundaries(trio.abc.Instrument):
    """Starts the count anew when a task goes on after a checkpoint."""

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        _step.items = 0


@contextmanager
def counted() -> Iterator[StepCount]:
    """Count exactly while the context is open, from 0 on: for tests. `most` of what it gives is what they assert on.

    It hooks every step of every task of this event loop, which costs; the broker does without it.
    """
    boundaries = _StepBoundaries()
    trio.lowlevel.add_instrument(boundaries)
    _step.items = _step.most = 0
    try:
        yield _step
    finally:
        trio.lowlevel.remove_instrument(boundaries)
