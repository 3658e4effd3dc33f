"""How threads wait: the clock, answers, changes. qb.clients.aio.waiting is the same for tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import inf
from time import monotonic
from types import TracebackType
from typing import Protocol

from qb.clients.quick_lock import QuickLock

now = monotonic  # seconds on a clock that never goes back


class Answers(Protocol):
    """A lock or a semaphore that is released once for each batch that is answered."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool: ...

    def release(self) -> None: ...


def one_answer() -> Answers:
    """Return what waits for a single answer; quicker than a semaphore."""
    answer = threading.Lock()
    answer.acquire()
    return answer


def many_answers() -> Answers:
    """Return what counts any number of answers."""
    return threading.Semaphore(0)


def wait_for_answer(answers: Answers, seconds: float) -> bool:
    """Take one answer; False if none comes within so many seconds."""
    return answers.acquire(timeout=max(seconds, 0))


def checkpoint() -> None:
    """Let others run: threads do by themselves."""


def shielded() -> AbstractContextManager[None]:
    """Return a block that a cancellation of the caller does not reach: threads are not cancelled."""
    return nullcontext()


class Guard:
    """Guards state that several threads use, and wakes threads that wait for it to change.

    All but notify_soon() and the `with` block are called inside the block.
    """

    def __init__(self) -> None:
        self.lock = QuickLock()  # what the block takes
        self._changed = threading.Condition(self.lock)  # type: ignore[arg-type]  # which takes whatever has its methods
        self._enter, self._exit = self.lock.get, self.lock.put
        self.notify_all = self._changed.notify_all  # wakes every thread that waits here

    def __enter__(self) -> None:
        self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._exit(None)

    def notify_soon(self) -> None:
        """As notify_all(), from anywhere: a signal handler must not wait for the lock."""
        threading.Thread(target=self._notify, name="qb notifies").start()

    def _notify(self) -> None:
        with self:
            self.notify_all()

    def wait(self, seconds: float = inf) -> None:
        """Wait for a notification, or so many seconds."""
        self._changed.wait(None if seconds == inf else max(seconds, 0))

    def wait_for(self, condition: Callable[[], object], seconds: float = inf) -> bool:
        """Wait until the condition holds, or so many seconds; return whether it does."""
        return bool(self._changed.wait_for(condition, None if seconds == inf else max(seconds, 0)))
