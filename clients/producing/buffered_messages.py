"""The messages of a producer from send() until they are finished, bounded in bytes."""

from __future__ import annotations

from collections import deque
from typing import Any

from qb.clients.producing.producer_options import ProducerOptions
from qb.clients.producing.send_batch import SendBatch, messages_are
from qb.clients.producing.send_queue import SendQueue
from qb.clients.protocol.client_errors import BufferFull, PublishFailed, PublishUncertain

FAILURES_KEPT = 1000  # batches whose failure flush() may have to report


class BufferedMessages:
    """The batch that is being filled, and those behind it. All of it is used with the lock held."""

    def __init__(self, topic: str, options: ProducerOptions, lock: Any) -> None:
        self.lock, self.queue = lock, SendQueue(options)
        self.filling: SendBatch | None = None  # takes messages
        self.closed = False
        self.last_batch = 0  # its number
        self.free = options.max_buffered_bytes
        self._topic, self._options = topic, options
        self._unfinished: dict[int, SendBatch] = {}  # by number, in order
        self._failures: deque[SendBatch] = deque(maxlen=FAILURES_KEPT)

    @property
    def has_room(self) -> bool:
        """May a batch be begun? It is filled at least with one message, however long that is."""
        return self.free > 0

    @property
    def size(self) -> int:
        """Bytes of messages that are not finished, with what their frames add."""
        return self._options.max_buffered_bytes - self.free + (self.filling.size if self.filling is not None else 0)

    def begin_batch(self, now: float) -> SendBatch:
        """Begin to fill a batch; there must be room."""
        self.last_batch += 1
        batch = SendBatch(self._topic, self.last_batch, now + self._options.linger, self.lock)
        batch.enough = min(self._options.batch_bytes, self.free)
        self.filling = self._unfinished[batch.number] = batch
        return batch

    def close_batch(self) -> None:
        """Have what is being filled sent as it is."""
        if self.filling is not None:
            batch, self.filling = self.filling, None
            batch.close()
            self.free -= batch.size
            self.queue.ready.append(batch)

    def close_if_due(self, now: float) -> None:
        """Have what is being filled sent if it has waited long enough."""
        if self.filling is not None and self.filling.due <= now:
            self.close_batch()

    def wait(self, now: float) -> float:
        """Return after how many seconds there is something to do, if nothing happens until then."""
        wait = self.queue.wait(now)
        return max(0.0, wait if self.filling is None else min(wait, self.filling.due - now))

    def is_finished(self, number: int) -> bool:
        """Are all batches up to this one finished?"""
        return not self._unfinished or next(iter(self._unfinished)) > number

    def finish(self, batch: SendBatch) -> None:
        """All of a batch is settled and reported: make its room free."""
        del self._unfinished[batch.number]
        self.free += batch.size
        if batch.failed:
            self._failures.append(batch)
        batch.finish()

    def inherit(self, error: Exception) -> None:
        """In a child of fork(): all of it is the parent's."""
        for batch in self._unfinished.values():
            batch.settle_all(error)

    def full(self) -> BufferFull:
        """Return why a message is not taken."""
        limit = self._options.max_buffered_bytes
        return BufferFull(f"{limit} bytes are buffered, which is max_buffered_bytes: wait until some are stored")

    def unreported_failure(self) -> PublishFailed | None:
        """Return the failures that neither a handle nor a callback has reported, as one; each is returned once."""
        unreported = [batch for batch in self._failures if not batch.reported]
        self._failures.clear()
        if not unreported:
            return None
        error, count = unreported[0].error, sum(batch.failed for batch in unreported)
        kind = PublishUncertain if isinstance(error, PublishUncertain) else PublishFailed
        failure = kind(f"{messages_are(count, self._topic)} not known to be stored: {error}")
        failure.__cause__, failure.code = error, getattr(error, "code", None)
        return failure
