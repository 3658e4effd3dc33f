"""What a producer and its callers wait with. qb.clients.aio.sending.send_handles is the same for tasks."""

from __future__ import annotations

import atexit
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

import msgspec

from qb.clients.blocking.waiting import Guard
from qb.clients.producing.buffered_messages import BufferedMessages
from qb.clients.producing.producer_options import ProducerOptions
from qb.clients.producing.send_batch import Delivery, SendBatch
from qb.clients.protocol.client_errors import RequestTimedOut
from qb.clients.protocol.receipts import Receipt

PILE = 4  # batches that are ready
GIVE_WAY = 0.005  # seconds at most, as the interpreter's own switch between threads
EXIT_PATIENCE = 5.0  # seconds that the messages of a program that ends have to be stored

OnDelivery = Callable[[Delivery], object]


class _Closable(Protocol):
    def close(self, timeout: float | None = None) -> None: ...


_open: WeakSet[_Closable] = WeakSet()


def close_at_exit(producer: _Closable) -> None:
    """Have the program send what is buffered when it ends, if nothing has closed the producer by then."""
    _open.add(producer)


@atexit.register
def _close_all() -> None:
    for producer in list(_open):
        with suppress(Exception):  # the log has it
            producer.close(EXIT_PATIENCE)


def check_callback(on_delivery: object) -> None:
    """Raise TypeError if a thread cannot call it."""
    if on_delivery is None:
        return
    if not callable(on_delivery):
        raise TypeError(f"on_delivery is a function of one Delivery, not {type(on_delivery).__name__}")
    if inspect.iscoroutinefunction(on_delivery) or inspect.iscoroutinefunction(type(on_delivery).__call__):
        raise TypeError("on_delivery is an async def, which a Producer cannot run: use AsyncBrokerClient")


def call_back(on_delivery: OnDelivery, delivery: Delivery) -> None:
    """Report to a program what became of a message."""
    on_delivery(delivery)


def caller_id() -> int:
    """Return what distinguishes the calling thread from all others."""
    return threading.get_ident()


def wait_for_room(buffered: BufferedMessages, changed: Guard, options: ProducerOptions) -> None:
    """Return when there is room, or raise BufferFull if the producer does not block. Called with the lock held."""
    if options.when_full == "raise":
        raise buffered.full()
    changed.wait_for(lambda: buffered.has_room or buffered.closed)


def let_send(buffered: BufferedMessages, changed: Guard) -> None:
    """Give way to the thread that sends, if batches pile up: a caller that never waits would keep it from running."""
    if len(buffered.queue.ready) >= PILE:
        changed.wait_for(lambda: not buffered.queue.ready, GIVE_WAY)


class _ThreadWaiter:
    """A wake-up for one thread."""

    __slots__ = ("_woken", "wake")

    def __init__(self) -> None:
        self._woken = threading.Lock()
        self._woken.acquire()
        self.wake = self._woken.release

    def wait(self, seconds: float | None) -> bool:
        return self._woken.acquire(timeout=-1 if seconds is None else max(seconds, 0))


class SendHandle(msgspec.Struct, eq=False, gc=False):
    """A message that was given to a producer. Any thread may ask it for its receipt, and often.

    Attributes:
        batch: The messages that are sent with it.
        index: Which of them it is.

    Example:
        >>> receipt = producer.send(b"tea").result(timeout=30)
    """

    batch: SendBatch
    index: int

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.batch.described(self.index)}>"

    def done(self) -> bool:
        """Is it known what became of the message?

        Returns:
            True if result() would not wait.
        """
        return self.batch.settled

    def result(self, timeout: float | None = None) -> Receipt:
        """Wait for the receipt of the message.

        Args:
            timeout: Seconds to wait at most; None waits until the producer stores it or gives it up.

        Returns:
            Where the message is, and how safely it is stored.

        Raises:
            QBError: The message is not stored, or that is not known.
            RequestTimedOut: It is not known yet; the producer goes on with it.
            UsedAfterFork: The message was given to the producer by the parent of this process.
        """
        batch = self.batch
        if not batch.settled:
            self._wait(timeout)
        return batch.receipt(self.index)

    def _wait(self, timeout: float | None) -> None:
        batch, waiter = self.batch, _ThreadWaiter()
        with batch.lock:
            if batch.settled:
                return
            batch.waiters.append(waiter)
        if not waiter.wait(timeout):
            with batch.lock:
                if batch.settled:
                    return
                batch.waiters.remove(waiter)
            raise RequestTimedOut(f"it is not known after {timeout:g} s whether the message is stored; it may be yet")
