"""Loops over what a peer sent: bounded portions with checkpoints between them, and a count of the items.

One request may name a hundred thousand things. A loop over them that never awaits holds the event loop, and with it all
other peers. Code that can await uses `portions`; code that must finish within one step of the event loop has a limit on
its input and calls `spend` with the number of items, once a run and not once a message. Code that can stop between two
items and go on in a later step asks `must_give_way`, or has a `Turn` of its own in each pass. `counted` lets a test
assert that no step handled more than MOST_AT_ONCE items. `working_on` says what the loop works on, for the log if it is
held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from math import inf
from time import perf_counter
from typing import Generic, TypeVar

import trio

Item = TypeVar("Item")

AT_ONCE = 1_000  # items in a portion: at about 5 µs each, 5 ms
TURN = 0.015  # seconds of a pass of the event loop after which what can go on later gives way
# Seconds of a turn while peers wait to be read. What they may bring in a pass takes about as long: so what is sent to
# the broker and what it delivers have equal parts of its time.
SHARED_TURN = 0.002
MOST_AT_ONCE = 10_000  # items between two checkpoints of a task: 50 ms at the same pace


def _none_wait() -> bool:
    return False


class CurrentWork:
    """What the event loop does now: the items that the running task has handled, and on whose behalf."""

    __slots__ = (
        "_longest",
        "_longest_name",
        "_name",
        "_since",
        "items",
        "most",
        "new_pass",
        "pass_began",
        "peers_wait",
    )

    def __init__(self) -> None:
        self.items = 0  # since the last checkpoint of the task that runs
        self.most = 0  # of any task
        self.new_pass: float | None = None  # when the loop began to run what was ready, if nothing was begun since
        self.pass_began = inf  # on perf_counter(), if the passes are measured
        self.peers_wait: Callable[[], bool] = _none_wait  # is there something to read from one of them?
        self._longest = self._since = 0.0
        self._longest_name: tuple[object, ...] = ()
        self._name: tuple[object, ...] = ()

    def begin(self, name: tuple[object, ...], now: float) -> None:
        """From now on the loop works on this, until the next call."""
        if self.new_pass is not None:
            self._longest, self._since, self.new_pass = 0.0, self.new_pass, None
            self._longest_name = self._name = ()
        if now - self._since > self._longest:
            self._longest, self._longest_name = now - self._since, self._name
        self._since, self._name = now, name

    def longest(self, now: float) -> tuple[float, str]:
        """Return how long what took longest in this pass took, and its name."""
        self.begin((), now)
        return self._longest, " ".join(str(part) for part in self._longest_name) or "work without a name"

    @property
    def name(self) -> tuple[object, ...]:
        return self._name


current = CurrentWork()


def working_on(*name: object) -> None:
    """Say what the event loop works on from now on: `working_on(session, "REQUEST", method)`. Never blocks.

    If the loop is held, the log names what took longest. The parts are turned into text only then.
    """
    current.begin(name, perf_counter())


def spend(items: int) -> None:
    """Count items that were, or are about to be, handled without a checkpoint in between. Never blocks."""
    current.items += items
    if current.items > current.most:
        current.most = current.items


def must_give_way() -> bool:
    """Say whether this pass of the event loop has lasted so long that what can go on later should. Never blocks."""
    return perf_counter() - current.pass_began > TURN


class Turn:
    """The time for which work of many parts that can go on later holds one pass of the event loop."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        """Begin one now."""
        self._began = perf_counter()

    @classmethod
    def of_this_pass(cls) -> Turn:
        """Return the one that began with the pass; if passes are not measured, it is never over."""
        turn = cls.__new__(cls)
        turn._began = current.pass_began
        return turn

    @property
    def is_over(self) -> bool:
        """True if the rest should go on in a later pass."""
        return is_over(perf_counter() - self._began, current.peers_wait)


def is_over(seconds: float, peers_wait: Callable[[], bool]) -> bool:
    """Return whether a turn that has lasted so long ends: sooner if peers wait to be read. Pure.

    They are looked for only when that decides.
    """
    return seconds > TURN or (seconds > SHARED_TURN and peers_wait())


@contextmanager
def asking(peers_wait: Callable[[], bool]) -> Iterator[None]:
    """Have turns ask this whether peers wait to be read, until the context is left."""
    current.peers_wait = peers_wait
    try:
        yield
    finally:
        current.peers_wait = _none_wait


class Portions(Generic[Item]):
    """What `portions` returns: an async iterator over lists of items."""

    def __init__(self, items: Iterable[Item], size: int) -> None:
        self._items = iter(items)
        self._size = size
        self._begun = False
        self._name = current.name

    def __aiter__(self) -> Portions[Item]:
        return self

    async def __anext__(self) -> list[Item]:
        portion = list(islice(self._items, self._size))
        if not portion:
            raise StopAsyncIteration
        if self._begun:
            await trio.lowlevel.checkpoint()
            current.items = 0
            working_on(*self._name)
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
        current.items = 0


@contextmanager
def counted() -> Iterator[CurrentWork]:
    """Count exactly while the context is open, from 0 on: for tests. `most` of what it gives is what they assert on.

    It hooks every step of every task of this event loop, which costs; the broker does without it.
    """
    boundaries = _StepBoundaries()
    trio.lowlevel.add_instrument(boundaries)
    current.items = current.most = 0
    try:
        yield current
    finally:
        trio.lowlevel.remove_instrument(boundaries)
