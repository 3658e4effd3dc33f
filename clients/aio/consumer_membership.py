"""One consumer's membership of a group: its connection, its keeper, and the messages that it may take.

In the background the keeper sends the requests that are due and the fetches; the link hands in their answers; the
caller takes the messages. Guards are entered in this order: those of the link, then the member's own, which is
therefore never held while the link is called.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from qb.clients.aio.background import AsyncBackground
from qb.clients.aio.link import AsyncLink
from qb.clients.aio.waiting import AsyncGuard, checkpoint, now, shielded
from qb.clients.consuming.assigned_partitions import AssignedPartition, PartitionProgress
from qb.clients.consuming.consumer_options import ConsumerOptions
from qb.clients.consuming.consumer_state import ConsumerRequest
from qb.clients.consuming.fetcher import Fetcher
from qb.clients.consuming.single_partition import state_of
from qb.clients.credentials import Credentials
from qb.clients.protocol.client_errors import QBError, RequestRefused, RequestTimedOut
from qb.clients.protocol.conversation import Conversation, answer_of
from qb.clients.protocol.forking import call_in_child
from qb.clients.protocol.message import Message
from qb.core.wire.addresses import BrokerAddress
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import Frame

log = logging.getLogger("qb.client")


class AsyncConsumerMembership:
    """Joins a group when it is first needed, and stays in it until it is closed."""

    def __init__(
        self,
        options: ConsumerOptions,
        servers: Sequence[BrokerAddress],
        client_id: str | None,
        request_timeout: float,
        heartbeat_interval: float,
        compression: str | None,
        credentials: Credentials,
    ) -> None:
        self._options, self._request_timeout = options, request_timeout
        self.state = state_of(options)
        self.changed = AsyncGuard()  # guards the state and all below
        self.in_hand: PartitionProgress | None = None  # what is being iterated
        self._started = self._stopped = self._closed = False
        self._failure: Exception | None = None  # of the keeper: a fault of ours
        self._ask: ConsumerRequest | None = None  # what the keeper sends next
        self._background = AsyncBackground()
        self._conversation = Conversation(client_id, idempotent=False, compression=compression, credentials=credentials)
        self._fetcher = Fetcher(self.state.assigned, self._conversation)
        self._make_link = partial(
            AsyncLink, servers, self._conversation, self._background, heartbeat_interval=heartbeat_interval
        )
        self.link = self._make_link()
        self.link.listener = self
        call_in_child(self, AsyncConsumerMembership._disown)

    def __str__(self) -> str:
        options = self._options
        return f"{options.group_id!r} of {', '.join(options.topics)}, {self.link.server}"

    def _disown(self) -> None:
        """In a child of fork(): leave it to the parent if it was opened there."""
        self.changed = AsyncGuard()
        self.in_hand = None
        if not self._started and not self._closed:
            self.link = self._make_link()
            self.link.listener = self

    # What the consumer does

    async def open(self) -> None:
        """Enter the block that the background work lives in, and connect."""
        await self._background.open()
        try:
            await self._start()
        except BaseException as error:
            await self.link.close()
            await self._background.close(error)
            raise

    async def close(self, error: BaseException | None) -> None:
        """Leave the group, disconnect and leave the block."""
        self._background.interrupt(error)  # async only
        try:
            await self.leave()
        finally:
            await self._background.close(error)

    async def leave(self) -> None:
        """Commit what is handled, leave the group and disconnect."""
        if self.link.inherited:
            return
        with shielded():
            await self._leave_group()
            await self.link.close()
            await self._background.join()

    async def _leave_group(self) -> None:
        patience = min(self._request_timeout, self._options.session_timeout)
        with self.changed:
            self._stopped = True
            self.state.leave()
            self.changed.notify_all()
            if self._started and not self._closed:
                await self.changed.wait_for(lambda: self.state.over or self._failure or not self.link.up, patience)
            self._closed = True
            self.changed.notify_all()

    def stop(self) -> None:
        """Hand out nothing more."""
        self._stopped = True
        self.changed.notify_soon()

    async def _start(self) -> None:
        if self._closed:
            raise RuntimeError("this consumer is closed: make a new one")
        if not self._started:
            await self.link.open(now() + self._request_timeout, patient=False)
            self._started = True
            self._background.start(f"qb group {self._options.group_id}", self._keep)

    async def next(self, deadline: float) -> PartitionProgress | None:
        """Count what is in hand as handled, and wait for the next partition with messages."""
        self.link.check_process()
        if not self._stopped:
            await self._start()
        await checkpoint()  # or a handler that never waits would keep the keeper from its work
        with self.changed:
            self.state.assigned.finish()
            self.in_hand = None
            self.changed.notify_all()
            while not self._stopped:
                if self._failure is not None:
                    raise self._failure
                if held := self.state.take(now()):
                    return held
                if (left := deadline - now()) <= 0:
                    return None
                await self.changed.wait(left)
        return None

    async def commit(self, message: Message | None) -> None:
        """Commit all that was handed out, or one partition up to this message; return when it is durable."""
        self.link.check_process()
        with self.changed:
            wish = self.state.wish_commit(message)
            self.changed.notify_all()
            try:
                await self.changed.wait_for(
                    lambda: wish.settled or self._closed or self._failure is not None, self._request_timeout
                )
            finally:
                self.state.give_up_wish(wish)
        if self._failure is not None:
            raise self._failure
        if wish.error is not None:
            raise wish.error
        if not wish.settled:
            raise RequestTimedOut("the offsets could not be committed in time; they may be yet")

    def seek(self, partition: AssignedPartition, offset: int) -> None:
        """Go on from another offset of a partition. Raises StaleGeneration if it is not this member's."""
        self.link.check_process()
        with self.changed:
            self.state.seek(partition, offset)
            self.changed.notify_all()

    def assignment(self) -> list[AssignedPartition]:
        """Return the partitions that this member holds now."""
        self.link.check_process()
        with self.changed:
            return sorted(held.partition for held in self.state.assigned if not held.stopped)

    # What the keeper does

    async def _keep(self) -> None:
        try:
            with shielded():  # close() ends it, after what is handled is committed
                while await self._wait_for_work():
                    await self.link.post(self._compose_fetches)
                    await self._say()
        except Exception as error:
            with self.changed:
                self._failure = error
                self.changed.notify_all()

    async def _wait_for_work(self) -> bool:
        """Return True when there is something to send, False when it is over."""
        with self.changed:
            while not (self.state.over or self._closed):
                time = now()
                self._ask = self.state.next_ask(time)
                if self._ask is not None or self._fetcher.is_due(time):
                    return True
                await self.changed.wait(self.state.due(time) - time)
            self.changed.notify_all()
            return False

    def _compose_fetches(self) -> bytes:
        with self.changed:
            return self._fetcher.compose(now())

    async def _say(self) -> None:
        """Send the request that is due, if there is one, and wait for its answer."""
        ask, sent = self._ask, now()
        if ask is None:
            return
        try:
            deadline = sent + self._options.session_timeout
            answer = answer_of(await self.link.ask(lambda: self._conversation.request(*ask), deadline))
        except RequestRefused as error:
            with self.changed:
                self.state.refused(ask, error, now())
                self.changed.notify_all()
        except (QBError, PeerMisbehaved):
            with self.changed:
                self.state.unanswered(ask, now())
                self.changed.notify_all()
        else:
            with self.changed:
                self.state.answered(ask, answer, sent)
                self.changed.notify_all()

    # What the link does

    def welcomed(self) -> list[bytes]:
        """For the link: a connection begins."""
        with self.changed:
            self._fetcher.welcomed()
            self.changed.notify_all()
        return []

    def pushed(self, frame: Frame) -> None:
        """For the link: the answer to a fetch, or one that no caller waits for any more."""
        with self.changed:
            refusal = self._fetcher.answered(frame, now())
            self.changed.notify_all()
        if refusal is not None:
            log.warning("group %s: %s", self._options.group_id, refusal)

    def lost(self) -> None:
        """For the link: the connection has ended."""
        with self.changed:
            self._fetcher.lost()
            self.state.connection_lost()
            self.changed.notify_all()
