"""Threads that run handlers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from qb.clients.blocking.background import Background
from qb.clients.protocol.forking import call_in_child


class HandlerWork(Protocol):
    """A subscriber that has messages to handle."""

    def work(self) -> bool:
        """Handle some of them; False if there are none."""

    def given_to(self, threads: int) -> None:
        """Messages go to a pool of so many threads. Does not block."""

    def read_until(self, has_work: Callable[[], bool]) -> None:
        """Read the connection in place of its own thread, which is left to it, until there is work."""

    def send_urgent(self) -> None:
        """Send what the broker must know before handlers of other subscribers start."""

    def fail(self, error: BaseException) -> None:
        """One of these has raised, which they should not."""


class MessageSink(Protocol):
    """Is notified when a subscriber has messages."""

    def call(self, work: HandlerWork, workers: int) -> None:
        """There is work for up to so many threads. Does not block."""

    def stop(self) -> None:
        """There will be none any more."""


class HandlerPool:
    """A fixed number of threads, shared fairly by the subscribers that have work. They start when there is some.

    A thread that is the only one reads the connection itself while it is idle: the next message needs no change of
    threads then.
    """

    def __init__(self, size: int, name: str, background: Background) -> None:
        self._size, self._name, self._background = size, name, background
        self._queue: SimpleQueue[HandlerWork | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._started = 0  # threads
        self._disbanded = False  # in a child of fork(): a thread whose handler forked ends when the handler returns
        call_in_child(self, HandlerPool._disband)

    def _disband(self) -> None:
        self._disbanded = True

    def call(self, work: HandlerWork, workers: int) -> None:
        """There is work for up to so many threads. Does not block."""
        if not self._started:
            self._start()
        work.given_to(self._size)
        for _ in range(min(workers, self._size)):
            self._queue.put(work)

    def _start(self) -> None:
        with self._starting:
            while self._started < self._size:
                self._started += 1
                self._background.start(f"{self._name} {self._started}", self._run)

    def stop(self) -> None:
        """There is no more work of one subscriber: nothing to do, a thread that finds none waits."""

    def dismiss(self) -> None:
        """Let each thread end when it has done what it was called for."""
        for _ in range(self._started):
            self._queue.put(None)
        self._started = 0

    def _run(self) -> None:
        while not self._disbanded and (work := self._queue.get()) is not None:
            try:
                self._serve(work)
            except BaseException as error:  # a thread that dies in silence would be worse
                work.fail(error)

    def _serve(self, work: HandlerWork) -> None:
        while work.work():
            if not self._queue.empty():
                work.send_urgent()
                self._queue.put(work)
                return
        if self._size == 1:
            work.read_until(self._has_work)

    def _has_work(self) -> bool:
        return not self._queue.empty()
