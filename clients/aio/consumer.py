"""A member of a consumer group.

In the background the keeper says what the member has to say and sends the fetches; the link hands in their answers; the
caller takes the messages. Guards are entered in this order: those of the link, then the consumer's own, which is
therefore never held while the link is called.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import islice
from types import TracebackType

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.consumer_iteration import AsyncConsumerIteration
from qb.clients.aio.link import AsyncLink
from qb.clients.aio.waiting import AsyncGuard, checkpoint, now, shielded
from qb.clients.consuming.assigned_partitions import AssignedPartition, PartitionProgress
from qb.clients.consuming.consumer_options import checked_options
from qb.clients.consuming.consumer_state import ConsumerRequest, ConsumerState
from qb.clients.consuming.fetcher import Fetcher
from qb.clients.protocol.client_errors import QBError, RequestRefused, RequestTimedOut, StaleGeneration, UsedAfterFork
from qb.clients.protocol.conversation import Conversation, answer_of
from qb.clients.protocol.forking import call_in_child
from qb.clients.protocol.message import Message
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import Frame

log = logging.getLogger("qb.client")


class AsyncConsumer(AsyncConsumerIteration):
    """A member of a consumer group, with a connection of its own. Iterate it, poll() it, or run() a handler.

    A message counts as handled when the next one is asked for, or when the handler has returned. With `auto_commit`
    what is handled is committed every so often, before a partition is given up, and on close(). Where the group has
    committed nothing yet, it starts at the "earliest" or "latest" message, or at an offset. A lost connection and a
    broker that restarts are survived; then, as after the death of a consumer, what was handled and not committed is
    handled again. One task at a time may take messages. In a child of os.fork() an open consumer is the parent's:
    its use raises UsedAfterFork, stop() and close() do nothing to the parent's.
    A call that is cancelled leaves the consumer usable.
    """

    def __init__(
        self,
        group_id: str,
        topics: str | Iterable[str],
        *,
        host: str = "127.0.0.1",
        port: int = 9999,
        client_id: str | None = None,
        auto_commit: bool = True,
        auto_commit_interval_ms: int = 5000,
        start: str | int = "earliest",
        max_poll_records: int = 500,
        session_timeout: float = 10.0,
        rebalance_timeout: float = 60.0,
        request_timeout: float = 30.0,
        heartbeat_interval: float = 30.0,
    ) -> None:
        options = checked_options(
            group_id,
            topics,
            auto_commit,
            auto_commit_interval_ms,
            start,
            max_poll_records,
            session_timeout,
            rebalance_timeout,
        )
        self._options, self._request_timeout = options, request_timeout
        self._state = ConsumerState(options)
        self._changed = AsyncGuard()  # guards the state and all below
        self._in_hand: PartitionProgress | None = None  # what is being iterated
        self._started = self._stopped = self._closed = False
        self._failure: Exception | None = None  # of the keeper: a fault of ours
        self._ask: ConsumerRequest | None = None  # what the keeper says next
        self._background = AsyncBackground()
        self._conversation = Conversation(client_id, idempotent=False)
        self._fetcher = Fetcher(self._state.holdings, self._conversation)
        self._make_link = partial(
            AsyncLink, host, port, self._conversation, self._background, heartbeat_interval=heartbeat_interval
        )
        self._link = self._make_link()
        self._link.listener = self
        call_in_child(self, AsyncConsumer._disown)

    def _disown(self) -> None:
        """In a child of fork(): leave it to the parent if it was opened there."""
        self._changed = AsyncGuard()
        self._in_hand = None
        if not self._started and not self._closed:
            self._link = self._make_link()
            self._link.listener = self

    # What callers do

    async def __aenter__(self) -> AsyncConsumer:
        await self._background.open()
        try:
            await self._start()
        except BaseException as error:
            await self._link.close()
            await self._background.close(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        finally:
            await self._background.close(error)

    async def poll(self, timeout: float = 1.0) -> list[Message]:
        """Return up to `max_poll_records` messages, waiting for the first; those of the last poll are handled now."""
        most, messages = self._options.max_poll_records, list[Message]()
        held = await self._next(now() + timeout)
        while held is not None and len(messages) < most:
            messages += islice(held.messages, most - len(messages))
            if messages:
                held.handed = messages[-1].offset + 1
            with self._changed:
                held = self._state.take(now()) if len(messages) < most else None
        return messages

    async def run(self, handler: Callable[[Message], Awaitable[object]]) -> None:
        """Await the handler with each message until stop(). What it raises ends this; the message is not handled."""
        async for message in self:
            try:
                await handler(message)
            except BaseException:
                self._hand_back(message)
                raise

    def stop(self) -> None:
        """End iteration and run() at the next message. For handlers, other threads and signal handlers."""
        self._stopped = True
        self._changed.notify_soon()

    async def commit(self, message: Message | None = None) -> None:
        """Commit all that was handed out, the message in hand included, or one partition up to this message.

        Returns when it is durable. Raises StaleGeneration if a partition is not ours any more, RequestTimedOut.
        """
        self._link.check_process()
        with self._changed:
            wish = self._state.wish_commit(message)
            self._changed.notify_all()
            try:
                await self._changed.wait_for(
                    lambda: wish.settled or self._closed or self._failure is not None, self._request_timeout
                )
            finally:
                self._state.give_up_wish(wish)
        if self._failure is not None:
            raise self._failure
        if wish.error is not None:
            raise wish.error
        if not wish.settled:
            raise RequestTimedOut("the offsets could not be committed in time; they may be yet")

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on from another offset of a partition that this consumer holds. Raises StaleGeneration if it does not."""
        self._link.check_process()
        with self._changed:
            self._state.seek(AssignedPartition(topic, partition), offset)
            self._changed.notify_all()

    @property
    def assignment(self) -> list[AssignedPartition]:
        """The partitions that this consumer holds now, as (topic, partition)."""
        self._link.check_process()
        with self._changed:
            return sorted(held.partition for held in self._state.holdings if not held.stopped)

    async def close(self) -> None:
        """Commit what is handled (with auto_commit; not what is in hand), leave the group and disconnect."""
        if self._link.inherited:
            return
        with shielded():
            await self._leave()
            await self._link.close()
            await self._background.join()

    async def _leave(self) -> None:
        patience = min(self._request_timeout, self._options.session_timeout)
        with self._changed:
            self._stopped = True
            self._state.leave()
            self._changed.notify_all()
            if self._started and not self._closed:
                await self._changed.wait_for(lambda: self._state.over or self._failure or not self._link.up, patience)
            self._closed = True
            self._changed.notify_all()

    # Taking messages

    async def _start(self) -> None:
        if self._closed:
            raise RuntimeError("this consumer is closed: make a new one")
        if not self._started:
            await self._link.open(now() + self._request_timeout, patient=False)
            self._started = True
            self._background.start(f"qb group {self._options.group_id}", self._keep)

    async def _next(self, deadline: float) -> PartitionProgress | None:
        """Count what is in hand as handled, and wait for the next partition with messages."""
        self._link.check_process()
        if not self._stopped:
            await self._start()
        await checkpoint()  # or a handler that never waits would keep the keeper from its work
        with self._changed:
            self._state.holdings.finish()
            self._in_hand = None
            self._changed.notify_all()
            while not self._stopped:
                if self._failure is not None:
                    raise self._failure
                if held := self._state.take(now()):
                    return held
                if (left := deadline - now()) <= 0:
                    return None
                await self._changed.wait(left)
        return None

    def _hand_back(self, message: Message) -> None:
        try:
            self.seek(message.topic, message.partition, message.offset)
        except (StaleGeneration, UsedAfterFork):
            pass  # it belongs to another member, or to the parent of this process

    # What the keeper does

    async def _keep(self) -> None:
        try:
            with shielded():  # close() ends it, after what is handled is committed
                while await self._wait_for_work():
                    await self._link.post(self._compose_fetches)
                    await self._say()
        except Exception as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    async def _wait_for_work(self) -> bool:
        """Return True when there is something to send, False when it is over."""
        with self._changed:
            while not (self._state.over or self._closed):
                time = now()
                self._ask = self._state.next_ask(time)
                if self._ask is not None or self._fetcher.is_due(time):
                    return True
                await self._changed.wait(self._state.due(time) - time)
            self._changed.notify_all()
            return False

    def _compose_fetches(self) -> bytes:
        with self._changed:
            return self._fetcher.compose(now())

    async def _say(self) -> None:
        """Send the request that is due, if there is one, and wait for its answer."""
        ask, sent = self._ask, now()
        if ask is None:
            return
        try:
            deadline = sent + self._options.session_timeout
            answer = answer_of(await self._link.ask(lambda: self._conversation.request(*ask), deadline))
        except RequestRefused as error:
            with self._changed:
                self._state.refused(ask, error, now())
                self._changed.notify_all()
        except (QBError, PeerMisbehaved):
            with self._changed:
                self._state.unanswered(ask, now())
                self._changed.notify_all()
        else:
            with self._changed:
                self._state.answered(ask, answer, sent)
                self._changed.notify_all()

    # What the link does

    def welcomed(self) -> list[bytes]:
        """For the link: a connection begins."""
        with self._changed:
            self._fetcher.welcomed()
            self._changed.notify_all()
        return []

    def pushed(self, frame: Frame) -> None:
        """For the link: the answer to a fetch, or one that no caller waits for any more."""
        with self._changed:
            refusal = self._fetcher.answered(frame, now())
            self._changed.notify_all()
        if refusal is not None:
            log.warning("group %s: %s", self._options.group_id, refusal)

    def lost(self) -> None:
        """For the link: the connection has ended."""
        with self._changed:
            self._fetcher.lost()
            self._state.connection_lost()
            self._changed.notify_all()
