"""Work that blocks, done in threads, and the way back into the event loop.

A pipe wakes the event loop: that is cheaper than a task for every piece of work (docs/STORAGE.md, Group commit).
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio

from qb.storage.commit.completions import Completions

logger = logging.getLogger(__name__)


Job = tuple[Callable[[], Any], Callable[[Any], None]]  # the work, and the callback for its result


class WorkerSlot:
    """Where one thread finds its jobs."""

    __slots__ = ("jobs", "unfinished")

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.unfinished = 0  # how many have been put here whose result has not been delivered

    def put(self, job: Job) -> None:
        self.unfinished += 1
        self.jobs.put(job)


class WriterThreads:
    """A few threads. submit(), deliver() and stop() belong to the event loop.

    Each thread has a slot of its own, and a job goes to the one that has been idle for the shortest time: with little
    to do it is always the same thread, whose caches are warm.
    """

    def __init__(self, name: str, threads: int, completions: Completions) -> None:
        """Handing over results is a step, at the end of which `completions` are run."""
        self._name = name
        self._completions = completions
        self._slots: list[WorkerSlot] = [WorkerSlot() for _ in range(threads)]
        self._idle: list[WorkerSlot] = []
        self._waiting: deque[Job] = deque()  # jobs that found all threads busy
        self._threads: list[threading.Thread] = []
        self._results: deque[tuple[Callable[[Any], None], Any, WorkerSlot]] = deque()
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._awake, False)
        os.set_blocking(self._wake, False)
        self.busy = 0  # pieces of work whose result has not been delivered

    def submit(
        self, work: Callable[[], Any], finished: Callable[[Any], None], behind: WorkerSlot | None = None
    ) -> WorkerSlot | None:
        """Run `work` in a thread, then `finished(its result or its exception)` in the event loop.

        Returns its slot, None if all are busy. Until its result has come, more work can be put `behind` it in that
        slot: that begins when it is done, without asking the event loop.
        """
        self.busy += 1
        slot = behind or (self._idle.pop() if self._idle else None)
        if slot is None:
            self._waiting.append((work, finished))
        else:
            slot.put((work, finished))
        return slot

    @property
    def are_wanted(self) -> bool:
        """Do jobs wait for a slot? Then no log should keep one busy with a second batch."""
        return bool(self._waiting)

    def start(self) -> None:
        """Start the threads."""
        for number, slot in enumerate(self._slots):
            thread = threading.Thread(target=self._work, args=(slot,), name=f"{self._name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
            self._give_next(slot)

    def _give_next(self, slot: WorkerSlot) -> None:
        if self._waiting:
            slot.put(self._waiting.popleft())
        else:
            self._idle.append(slot)

    async def deliver_forever(self) -> None:
        """Hand results over as they come. Cancelling it loses none of them."""
        while True:
            await self.deliver()

    async def deliver(self) -> None:
        """Wait until there are results and hand them over."""
        await trio.lowlevel.wait_readable(self._awake)
        self.hand_over()

    def hand_over(self) -> None:
        """Hand over what has ended. Never blocks."""
        with suppress(BlockingIOError):  # it was handed over already, and the pipe is empty
            os.read(self._awake, 4096)
        with self._completions:
            while self._results:
                self._hand_over(*self._results.popleft())

    @property
    def has_results(self) -> bool:
        """Has anything ended that was not handed over?"""
        return bool(self._results)

    def _hand_over(self, finished: Callable[[Any], None], result: Any, slot: WorkerSlot) -> None:
        self.busy -= 1
        slot.unfinished -= 1
        if not slot.unfinished:
            self._give_next(slot)
        try:
            finished(result)
        except Exception:
            logger.exception("a result could not be handed over")

    def stop(self, patience: float) -> None:
        """End the threads, waiting so long for each that is in the middle of something."""
        for slot in self._slots:
            slot.jobs.put(None)
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

    def _work(self, slot: WorkerSlot) -> None:
        while (job := slot.jobs.get()) is not None:
            work, finished = job
            self._results.append((finished, result_of(work), slot))
            try:
                os.write(self._wake, b"\0")
            except BlockingIOError:
                pass  # the pipe is full of wake-up calls already


def result_of(work: Callable[[], Any]) -> Any:
    """Return what the work returns or raises: its caller decides what that means."""
    try:
        return work()
    except BaseException as error:
        return error
