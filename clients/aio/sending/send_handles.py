"""What a producer and its callers wait with. qb.clients.blocking.sending.send_handles is the same for threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from inspect import isawaitable
from math import inf
from typing import Any

import anyio
import msgspec

from qb.clients.aio.event_loops.running_loop import running_loop
from qb.clients.aio.waiting import AsyncGuard
from qb.clients.producing.buffered_messages import BufferedMessages
from qb.clients.producing.producer_options import ProducerOptions
from qb.clients.producing.send_batch import Delivery, SendBatch
from qb.clients.protocol.receipts import Receipt

OnDelivery = Callable[[Delivery], Awaitable[None] | None]


def close_at_exit(producer: object) -> None:
    """The block over the client closes its producers."""


def check_callback(on_delivery: object) -> None:
    """Raise TypeError if it cannot be called."""
    if on_delivery is not None and not callable(on_delivery):
        raise TypeError(f"on_delivery is a function of one Delivery, not {type(on_delivery).__name__}")


async def call_back(on_delivery: OnDelivery, delivery: Delivery) -> None:
    """Report to a program what became of a message; its function may be async."""
    called = on_delivery(delivery)
    if isawaitable(called):
        await called


def caller_id() -> int:
    """Return what distinguishes the calling task from all others."""
    return anyio.get_current_task().id


def wait_for_room(buffered: BufferedMessages, changed: AsyncGuard, options: ProducerOptions) -> None:
    """Raise BufferFull: send() is no coroutine, and cannot wait."""
    raise buffered.full()


def let_send(buffered: BufferedMessages, changed: AsyncGuard) -> None:
    """A task that sends gets its turn when the caller waits for anything."""


class AsyncSendHandle(msgspec.Struct, eq=False, gc=False):
    """A message that was given to a producer; await it for its receipt. It may be awaited often, by any task.

    Attributes:
        batch: The messages that are sent with it.
        index: Which of them it is.

    Example:
        >>> receipt = await producer.send(b"tea")
    """

    batch: SendBatch
    index: int

    def __await__(self) -> Generator[Any, None, Receipt]:
        return self._receipt().__await__()

    async def _receipt(self) -> Receipt:
        batch = self.batch
        if not batch.settled:
            waiter = running_loop().waiter()
            batch.waiters.append(waiter)
            try:
                await waiter.wait(inf)
            finally:
                if waiter in batch.waiters:
                    batch.waiters.remove(waiter)
        return batch.receipt(self.index)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.batch.described(self.index)}>"

    def done(self) -> bool:
        """Is it known what became of the message?

        Returns:
            True if awaiting the handle would not wait.
        """
        return self.batch.settled

    def result(self) -> Receipt:
        """Return the receipt of a message that is done.

        Returns:
            Where the message is, and how safely it is stored.

        Raises:
            QBError: The message is not stored, or that is not known.
            RuntimeError: It is not done yet.
        """
        if not self.batch.settled:
            raise RuntimeError("it is not known yet what became of the message: await the handle")
        return self.batch.receipt(self.index)
