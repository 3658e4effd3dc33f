"""How tasks wait: the clock, answers, changes. qb.clients.blocking.waiting is the same for threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import inf
from types import TracebackType

import anyio
import anyio.lowlevel

from qb.clients.aio.event_loops.running_loop import LoopHandle, Waiter, running_loop
from qb.clients.quick_lock import QuickLock

checkpoint = anyio.lowlevel.checkpoint  # let other tasks run


def now() -> float:
    """Return seconds on a clock that never goes back: that of the event loop."""
    return running_loop().now()


class AsyncAnswers:
    """Counts answers; one task at a time waits for them. Released once for each batch that is answered."""

    __slots__ = ("_count", "_waiter")

    def __init__(self) -> None:
        self._count = 0
        self._waiter: Waiter | None = None

    def release(self) -> None:
        """There is one more."""
        self._count += 1
        if self._waiter is not None:
            self._waiter.wake()

    async def take(self, seconds: float) -> bool:
        """Take one; False if none comes within so many seconds."""
        if not self._count:
            self._waiter = running_loop().waiter()
            try:
                await self._waiter.wait(seconds)
            finally:
                self._waiter = None
        if not self._count:
            return False
        self._count -= 1
        return True


def one_answer() -> AsyncAnswers:
    """Return what waits for a single answer."""
    return AsyncAnswers()


def many_answers() -> AsyncAnswers:
    """Return what counts any number of answers."""
    return AsyncAnswers()


async def wait_for_answer(answers: AsyncAnswers, seconds: float) -> bool:
    """Take one answer; False if none comes within so many seconds."""
    return await answers.take(seconds)


def shielded() -> AbstractContextManager[object]:
    """Return a block that a cancellation of the caller does not reach."""
    return anyio.CancelScope(shield=True)


class AsyncGuard:
    """Guards state that several tasks use, and wakes tasks that wait for it to change.

    To enter the `with` block costs nothing: tasks take turns only where they await, and no block awaits halfway through
    a change.
    """

    def __init__(self) -> None:
        self.lock = QuickLock()  # for code that is shared with threads: never contended, and not entered by the block
        self._waiting: list[Waiter] = []
        self._loop: LoopHandle | None = None  # which runs the tasks that wait

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def notify_all(self) -> None:
        """Wake every task that waits here."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter.wake()

    def notify_soon(self) -> None:
        """As notify_all(), from any thread and from signal handlers."""
        if self._loop is not None:
            self._loop.call_soon(self.notify_all)

    async def wait(self, seconds: float = inf) -> None:
        """Wait for a notification, or so many seconds."""
        waiter, self._loop = running_loop().waiter(), running_loop().handle()
        self._waiting.append(waiter)
        try:
            await waiter.wait(seconds)
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    async def wait_for(self, condition: Callable[[], object], seconds: float = inf) -> bool:
        """Wait until the condition holds, or so many seconds; return whether it does."""
        deadline = now() + seconds
        while not (holds := condition()) and (left := deadline - now()) > 0:
            await self.wait(left)
        return bool(holds)


class AsyncTurn:
    """The right to do something that one task does at a time, in the order in which they asked.

    A task that holds it may let another one release it. A turn that is free is taken without waiting, but not by a task
    that is cancelled.
    """

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[Waiter] = deque()

    async def acquire(self) -> None:
        """Return when it is the caller's turn."""
        await running_loop().notice_cancellation()
        if not self._taken:
            self._taken = True
            return
        waiter = running_loop().waiter()
        self._waiting.append(waiter)
        try:
            await waiter.wait(inf)
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self.release()  # it was given to this task, which cannot use it
            raise

    def release(self) -> None:
        """Pass it on to the task that waits longest."""
        if self._waiting:
            self._waiting.popleft().wake()
        else:
            self._taken = False

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
