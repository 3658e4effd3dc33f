"""Consumer, a member of a consumer group, for threads.

A thread of its own, the keeper, says what the member has to say and sends the fetches; the link's thread files their
answers; the caller's thread takes the messages. Locks are taken in this order: those of the link, then the consumer's
own, which is therefore never held while the link is called.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from math import inf
from time import monotonic
from types import TracebackType

from qb.clients.blocking.link import BlockingLink
from qb.clients.consuming.assigned_partitions import AssignedPartition, PartitionProgress
from qb.clients.consuming.consumer_options import checked_options
from qb.clients.consuming.consumer_state import ConsumerRequest, ConsumerState, PendingCommit
from qb.clients.consuming.fetcher import Fetcher
from qb.clients.protocol.client_errors import QBError, RequestRefused, RequestTimedOut, StaleGeneration, UsedAfterFork
from qb.clients.protocol.conversation import Conversation, answer_of
from qb.clients.protocol.forking import call_in_child
from qb.clients.protocol.message import Message
from qb.core.wire.errors import PeerMisbehaved
from qb.core.wire.frames import Frame

log = logging.getLogger("qb.client")


class Consumer:
    """A member of a consumer group, with a connection of its own. Iterate it, poll() it, or run() a handler.

    A message counts as handled when the next one is asked for, or when the handler has returned. With `auto_commit`
    what is handled is committed every so often, before a partition is given up, and on close(). Where the group has
    committed nothing yet, it starts at the "earliest" or "latest" message, or at an offset. A lost connection and a
    broker that restarts are survived; then, as after the death of a consumer, what was handled and not committed is
    handled again. One thread at a time may take messages. In a child of os.fork() an open consumer is the parent's:
    its use raises UsedAfterFork, stop() and close() do nothing to the parent's.
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
        self._changed = threading.Condition(threading.Lock())  # guards the state and all below
        self._in_hand: PartitionProgress | None = None  # what is being iterated
        self._keeper: threading.Thread | None = None
        self._stopped = self._closed = False
        self._failure: Exception | None = None  # of the keeper: a fault of ours
        self._ask: ConsumerRequest | None = None  # what the keeper says next
        self._conversation = Conversation(client_id, idempotent=False)
        self._fetcher = Fetcher(self._state.holdings, self._conversation)
        self._make_link = partial(BlockingLink, host, port, self._conversation, heartbeat_interval=heartbeat_interval)
        self._link = self._make_link()
        self._link.listener = self
        call_in_child(self, Consumer._disown)

    def _disown(self) -> None:
        """In a child of fork(): leave it to the parent if it was opened there."""
        self._changed = threading.Condition(threading.Lock())
        self._in_hand = None
        if self._keeper is None and not self._closed:
            self._link = self._make_link()
            self._link.listener = self

    # What callers do

    def __enter__(self) -> Consumer:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Message]:
        """Yield messages, waiting for them, until stop(). Raises BrokerUnavailable if there is no broker at first,
        UnknownTopic, BadName."""
        state, clock = self._state, monotonic
        while (held := self._next(inf)) is not None:
            self._in_hand = held
            for message in held.messages:
                held.handed = message.offset + 1
                yield message
                if held is not self._in_hand:
                    break  # somebody has polled meanwhile
                held.handled = held.handed
                if held.stopped or clock() >= state.sure_until:
                    break

    def poll(self, timeout: float = 1.0) -> list[Message]:
        """Return up to `max_poll_records` messages, waiting for the first; those of the last poll are handled now."""
        most, messages = self._options.max_poll_records, list[Message]()
        held = self._next(monotonic() + timeout)
        while held is not None and len(messages) < most:
            messages += islice(held.messages, most - len(messages))
            if messages:
                held.handed = messages[-1].offset + 1
            with self._changed:
                held = self._state.take(monotonic()) if len(messages) < most else None
        return messages

    def run(self, handler: Callable[[Message], object]) -> None:
        """Call the handler with each message until stop(). What it raises ends this, and the message is not handled."""
        for message in self:
            try:
                handler(message)
            except BaseException:
                self._hand_back(message)
                raise

    def stop(self) -> None:
        """End iteration and run() at the next message. For handlers, other threads and signal handlers."""
        self._stopped = True
        threading.Thread(target=self._notify, name="qb stop").start()  # a signal handler must not wait for the lock

    def commit(self, message: Message | None = None) -> None:
        """Commit all that was handed out, the message in hand included, or one partition up to this message.

        Returns when it is durable. Raises StaleGeneration if a partition is not ours any more, RequestTimedOut.
        """
        self._link.check_process()
        with self._changed:
            wish = self._state.wish_commit(message)
            self._changed.notify_all()
            self._wait_for(wish)
        if wish.error is not None:
            raise wish.error

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

    def close(self) -> None:
        """Commit what is handled (with auto_commit; not what is in hand), leave the group and disconnect."""
        if self._link.inherited:
            return
        with self._changed:
            keeper, self._keeper = self._keeper, None
            self._stopped = True
            self._state.leave()
            self._changed.notify_all()
            if keeper is not None:
                patience = min(self._request_timeout, self._options.session_timeout)
                self._changed.wait_for(lambda: self._state.over or self._failure or not self._link.up, patience)
            self._closed = True
            self._changed.notify_all()
        self._link.close()
        if keeper is not None:
            keeper.join()

    # Taking messages

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("this consumer is closed: make a new one")
        if self._keeper is None:
            self._link.open(monotonic() + self._request_timeout, patient=False)
            self._keeper = threading.Thread(target=self._keep, name=f"qb group {self._options.group_id}", daemon=True)
            self._keeper.start()

    def _next(self, deadline: float) -> PartitionProgress | None:
        """Count what is in hand as handled, and wait for the next partition with messages."""
        self._link.check_process()
        if not self._stopped:
            self._start()
        with self._changed:
            self._state.holdings.finish()
            self._in_hand = None
            self._changed.notify_all()
            while not self._stopped:
                if self._failure is not None:
                    raise self._failure
                if held := self._state.take(monotonic()):
                    return held
                if (left := deadline - monotonic()) <= 0:
                    return None
                self._changed.wait(None if left == inf else left)
        return None

    def _hand_back(self, message: Message) -> None:
        try:
            self.seek(message.topic, message.partition, message.offset)
        except (StaleGeneration, UsedAfterFork):
            pass  # it belongs to another member, or to the parent of this process

    def _wait_for(self, wish: PendingCommit) -> None:
        self._changed.wait_for(lambda: wish.settled or self._closed, self._request_timeout)
        if not wish.settled:
            self._state.give_up_wish(wish)
            raise RequestTimedOut("the offsets could not be committed in time; they may be yet")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # What the keeper does

    def _keep(self) -> None:
        try:
            while self._wait_for_work():
                self._link.post(self._compose_fetches)
                self._say()
        except Exception as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Return True when there is something to send, False when it is over."""
        with self._changed:
            while not (self._state.over or self._closed):
                now = monotonic()
                self._ask = self._state.next_ask(now)
                if self._ask is not None or self._fetcher.is_due(now):
                    return True
                left = self._state.due(now) - now
                self._changed.wait(None if left == inf else left)
            self._changed.notify_all()
            return False

    def _compose_fetches(self) -> bytes:
        with self._changed:
            return self._fetcher.compose(monotonic())

    def _say(self) -> None:
        """Send the request that is due, if there is one, and wait for its answer."""
        ask, sent = self._ask, monotonic()
        if ask is None:
            return
        try:
            deadline = sent + self._options.session_timeout
            answer = answer_of(self._link.ask(lambda: self._conversation.request(*ask), deadline))
        except RequestRefused as error:
            with self._changed:
                self._state.refused(ask, error, monotonic())
        except (QBError, PeerMisbehaved):
            with self._changed:
                self._state.unanswered(ask, monotonic())
        else:
            with self._changed:
                self._state.answered(ask, answer, sent)
        self._notify()

    # What the link's thread does

    def welcomed(self) -> list[bytes]:
        """For the link: a connection begins."""
        with self._changed:
            self._fetcher.welcomed()
            self._changed.notify_all()
        return []

    def pushed(self, frame: Frame) -> None:
        """For the link: the answer to a fetch, or one that nobody waits for any more."""
        with self._changed:
            refusal = self._fetcher.answered(frame, monotonic())
            self._changed.notify_all()
        if refusal is not None:
            log.warning("group %s: %s", self._options.group_id, refusal)

    def lost(self) -> None:
        """For the link: the connection has ended."""
        with self._changed:
            self._fetcher.lost()
            self._state.connection_lost()
            self._changed.notify_all()
