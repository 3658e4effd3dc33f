"""Fetches sent before they are asked for, while a caller reads a partition from end to end.

Stored messages do not change, so what was fetched a moment ago is what a fetch would bring now, as long as there is any
of it. An answer without messages, or a refusal, is thrown away and asked for again. Any thread may call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from qb.clients.aio.link import AsyncLink, AsyncPendingCall
from qb.clients.aio.waiting import now
from qb.clients.protocol.client_errors import QBError
from qb.clients.protocol.fetch_requests import FetchRequest, count_in
from qb.core.wire.frames import Frame

T = TypeVar("T")
MOST = 16  # partitions that are read at the same time


class AsyncAheadFetch(NamedTuple):
    """A fetch that is on its way for the next call."""

    wanted: FetchRequest
    call: AsyncPendingCall


class AsyncReadAhead:
    """Knows which partitions are read on from where the last fetch ended, and asks for what comes next."""

    def __init__(self, link: AsyncLink, begin: Callable[[FetchRequest, float], Awaitable[AsyncPendingCall]]) -> None:
        self._link, self._begin = link, begin
        self._expected: dict[tuple[str, int], int] = {}  # where the last fetch ended
        self._ahead: dict[tuple[str, int], AsyncAheadFetch] = {}

    async def take(self, wanted: FetchRequest, deadline: float) -> Frame | None:
        """Return the answer that was asked for ahead, if it is the one that is wanted."""
        ahead = self._ahead.pop((wanted.topic, wanted.partition), None)
        if ahead is None:
            return None
        if ahead.wanted != _at_once(wanted) or wanted.min_bytes > 1:
            self._link.forget(ahead.call)
            return None
        try:
            answer = await self._link.answer(ahead.call, deadline)
        except QBError:
            return None
        return answer if count_in(answer) else None

    async def go_on(self, wanted: FetchRequest, next_offset: int) -> None:
        """A fetch has ended at `next_offset`: if it began where another one had, ask for the one that will follow.

        The caller has its messages: nothing is asked for if that would mean to wait, for a connection or for room.
        """
        where = wanted.topic, wanted.partition
        goes_on = self._expected.pop(where, None) == wanted.offset
        self._expected[where] = next_offset
        _drop_oldest(self._expected)
        if goes_on and next_offset > wanted.offset:
            following = _at_once(wanted)._replace(offset=next_offset)
            try:
                self._ahead[where] = AsyncAheadFetch(following, await self._begin(following, now()))
            except QBError:
                pass  # the next fetch raises it
        for stale in _drop_oldest(self._ahead):
            self._link.forget(stale.call)


def _drop_oldest(entries: dict[tuple[str, int], T]) -> list[T]:
    """Keep the newest ones; returns the others."""
    oldest = list(entries)[:-MOST]
    return [entries.pop(where) for where in oldest]


def _at_once(wanted: FetchRequest) -> FetchRequest:
    return wanted._replace(max_wait=0.0, min_bytes=1)
