"""Answers and notifications that storage owes its callers, run after storage has finished its own step.

Storage never calls its users from the middle of its work. It queues the call, and the queue is run at the end of the
step: a block of appends (CommitSteps), the results of writer threads (WriterThreads), or, for what happens outside of
these, a turn of the event loop of its own. So no stack passes through storage twice.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import perf_counter

import trio

logger = logging.getLogger(__name__)

TURN = 0.015  # seconds after which the queue goes on in another turn of the event loop

# Called once in the event loop. What it returns is called when all completions of the same step have been called: all
# answers are made first and sent then, which is quicker than one after the other.
Completion = Callable[[], Callable[[], None] | None]


class Watchers:
    """The callbacks that want to know when the visible end of one log has moved."""

    __slots__ = ("_callbacks",)

    def __init__(self) -> None:
        self._callbacks: dict[object, Callable[[], None]] = {}

    def add(self, moved: Callable[[], None]) -> Callable[[], None]:
        """Add a callback; returns what removes it again. A removed callback is not called any more."""
        token = object()
        self._callbacks[token] = moved

        def stop() -> None:
            self._callbacks.pop(token, None)

        return stop

    def call(self) -> None:
        """Call those that are there now. A failure of one is logged and does not concern the others."""
        for moved in list(self._callbacks.values()):
            try:
                moved()
            except Exception:
                logger.exception("a watcher of a log failed")


class Completions:
    """The queue. All methods belong to the event loop's thread.

    `with completions: ...` is a step of storage: nothing may be awaited in it, and what was queued in it is run at its
    end. Steps may be nested; only the end of the outermost runs the queue. A completion may call storage: what that
    queues is run when the completions before it have returned, never nested in them.
    """

    def __init__(self) -> None:
        self._due: deque[Completion] = deque()
        self._moved: dict[Watchers, None] = {}
        self._depth = 0  # of steps, and of the queue's own run

    def add(self, completion: Completion) -> None:
        """Queue an answer."""
        if not self._depth:
            self._run_soon()
        self._due.append(completion)

    def notify(self, watchers: Watchers) -> None:
        """Queue a notification, behind the answers of one turn; one that is queued already is not queued twice."""
        if not self._depth:
            self._run_soon()
        self._moved[watchers] = None

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1:
                self._run()
        finally:
            self._depth -= 1

    def _run_soon(self) -> None:
        """Run the queue in a turn of the event loop of its own."""
        trio.lowlevel.current_trio_token().run_sync_soon(self._run_alone, idempotent=True)

    def _run_alone(self) -> None:
        with self:
            pass

    def _run(self) -> None:
        """Run the queue: answers are made, answers are sent, watchers are notified. What takes long goes on later."""
        gives_way = perf_counter() + TURN
        while self._due or self._moved:
            for send in self._make_answers(gives_way):
                _call(send)
            while self._moved:  # one at least, however long the answers took
                watchers = next(iter(self._moved))
                del self._moved[watchers]
                watchers.call()
                if self._due or perf_counter() > gives_way:
                    break
            if perf_counter() > gives_way and (self._due or self._moved):
                self._run_soon()
                return

    def _make_answers(self, gives_way: float) -> list[Callable[[], None]]:
        """Call what is queued, until that has taken too long; returns what the completions want to have called then."""
        sends = []
        while self._due:
            send = _call(self._due.popleft())
            if send is not None:
                sends.append(send)
            if perf_counter() > gives_way:
                break
        return sends


def _call(completion: Completion) -> Callable[[], None] | None:
    try:
        return completion()
    except Exception:
        logger.exception("a completion failed")
        return None
