"""How tasks wait: the clock, answers, changes. qb.clients.blocking.waiting is the same for threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf
from types import TracebackType

import trio

now = trio.current_time  # seconds on a clock that never goes back
checkpoint = trio.lowlevel.checkpoint  # let other tasks run

Answers = trio.Semaphore  # released once for each batch that is answered


def one_answer() -> Answers:
    """Return what waits for a single answer."""
    return trio.Semaphore(0)


def many_answers() -> Answers:
    """Return what counts any number of answers."""
    return trio.Semaphore(0)


async def wait_for_answer(answers: Answers, seconds: float) -> bool:
    """Take one answer; False if none comes within so many seconds."""
    with trio.move_on_after(seconds) as waiting:
        await answers.acquire()
    return not waiting.cancelled_caught


def shielded() -> AbstractContextManager[object]:
    """Return a block that a cancellation of the caller does not reach."""
    return trio.CancelScope(shield=True)


class AsyncGuard:
    """Guards state that several tasks use, and wakes tasks that wait for it to change.

    To enter the `with` block costs nothing: tasks take turns only where they await, and no block awaits halfway through
    a change.
    """

    def __init__(self) -> None:
        self._waiting = trio.lowlevel.ParkingLot()

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def notify_all(self) -> None:
        """Wake every task that waits here."""
        self._waiting.unpark_all()

    def notify_soon(self) -> None:
        """As notify_all(), from anywhere in the thread that runs the tasks."""
        self._waiting.unpark_all()

    async def wait(self, seconds: float = inf) -> None:
        """Wait for a notification, or so many seconds."""
        with trio.move_on_after(max(seconds, 0)):
            await self._waiting.park()

    async def wait_for(self, condition: Callable[[], object], seconds: float = inf) -> bool:
        """Wait until the condition holds, or so many seconds; return whether it does."""
        with trio.move_on_after(max(seconds, 0)):
            while not condition():
                await self._waiting.park()
        return bool(condition())
