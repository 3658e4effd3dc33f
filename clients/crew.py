"""clients.crew: threads that run handlers.

May import: clients.forking, the standard library.
Never: sockets, trio.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Protocol

from clients.forking import call_in_child


class Work(Protocol):
    """Somebody who has messages to handle."""

    def work(self) -> bool:
        """Handle some of them; False if there are none."""

    def speak(self) -> None:
        """Say what must be said before anybody else's handlers start."""

    def fail(self, error: BaseException) -> None:
        """One of these has raised, which they should not."""


class Crew:
    """A fixed number of threads, shared fairly by those who have work. They start when there is some."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._disbanded = False  # in a child of fork(): a thread whose handler forked ends when the handler returns
        call_in_child(self, Crew._disband)

    def _disband(self) -> None:
        self._disbanded = True

    def call(self, work: Work, hands: int) -> None:
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

    def _serve(self, work: Work) -> None:
        while work.work():
            if not self._queue.empty():
                work.speak()
                self._queue.put(work)
                return
