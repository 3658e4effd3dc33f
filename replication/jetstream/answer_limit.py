"""Gives requests up that are not answered in time, with one timer for all of them."""

from __future__ import annotations

from collections.abc import Callable

import trio

from qb.replication.journal.journal_store import Timers


class AnswerLimit:
    """Requests in the order in which they were sent. Belongs to the event loop's thread."""

    def __init__(self, timers: Timers, seconds: float) -> None:
        self._timers, self._seconds = timers, seconds
        self._open: dict[str, tuple[float, Callable[[], None]]] = {}  # by token: when it is given up, and how
        self._is_waiting = False

    def add(self, token: str, give_up: Callable[[], None]) -> None:
        """A request was sent: `give_up` is called in time, unless it is answered before."""
        self._open[token] = trio.current_time() + self._seconds, give_up
        self._wait()

    def answered(self, token: str) -> None:
        """A request is not open any more."""
        self._open.pop(token, None)

    def _wait(self) -> None:
        if self._open and not self._is_waiting:
            self._is_waiting = True
            due, _ = next(iter(self._open.values()))
            self._timers.call_later(max(0.0, due - trio.current_time()), self._look)

    def _look(self) -> None:
        self._is_waiting = False
        now = trio.current_time()
        overdue = [token for token, (due, _) in self._open.items() if due <= now]
        for token in overdue:
            if found := self._open.pop(token, None):
                found[1]()
        self._wait()
