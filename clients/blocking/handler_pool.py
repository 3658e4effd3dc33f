"""Threads that run handlers."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Protocol

from qb.clients.protocol.forking import call_in_child


class HandlerWork(Protocol):
    """Somebody who has messages to handle."""

    def work(self) -> bool:
        """Handle some of them; False if there are none."""

    def speak(self) -> None:
        """Say what must be said before anybody else's handlers start."""

    def fail(self, error: BaseException) -> None:
        """One of these has raised, which they should not."""


class HandlerPool:
    """A fixed number of threads, shared fairly by those who have work. They start when there is some."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._queue: SimpleQueue[HandlerWork | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._disbanded = False  # in a child of fork(): a thread whose handler forked ends when the handler returns
        call_in_child(self, HandlerPool._disband)

    def _disband(self) -> None:
        self._disbanded = True

    def call(self, work: HandlerWork, hands: int) -> None:
        """There is work for up to so many threads. Does not block."""
        if not self._threads:
            self._start()
        for _ in range(min(hands, self._size)):
            self._queue.put(work)

    def _start(self) -> None:
        with self._starting:
            for number in range(len(self._threads) + 1, self._size + 1):
                thread = threading.Thread(target=self._run, name=f"{self._name} {number}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def dismiss(self) -> None:
        """Let each thread end when it has done what it was called for."""
        for _ in self._threads:
            self._queue.put(None)
        self._threads = []

    def _run(self) -> None:
        while not self._disbanded and (work := self._queue.get()) is not None:
            try:
                self._serve(work)
            except BaseException as error:  # a thread that dies in silence would be worse
                work.fail(error)

    def _serve(self, work: HandlerWork) -> None:
        while work.work():
            if not self._queue.empty():
                work.speak()
                self._queue.put(work)
                return
