"""What `send` does: the hot path of a producer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Generic, TypeVar

from qb.clients.producing.buffered_messages import BufferedMessages
from qb.clients.producing.message_notes import MessageNotes
from qb.clients.producing.producer_options import ProducerOptions
from qb.clients.producing.send_batch import SendBatch
from qb.clients.protocol.fetch_requests import milliseconds
from qb.clients.protocol.publish_frames import Body, as_bytes, check_size
from qb.clients.quick_lock import QuickLock
from qb.clients.tracing import tracing

UNKNOWN_LIMIT = 2**32 - 1  # for a body, until the broker says

Handle = TypeVar("Handle")


class MessageBuffer(Generic[Handle]):
    """The part of a producer that takes messages."""

    _handle: Callable[[SendBatch, int], Handle]

    def __init__(self, topic: str, options: ProducerOptions) -> None:
        self._topic, self._options, self._notes = topic, options, MessageNotes(topic, options.partition)
        self._last_index, self._overhead = options.batch_size - 1, self._notes.plain.form.overhead
        self._longest = UNKNOWN_LIMIT
        self._new_handle = self._handle  # found quicker than an attribute of the class
        self._spans = tracing()  # looked for again with each batch

    def _start_buffer(self, lock: QuickLock) -> None:
        self._take_lock, self._release_lock = lock.get, lock.put
        self._buffered = BufferedMessages(self._topic, self._options, lock)

    def _begin_batch(self) -> SendBatch:
        """Return the batch to fill; with the lock held."""
        raise NotImplementedError

    def _batch_full(self) -> None:
        """The batch that is being filled is full; with the lock held."""
        raise NotImplementedError

    def send(
        self,
        value: Body,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        partition: int | None = None,
        timestamp: int | datetime = 0,
    ) -> Handle:
        """Buffer one message, to be sent with others; return its handle.

        Args:
            value: The body: bytes, a bytearray or a memoryview.
            key: Messages with one key go to one partition, in order.
            properties: Text to store beside the body.
            partition: The partition; None lets the key choose, and without a key a batch goes to the next in turn.
            timestamp: The time of the message: a datetime, or milliseconds since 1970; 0 takes the broker's clock.

        Returns:
            The handle: it has the receipt once the message is stored, or the error.

        Raises:
            BufferFull: `max_buffered_bytes` are buffered, and the producer does not block.
            MessageTooLarge: The body is longer than `max_message_size`, or the properties are too long.
            BadRequest: A property has a reserved name, or an argument makes no sense.
            TypeError: The body is not bytes.
            RuntimeError: The producer is closed.
            UsedAfterFork: The producer was opened by the parent of this process.
        """
        if self._spans is not None:
            properties = self._spans.created(self._topic, properties or {})
        note = None
        if key is not None or properties is not None or partition is not None or timestamp:
            note = self._notes.of(partition, key, properties, milliseconds(timestamp))
        if type(value) is not bytes:
            value = as_bytes(value)
        size = len(value)
        if size > self._longest:
            check_size(value, self._longest)
        release, new_handle = self._release_lock, self._new_handle  # a call by a local name is quicker than by `self.`
        self._take_lock()  # a third quicker than a `with` block
        try:
            batch = self._buffered.filling or self._begin_batch()
            bodies = batch.bodies
            index = len(bodies)
            bodies.append(value)
            if note is None:
                size = batch.size = batch.size + size + self._overhead
            else:
                batch.note(note)
                size = batch.size = batch.size + size + note.form.overhead
            if size >= batch.enough or index >= self._last_index:
                self._batch_full()
        finally:
            release(None)
        return new_handle(batch, index)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of messages that are not finished, with what their frames add."""
        return self._buffered.size
