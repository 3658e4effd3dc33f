"""A producer: messages are buffered, and sent in batches behind the caller's back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from math import inf
from types import TracebackType
from typing import Any

from qb.clients.aio.methods.publishing import AsyncPublishMethods
from qb.clients.aio.sending.send_handles import (
    AsyncSendHandle,
    OnDelivery,
    check_callback,
    close_at_exit,
    let_send,
    wait_for_room,
)
from qb.clients.aio.sending.send_task import AsyncSendTask
from qb.clients.aio.waiting import AsyncGuard, now
from qb.clients.producing.message_buffer import MessageBuffer
from qb.clients.producing.producer_options import ProducerOptions
from qb.clients.producing.send_batch import SendBatch
from qb.clients.protocol.client_errors import ConnectionLost, QBError, RequestTimedOut
from qb.clients.protocol.forking import call_in_child, used_after_fork
from qb.clients.tracing import tracing

LAST_ANSWERS = 1.0  # seconds that close() waits for answers that no handle waits for


class AsyncProducer(MessageBuffer[AsyncSendHandle]):
    """Messages for one topic, sent in batches. Returned by client.producer(); leaving an `async with` block closes it.

    send() buffers a message and returns a handle. A batch goes out when it is full or its first message has waited for
    `linger_ms`. Many batches are on their way at once; the messages of a partition are stored in the order of their
    send(). Whatever the connection or the broker does meanwhile, each message is stored once, or its handle says that
    it is not, or that this is not known. Errors also reach `on_delivery` and the log `qb.client`. Those that neither a
    handle nor `on_delivery` has reported are raised by flush() and close(). Any number of tasks may use it.

    Args:
        client: The client whose connection it uses.
        topic: The topic.
        options: How it batches, retries and waits.
        on_delivery: Called with what became of each message.

    Example:
        >>> async with client.producer("orders", linger_ms=5) as producer:
        ...     handle = producer.send(b"tea", key="customer-7")
        ...     print((await handle).offset)
    """

    _handle = AsyncSendHandle
    _make_client: Callable[..., Any]  # AsyncBrokerClient, which knows this class

    def __init__(
        self,
        client: AsyncPublishMethods,
        topic: str,
        options: ProducerOptions,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        check_callback(on_delivery)
        self._client, self._on_delivery = client, on_delivery
        self._owned: AbstractAsyncContextManager[object] | None = None  # the client, if it has no block of its own
        super().__init__(topic, options)
        self._begin()
        call_in_child(self, AsyncProducer._begin_in_child)

    def _begin(self) -> None:
        """Start out with an empty buffer and without a task."""
        self._changed, self._task = AsyncGuard(), None
        self._start_buffer(self._changed.lock)

    def _begin_in_child(self) -> None:
        """In a child of fork(): what was buffered stays the parent's."""
        inherited = self._buffered
        self._begin()
        self._buffered.closed = inherited.closed
        inherited.inherit(used_after_fork())

    _task: AsyncSendTask | None

    @classmethod
    def from_config(cls, path: str, on_delivery: OnDelivery | None = None) -> AsyncProducer:
        """Make a producer, with a client of its own, from the sections `broker` and `producer` of a YAML file.

        Args:
            path: The file.
            on_delivery: Called with what became of each message.

        Returns:
            The producer; its `async with` block connects and disconnects the client.

        Raises:
            ValueError: A key is unknown, missing, or makes no sense; the text names file, line, key and reason.

        Example:
            >>> async with AsyncProducer.from_config("producer.yaml") as producer:
            ...     producer.send(b"tea")
        """
        from qb.core.settings import producer_options

        options, sending = producer_options(path)
        client = cls._make_client(**options)
        producer: AsyncProducer = client.producer(**sending, on_delivery=on_delivery)
        producer._owned = client
        return producer

    def __repr__(self) -> str:
        state = "closed" if self._buffered.closed else f"{self.buffered_bytes} bytes buffered"
        return f"<{type(self).__name__} of topic {self._topic}, {state}>"

    @property
    def topic(self) -> str:
        """The topic."""
        return self._topic

    async def flush(self, timeout: float | None = None) -> None:
        """Send what is buffered, and return when it is known what became of it.

        Args:
            timeout: Seconds to wait at most; None waits until all is stored or given up.

        Raises:
            PublishFailed: Messages are not stored, and neither a handle nor `on_delivery` has reported so.
            PublishUncertain: Likewise, and it is not known whether they are stored.
            RequestTimedOut: It takes longer; the producer goes on.
            RuntimeError: It is called by `on_delivery`, which it would wait for.
        """
        if not await self._flushed(inf if timeout is None else timeout):
            raise RequestTimedOut(
                f"it is not known after {timeout:g} s what became of all messages; they may be stored"
            )
        if failure := self._buffered.unreported_failure():
            raise failure

    async def close(self, timeout: float | None = None) -> None:
        """Send what is buffered, wait for it, and take no more messages.

        Args:
            timeout: Seconds to wait at most; what is not stored then is given up, and its handles raise. None waits
                until all is stored or given up.

        Raises:
            PublishFailed: Messages are not stored, and neither a handle nor `on_delivery` has reported so.
            PublishUncertain: Likewise, and it is not known whether they are stored.
            RuntimeError: It is called by `on_delivery`, which it would wait for.
        """
        await self._end(inf if timeout is None else timeout)
        if failure := self._buffered.unreported_failure():
            raise failure

    async def __aenter__(self) -> AsyncProducer:
        if self._owned is not None:
            await self._owned.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except QBError:
            if error is None:  # else the log has it
                raise
        finally:
            if self._owned is not None:
                await self._owned.__aexit__(kind, error, traceback)

    # async only
    async def room(self) -> None:
        """Wait while the buffer is full: send() cannot wait, and raises BufferFull.

        Raises:
            RuntimeError: The producer is closed.
        """
        await self._changed.wait_for(lambda: self._buffered.has_room or self._buffered.closed)
        self._check_open()

    # end of async only
    def _check_open(self) -> None:
        if self._buffered.closed:
            raise RuntimeError("this producer is closed: make another one with client.producer()")

    # With the lock held

    def _begin_batch(self) -> SendBatch:
        self._check_open()
        if not self._buffered.has_room:
            wait_for_room(self._buffered, self._changed, self._options)
            self._check_open()
        if self._task is None:
            self._client._link.check_process()
            self._task = AsyncSendTask(
                self._client, self._buffered, self._changed, self._notes.plain, self._options, self._on_delivery
            )
            self._client._producers.add(self)
            close_at_exit(self)
        self._longest, self._spans = self._client._conversation.max_message_size, tracing()
        self._changed.notify_all()
        return self._buffered.filling or self._buffered.begin_batch(now())  # another may have begun one meanwhile

    def _batch_full(self) -> None:
        self._buffered.close_batch()
        self._changed.notify_all()
        let_send(self._buffered, self._changed)

    # Ending

    async def _flushed(self, seconds: float) -> bool:
        """Return True when all that was sent before is finished, False after so many seconds."""
        if self._task is not None:
            self._task.check_caller()
        with self._changed:
            self._buffered.close_batch()
            self._changed.notify_all()
            last, buffered = self._buffered.last_batch, self._buffered
            return await self._changed.wait_for(lambda: buffered.is_finished(last), seconds)

    async def _end(self, seconds: float) -> None:
        """Flush for so many seconds, give up the rest, and end the task."""
        task, given_up = self._task, ConnectionLost("the producer was closed before the message was sent")
        if task is not None:
            task.check_caller()
        with self._changed:
            self._buffered.closed = True
        if task is None:
            return
        try:
            if not await self._flushed(seconds):
                task.give_up(given_up)
                await self._flushed(inf)  # until it is reported
            with self._changed:  # with acks=none: a connection that ends with answers on it may cost the messages too
                await self._changed.wait_for(lambda: not task.awaits_answers, min(seconds, LAST_ANSWERS))
        finally:
            task.stop(given_up)
            self._client._producers.discard(self)
