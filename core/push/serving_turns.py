"""Which calls the deliveries make in this pass of the event loop, and which wait for the next ones."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

import trio

from qb.core.pacing import Turn

Result = TypeVar("Result")


class ServingTurns:
    """Calls that have to wait, the oldest first: in each pass of the event loop as many as a turn has time for.

    A round of one subscription is short, and one publish may cause rounds of thousands. As long as the pass is young
    and nothing waits, a call is made at once. Else it waits behind the others. Subscriptions that read a backlog wait
    behind those that are near the end of their logs; each turn makes one of their calls at least.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, Callable[[Turn], None]] = {}
        self._behind: dict[Hashable, Callable[[Turn], None]] = {}  # of subscriptions that read a backlog
        self._wake = trio.Event()
        self._ended = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._behind)

    def this_pass(self, *, behind: bool = False) -> Turn | None:
        """Return what is left of this pass for a call that is made at once; None: it has to wait.

        Only one for a subscription that reads a backlog (`behind`) waits for others that do.
        """
        if self._ended:
            return Turn()
        if self._waiting or (behind and self._behind) or (turn := Turn.of_this_pass()).is_over:
            return None
        return turn

    def add(self, owner: Hashable, call: Callable[[Turn], None], *, behind: bool = False) -> None:
        """Have a call made in turn, which raises nothing; one that waits for this owner keeps its place."""
        if owner not in self._waiting and owner not in self._behind:
            (self._behind if behind else self._waiting)[owner] = call
        self._wake.set()

    def discard(self, owner: Hashable) -> None:
        """Make no call for this owner."""
        self._waiting.pop(owner, None)
        self._behind.pop(owner, None)

    async def call(self, call: Callable[[], Result], *, behind: bool = False) -> Result:
        """Make a call at once or in turn, and return what it returns. Raises what it raises.

        If the caller is cancelled while it waits, the call is not made.
        """
        if self.this_pass(behind=behind) is not None:
            return call()
        waiting = _WaitingCall(call)
        self.add(waiting, waiting.make, behind=behind)
        try:
            await waiting.made.wait()
        finally:
            self.discard(waiting)
        return waiting.result()

    def make_calls(self) -> None:
        """Make calls until a turn is over: at least one of each kind, if one waits. Never blocks."""
        turn = Turn()
        for calls in (self._waiting, self._behind):
            while calls:
                calls.pop(next(iter(calls)))(turn)
                if turn.is_over:
                    break

    def end(self) -> None:
        """make_calls() is not called any more: tasks that wait go on now, and later calls are made at once."""
        self._ended = True
        waiting = self._waiting | self._behind
        self._waiting, self._behind = {}, {}
        for owner, call in waiting.items():
            if isinstance(owner, _WaitingCall):
                call(Turn())

    async def wait(self, deadline: float) -> None:
        """Return in a later pass of the event loop: when a call waits, wake() was called, or the deadline is over."""
        if len(self):
            await trio.lowlevel.checkpoint()
        else:
            with trio.move_on_at(deadline):
                await self._wake.wait()
        self._wake = trio.Event()

    def wake(self) -> None:
        """End wait(): its deadline has become an earlier one."""
        self._wake.set()


class _WaitingCall(Generic[Result]):
    """A call for which a task waits."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call = call
        self.made = trio.Event()
        self.result: Callable[[], Result]

    def make(self, turn: Turn) -> None:
        try:
            self.result = partial(_returned, self._call())
        except Exception as error:
            self.result = partial(_raised, error)
        self.made.set()


def _returned(value: Result) -> Result:
    return value


def _raised(error: Exception) -> Result:  # type: ignore[type-var]
    raise error
