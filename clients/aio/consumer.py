"""AsyncConsumer, a member of a consumer group, for trio.

The same shape as qb.clients.blocking.consumer. The keeper is a system task, as the link's is, so that a consumer
needs no nursery; nothing that happens to it escapes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice
from math import inf
from types import TracebackType

import trio

from qb.clients.aio.link import AsyncLink
from qb.clients.consuming.assigned_partitions import AssignedPartition, PartitionProgress
from qb.clients.consuming.consumer_options import checked_options
from qb.clients.consuming.consumer_state import ConsumerRequest, ConsumerState
from qb.clients.consuming.fetcher import Fetcher
from qb.clients.protocol.client_errors import QBError, RequestRefused, RequestTimedOut, StaleGeneration
from qb.clients.protocol.conversation import Conversation, answer_of
from qb.clients.protocol.message import Message
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import Frame

log = logging.getLogger("qb.client")


class AsyncConsumer:
    """A member of a consumer group; as Consumer, which see. One task at a time may take messages.

    A call that is cancelled leaves the consumer usable. Leaving the `async with` block leaves the group even if
    cancelled, which may take as long as the broker takes to answer.
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
        self._in_hand: PartitionProgress | None = None  # what is being iterated
        self._changed = trio.lowlevel.ParkingLot()
        self._started = self._stopped = self._closed = False
        self._failure: Exception | None = None  # of the keeper: a fault of ours
        self._conversation = Conversation(client_id, idempotent=False)
        self._fetcher = Fetcher(self._state.holdings, self._conversation)
        self._link = AsyncLink(host, port, self._conversation, heartbeat_interval=heartbeat_interval)
        self._link.listener = self

    # What callers do

    async def __aenter__(self) -> AsyncConsumer:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncConsumer:
        return self

    async def __anext__(self) -> Message:
        """Return the next message, waiting for it, until stop().

        Raises BrokerUnavailable if there is no broker at first, UnknownTopic, BadName.
        """
        self._link.check_process()
        while True:
            if (held := self._in_hand) is not None:
                held.handled = held.handed
                if not held.stopped and trio.current_time() < self._state.sure_until:
                    for message in held.messages:
                        held.handed = message.offset + 1
                        return message
            self._in_hand = await self._next(inf)
            if self._in_hand is None:
                raise StopAsyncIteration

    async def poll(self, timeout: float = 1.0) -> list[Message]:
        """Return up to `max_poll_records` messages, waiting for the first; those of the last poll are handled now."""
        most, messages = self._options.max_poll_records, list[Message]()
        held = await self._next(trio.current_time() + timeout)
        while held is not None and len(messages) < most:
            messages += islice(held.messages, most - len(messages))
            if messages:
                held.handed = messages[-1].offset + 1
            held = self._state.take(trio.current_time()) if len(messages) < most else None
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
        """End iteration and run() at the next message."""
        self._stopped = True
        self._changed.unpark_all()

    async def commit(self, message: Message | None = None) -> None:
        """Commit all that was handed out, the message in hand included, or one partition up to this message.

        Returns when it is durable. Raises StaleGeneration if a partition is not ours any more, RequestTimedOut.
        """
        self._link.check_process()
        wish = self._state.wish_commit(message)
        self._changed.unpark_all()
        try:
            with trio.move_on_after(self._request_timeout):
                while not (wish.settled or self._closed):
                    await self._changed.park()
        finally:
            self._state.give_up_wish(wish)
        if wish.error is not None:
            raise wish.error
        if not wish.settled:
            raise RequestTimedOut("the offsets could not be committed in time; they may be yet")

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on from another offset of a partition that this consumer holds. Raises StaleGeneration if it does not."""
        self._state.seek(AssignedPartition(topic, partition), offset)
        self._changed.unpark_all()

    @property
    def assignment(self) -> list[AssignedPartition]:
        """The partitions that this consumer holds now, as (topic, partition)."""
        return sorted(held.partition for held in self._state.holdings if not held.stopped)

    async def close(self) -> None:
        """Commit what is handled (with auto_commit; not what is in hand), leave the group and disconnect."""
        if self._link.inherited:
            return
        self.stop()
        self._state.leave()
        patience = min(self._request_timeout, self._options.session_timeout)
        with trio.CancelScope(shield=True):
            if self._started:
                with trio.move_on_after(patience):
                    while self._link.up and not self._state.over and self._failure is None:
                        await self._changed.park()
            self._closed = True
            self._changed.unpark_all()
            await self._link.close()

    # Taking messages

    async def _start(self) -> None:
        if self._closed:
            raise RuntimeError("this consumer is closed: make a new one")
        if not self._started:
            await self._link.open(trio.current_time() + self._request_timeout, patient=False)
            self._started = True
            trio.lowlevel.spawn_system_task(self._keep, name=f"qb group {self._options.group_id}")

    async def _next(self, deadline: float) -> PartitionProgress | None:
        """Count what is in hand as handled, and wait for the next partition with messages."""
        self._link.check_process()
        if not self._stopped:
            await self._start()
        await trio.lowlevel.checkpoint()  # or a handler that never waits would keep the keeper from its work
        self._state.holdings.finish()
        self._in_hand = None
        self._changed.unpark_all()
        with trio.move_on_at(deadline):
            while not self._stopped:
                if self._failure is not None:
                    raise self._failure
                if held := self._state.take(trio.current_time()):
                    return held
                await self._changed.park()
        return None

    def _hand_back(self, message: Message) -> None:
        try:
            self.seek(message.topic, message.partition, message.offset)
        except StaleGeneration:
            pass  # whoever holds it now gets it

    # What the keeper does

    async def _keep(self) -> None:
        try:
            while not (self._state.over or self._closed):
                await self._work()
        except Exception as error:
            self._failure = error
        finally:
            self._changed.unpark_all()

    async def _work(self) -> None:
        """Send what is due, or wait until something may be."""
        now = trio.current_time()
        if self._fetcher.is_due(now):
            await self._link.post(lambda: self._fetcher.compose(trio.current_time()))
        if ask := self._state.next_ask(now):
            await self._say(ask, now)
        elif not self._state.over and not self._fetcher.is_due(now):
            with trio.move_on_at(self._state.due(now)):
                await self._changed.park()

    async def _say(self, ask: ConsumerRequest, sent: float) -> None:
        try:
            deadline = sent + self._options.session_timeout
            answer = answer_of(await self._link.ask(lambda: self._conversation.request(*ask), deadline))
        except RequestRefused as error:
            self._state.refused(ask, error, trio.current_time())
        except (QBError, PeerMisbehaved):
            self._state.unanswered(ask, trio.current_time())
        else:
            self._state.answered(ask, answer, sent)
        self._changed.unpark_all()

    # What the link's task does

    def welcomed(self) -> list[bytes]:
        """For the link: a connection begins."""
        self._fetcher.welcomed()
        self._changed.unpark_all()
        return []

    def pushed(self, frame: Frame) -> None:
        """For the link: the answer to a fetch, or one that nobody waits for any more."""
        if refusal := self._fetcher.answered(frame, trio.current_time()):
            log.warning("group %s: %s", self._options.group_id, refusal)
        self._changed.unpark_all()

    def lost(self) -> None:
        """For the link: the connection has ended."""
        self._fetcher.lost()
        self._state.connection_lost()
        self._changed.unpark_all()
