"""pyspark_qb.fetches: a range of messages from a broker, the next ones asked for while these are handled.

May import: clients.errors, clients.fetching, clients.pulling, pyspark_qb.errors, pyspark_qb.offsets,
the standard library.
Never: pyspark, numpy, pyarrow.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

from clients.errors import ConnectionLost, OffsetOutOfRange
from clients.fetching import RawFetched, Wanted
from clients.pulling import Pulling
from pyspark_qb.errors import DataLost
from pyspark_qb.offsets import Range

AHEAD = 3  # fetches on their way at once
FETCH_BYTES = 1 << 20  # about what one of them brings
MOST_BYTES = 5 * FETCH_BYTES // 4  # and at most, where messages are longer than those before
MOST_MESSAGES = 100_000  # the broker gives no more in one answer
LOSSES = 3  # connections lost in a row while one answer is waited for are a failure

log = logging.getLogger("pyspark_qb")
T = TypeVar("T")


def again_if_lost(ask: Callable[[], T]) -> T:
    """Return what `ask` returns: it is called again when the connection is lost meanwhile, up to LOSSES times."""
    for _ in range(LOSSES):
        try:
            return ask()
        except ConnectionLost:
            pass  # the next call waits for a new one, or raises BrokerUnavailable
    return ask()


class _Asked(NamedTuple):
    """A fetch on its way, for the messages from `start` up to `end`."""

    start: int
    end: int
    answer: Callable[[], RawFetched]


class Fetches:
    """The messages of a range, in order. Iterating blocks, and raises what BrokerClient.fetch() does, or DataLost.

    A lost connection is no failure: what had been asked for is asked for again.
    """

    def __init__(self, client: Pulling, range: Range, *, fail_on_data_loss: bool) -> None:
        self._client, self._range, self._fail = client, range, fail_on_data_loss
        self._asked: deque[_Asked] = deque()
        self._messages = 0  # how many make FETCH_BYTES, as far as is known

    def __iter__(self) -> Iterator[RawFetched]:
        at, end = self._range.start, self._range.end
        while at < end:
            try:
                got = again_if_lost(partial(self._next, at))
            except OffsetOutOfRange as gone:
                at = self._after_loss(at, gone.first)
                continue
            if not got.count:
                self._after_loss(at, None)
                return
            yield got
            at = got.next_offset

    def _next(self, at: int) -> RawFetched:
        """Return the messages from `at` on."""
        try:
            self._ask_ahead(at)
            got = self._asked.popleft().answer()
        except ConnectionLost:
            self._asked.clear()
            raise
        if got.count:
            average = len(got.frames) / got.count
            self._messages = max(1, min(int(FETCH_BYTES / average), MOST_MESSAGES))
        return got

    def _ask_ahead(self, at: int) -> None:
        """Have fetches on their way; one alone until it is known how long the messages are."""
        if self._asked and self._asked[0].start > at:  # an answer was shorter than asked for: messages have grown
            self._asked.appendleft(self._ask(at, self._asked[0].start))
        depth = AHEAD if self._messages else 1
        while len(self._asked) < depth and (start := self._asked[-1].end if self._asked else at) < self._range.end:
            self._asked.append(self._ask(start, min(start + (self._messages or MOST_MESSAGES), self._range.end)))

    def _ask(self, start: int, end: int) -> _Asked:
        topic, partition = self._range.partition
        most = MOST_BYTES if self._messages else FETCH_BYTES
        wanted = Wanted(topic, partition, start, max_messages=min(end - start, MOST_MESSAGES), max_bytes=most)
        return _Asked(start, end, self._client.begin_fetch(wanted))

    def _after_loss(self, at: int, first: int | None) -> int:
        """Return where to go on when what is at `at` is not there any more. Raises DataLost."""
        partition, _, end = self._range
        to = end if first is None else min(first, end)
        text = f"messages {at} to {to - 1} of {partition} are gone: they were dropped before they were read"
        if self._fail:
            raise DataLost(f'{text}; option("failOnDataLoss", "false") goes on without them')
        log.warning("%s", text)
        self._asked.clear()
        return to
