"""A range of messages from a broker, the next ones asked for while these are handled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TypeVar

from pyspark_qb.options.spark_errors import DataLost
from pyspark_qb.read.query_offsets import OffsetRange
from qb.clients.blocking.methods.offsets_and_groups import OffsetAndGroupMethods
from qb.clients.protocol.client_errors import ConnectionLost, OffsetOutOfRange, QBError
from qb.clients.protocol.fetch_requests import BulkFetchRequest, RawFetched

FETCH_BYTES = 2 << 20  # of whole batches, about what one fetch brings
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


class Fetches:
    """The messages of a range, in order. Iterating blocks, and raises what BrokerClient.fetch() does, or DataLost.

    Batches come as a whole, so that there may be others before the first message and behind the last. A lost connection
    is no failure: what had been asked for is asked for again.
    """

    def __init__(self, client: OffsetAndGroupMethods, range: OffsetRange, *, fail_on_data_loss: bool) -> None:
        self._client, self._range, self._fail = client, range, fail_on_data_loss
        self._ahead: Callable[[], RawFetched] | None = None  # the answer to what is asked for next

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
            at = got.next_offset
            if at < end:
                with suppress(QBError):  # then it is asked for when its turn has come
                    self._ahead = self._ask(at)
            yield got

    def _next(self, at: int) -> RawFetched:
        """Return the messages from `at` on."""
        answer, self._ahead = self._ahead or self._ask(at), None
        return answer()

    def _ask(self, at: int) -> Callable[[], RawFetched]:
        return self._client.begin_fetch(BulkFetchRequest(*self._range.partition, at, FETCH_BYTES))

    def _after_loss(self, at: int, first: int | None) -> int:
        """Return where to go on when what is at `at` is not there any more. Raises DataLost."""
        partition, _, end = self._range
        to = end if first is None else min(first, end)
        text = f"messages {at} to {to - 1} of {partition} are gone: they were dropped before they were read"
        if self._fail:
            raise DataLost(f'{text}; option("failOnDataLoss", "false") goes on without them')
        log.warning("%s", text)
        return to
