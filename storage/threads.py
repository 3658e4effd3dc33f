"""storage.threads: work that blocks, done in threads, and the way back into the event loop.

May import: trio, the standard library.
Never: files that hold messages, or what the work is about.

A pipe wakes the event loop: that is cheaper than a task for every piece of work (docs/STORAGE.md, Group commit).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

logger = logging.getLogger(__name__)


class Workers:
    """A few threads. submit(), deliver() and stop() belong to the event loop."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._count = threads
        self._threads: list[threading.Thread] = []
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._results: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(self._wake, False)
        self.busy = 0  # pieces of work whose result has not been delivered

    def submit(self, work: Callable[[], Any], finished: Callable[[Any], None]) -> None:
        """Run `work` in a thread, then `finished(its result or its exception)` in the event loop."""
        self.busy += 1
        self._jobs.put((work, finished))

    def start(self) -> None:
        """Start the threads."""
        for number in range(self._count):
            thread = threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    async def deliver_forever(self) -> None:
        """Hand results over as they come. Cancelling it loses none of them."""
        while True:
            await self.deliver()

    async def deliver(self) -> None:
        """Wait until there are results and hand them over."""
        await trio.lowlevel.wait_readable(self._awake)
        os.read(self._awake, 4096)
        while self._results:
            finished, result = self._results.popleft()
            self.busy -= 1
            try:
                finished(result)
            except Exception:
                logger.exception("a result could not be handed over")

    def stop(self, patience: float) -> None:
        """End the threads, waiting so long for each that is in the middle of something."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(patience)

    @property
    def is_stuck(self) -> bool:
        """Whether a thread is still in the middle of something after stop()."""
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Release the pipe, unless a stuck thread may yet write to it: the number might be another file's by then."""
        if not self.is_stuck:
            os.close(self._awake)
            os.close(self._wake)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, finished = job
            try:
                result = work()
            except BaseException as error:  # whoever waits for the result decides what it means
                result = error
            self._results.append((finished, result))
            try:
                os.write(self._wake, b"\0")
            except BlockingIOError:
                pass  # the pipe is full of wake-up calls already
