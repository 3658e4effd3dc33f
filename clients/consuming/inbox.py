"""One stay in a subscription: messages in, what to send to the broker out.

A worker takes a portion, handles it, and reports; settlements gather here until they are sent. What is sent
and when is the rule for clients in docs/SUBSCRIPTIONS.md. Not safe to share between threads without a lock,
but for Portion.done: one worker counts it up, any thread may read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from math import inf
from typing import Any, NamedTuple

import msgspec

from qb.clients.consuming.key_sequencer import KeySequencer
from qb.clients.protocol.message import DeliveredFrames, Message
from qb.core.wire.offset_runs import runs_of

FLUSH = 2500  # unsent acks that are always worth a frame; also the most that a worker takes at once
SOON = 0.0002  # seconds, about what a SETTLE costs both sides: what is handled within them shares the SETTLE
MAX_REASON = 500  # the broker keeps no more of a reason
MAX_ENTRIES = 600  # runs and messages that one SETTLE names: with the longest reasons, less than the broker takes


class JoinTerms(NamedTuple):
    """What the broker has agreed to when we joined."""

    window: int
    ack_deadline: float
    keyed: bool  # is the mode key_shared?


class HandlingOptions(NamedTuple):
    """How this client handles messages."""

    concurrency: int = 1
    manual: bool = False  # does the handler ack, or does its return?
    batches: bool = False  # is the handler given lists?


class MessageBatch:
    """Messages that one worker has in hand, all of one delivery."""

    __slots__ = ("done", "inbox", "messages", "reported")

    def __init__(self, inbox: Inbox, messages: list[Message]) -> None:
        self.inbox, self.messages = inbox, messages
        self.done = 0  # how many of them are handled
        self.reported = 0  # how many of them the broker knows of, or will with the next SETTLE


class Inbox:
    """The messages that the broker has leased to us on one connection. Their number is bounded by the window."""

    def __init__(self, terms: JoinTerms, manner: HandlingOptions) -> None:
        self.terms, self._manner = terms, manner
        self.goes_on = True  # may handlers start?
        self._closed = False  # is the stay over, so that nothing is reported any more?
        self.urgent = False  # is there something that must be sent before the next handler starts?
        self.held = 0  # messages delivered and not yet settled
        self.unsent = 0  # settled messages of which the broker does not know
        self._one_by_one = not manner.batches and (manner.manual or manner.concurrency > 1)
        self._key_order = KeySequencer(manner.manual or manner.concurrency > 1) if terms.keyed else None
        self._deliveries: deque[DeliveredFrames] = deque()
        self._running = 0  # portions whose handlers have not returned
        self._each = inf  # how many seconds the handler took for a message lately, if its return acks
        self._suspect: MessageBatch | None = None  # the one of these that may kill the process: it runs alone
        self._sent_away = 0  # workers that got nothing because of that
        self._in_hand: dict[tuple[int, int], MessageBatch] = {}  # by its first message; by each, if settled by hand
        self._open = False  # have we named all of these to the broker?
        self._extend_at: float | None = None
        self._bodies: deque[bytes] = deque()  # of SETTLEs that are not sent yet
        self._clear()

    def _clear(self) -> None:
        self.urgent, self.unsent = False, 0
        self._acked: dict[int, list[int]] = {}  # offsets by partition
        self._nacks: list[tuple[int, int, float | None, str]] = []
        self._extensions: list[tuple[int, int, int, int, float]] = []
        self._extend_all = False
        self._started: list[tuple[int, int]] = []

    def stop(self) -> None:
        """Take no more messages. What is done is still reported."""
        self.goes_on = False

    def close(self) -> None:
        """The stay is over: nothing is taken or reported any more."""
        self.goes_on, self._closed = False, True

    # Messages in

    def deliver(self, delivery: DeliveredFrames) -> None:
        """Take in what the broker has pushed."""
        if not self._closed:
            self._deliveries.append(delivery)
            self.held += delivery.count

    def take(self) -> MessageBatch | None:
        """Return what to handle next, or None. Send what is unsent first if `urgent`."""
        messages = self._next() if self.goes_on and self._suspect is None else []
        if not messages:
            self._sent_away += self.goes_on and self._has_more
            return None
        portion = MessageBatch(self, messages)
        self._running += 1
        if messages[0].source.suspects:
            self._suspect = portion
        for message in messages if self._manner.manual else messages[:1]:
            self._in_hand[_place(message)] = portion
        self._name(portion)
        return portion

    @property
    def _has_more(self) -> bool:
        return bool(self._deliveries or self.freed)

    @property
    def _waits_for_quiet(self) -> bool:
        """Is what comes next to be handled alone?"""
        if self._key_order and self._key_order.freed:
            return self._key_order.freed[0].source.suspects
        return bool(self._deliveries) and self._deliveries[0].suspects

    def _next(self) -> list[Message]:
        if self._waits_for_quiet and self._running:
            return []
        if self._key_order and self._key_order.freed:
            return [self._key_order.freed.popleft()]
        while self._deliveries:
            delivery = self._deliveries[0]
            if delivery.suspects and self._running:
                return []
            found = delivery.read(1 if self._one_by_one or delivery.attempt > 1 else self._enough)
            if delivery.exhausted:
                self._deliveries.popleft()
            if self._key_order and found:
                found, dropped = self._key_order.admit(found)
                self.held -= dropped
            if found:
                return found
        return []

    def _name(self, portion: MessageBatch) -> None:
        """Handle a redelivered message in the open, and with it everything that is in hand at the same time.

        A message that is named stays so until it is settled. So what is taken beside it is named too, and that goes on
        until nothing is in hand: otherwise the one that is named would be charged with the deaths of those that are
        not.
        """
        if self._open:
            self._start([portion])
        elif portion.messages[0].attempt > 1:
            self._open = True
            self._start(self._in_hand.values())

    def _start(self, portions: Iterable[MessageBatch]) -> None:
        self.urgent = True
        named = {_place(message): None for portion in portions for message in portion.messages}
        self._started += named

    # What became of them

    def returned(self, portion: MessageBatch, seconds: float = inf) -> None:
        """The handler has returned for all that is `done`, after so long; the rest of the portion is given up."""
        self._finished(portion)
        if not self._manner.manual:
            self._each = seconds / len(portion.messages)
            self._report_done(portion)
            self._put_down(portion)

    def _finished(self, portion: MessageBatch) -> None:
        self._running -= 1
        if portion is self._suspect:
            self._suspect = None

    def call_back(self) -> int:
        """Return how many workers that were sent away could get something now, and count them as called."""
        if self._suspect is not None or self._waits_for_quiet:
            return 0
        workers, self._sent_away = self._sent_away, 0
        return workers if self._has_more else 0

    def raised(self, portion: MessageBatch, reason: str) -> bool:
        """The handler has raised, for the message after those that are `done`, or for its batch.

        Returns whether there is more in the portion to handle.
        """
        self._report_done(portion)
        end = len(portion.messages) if self._manner.batches else portion.done + 1
        for message in portion.messages[portion.done : end]:
            self._fail(message, None, reason)
        if self._manner.manual:
            self._finished(portion)
            return False
        failed = portion.messages[portion.done]
        portion.done = portion.reported = end
        self._drop_followers(portion, failed)
        if end < len(portion.messages):
            return True
        self._finished(portion)
        self._put_down(portion)
        return False

    def ack(self, message: Message) -> None:
        """A message that was acked by hand. Ignored if it is not in hand."""
        if self._is_in_hand(message):
            self._pick(message)
            self._ack([message])

    def nack(self, message: Message, delay: float | None, reason: str) -> None:
        """A message that was nacked by hand. Ignored if it is not in hand."""
        self._fail(message, delay, reason)

    def extend(self, message: Message, seconds: float) -> None:
        """Hold a message longer. Ignored if it is not in hand."""
        if self._is_in_hand(message):
            self._extensions.append((*_place(message), 1, 1, seconds))
            self.urgent = True

    def _report_done(self, portion: MessageBatch) -> None:
        """Note the acks of what is done in a portion and was not reported yet."""
        done = portion.done  # it may move on while we look
        if portion.reported < done:
            self._ack(portion.messages[portion.reported : done])
            portion.reported = done

    def _ack(self, messages: list[Message]) -> None:
        if not self._closed:
            self._acked.setdefault(messages[0].partition, []).extend([message.offset for message in messages])
            self.unsent += len(messages)
            self.held -= len(messages)

    def _fail(self, message: Message, delay: float | None, reason: str) -> None:
        if self._manner.manual and not self._is_in_hand(message):
            return  # it was settled before
        self._nacks.append((*_place(message), delay, _sendable(reason)))
        self.unsent += 1
        self.held -= 1
        if self._key_order:
            self.held -= self._key_order.failed(message)
        if self._manner.manual:
            self._pick(message)

    def _is_in_hand(self, message: Message) -> bool:
        portion = self._in_hand.get(_place(message))
        return portion is not None and portion.messages[0].came_with(message) and not self._closed

    def _pick(self, message: Message) -> None:
        """Take one message out of hand that was settled by hand."""
        del self._in_hand[_place(message)]
        self._let_go()
        if self._key_order:
            self._key_order.released([message])

    def _put_down(self, portion: MessageBatch) -> None:
        first = _place(portion.messages[0])
        if self._in_hand.get(first) is portion:
            del self._in_hand[first]
        self._let_go()
        if self._key_order:
            self._key_order.released(portion.messages)

    def _let_go(self) -> None:
        """What was named must be settled before the next handler starts."""
        self.urgent = self.urgent or self._open
        self._open = self._open and bool(self._in_hand)

    def _drop_followers(self, portion: MessageBatch, failed: Message) -> None:
        key_order, done = self._key_order, portion.done
        if key_order:
            rest = portion.messages[done:]
            portion.messages[done:] = kept = [each for each in rest if not key_order.is_follower(each, failed)]
            self.held -= len(rest) - len(kept)

    @property
    def freed(self) -> int:
        """How many messages can be taken that could not be before, because their key was in hand."""
        return len(self._key_order.freed) if self._key_order else 0

    # What to send to the broker

    @property
    def has_unsent(self) -> bool:
        """Is there anything to send to the broker?"""
        return bool(self._bodies or self.unsent or self._started or self._extensions or self._extend_all)

    @property
    def _enough(self) -> int:
        """How many unsent acks are worth a frame: half a window, which may have grown since we joined."""
        window = max(self.terms.window, self.held + self.unsent)
        return min(FLUSH, max(1, window // 2))

    @property
    def full(self) -> bool:
        """Should what is unsent go out now, so that the broker can send more?

        Not while the rest of what was delivered is handled sooner than a SETTLE would take.
        """
        return self.unsent >= self._enough and not (self.held and self.held * self._each < SOON)

    def tick(self, now: float) -> bool:
        """Called every now and then: look what is done, renew leases; returns whether there is something to send."""
        self._gather()
        if not self.held:
            self._extend_at = None
        elif self._extend_at is None:
            self._extend_at = now + self.terms.ack_deadline / 3
        elif now >= self._extend_at:
            self._extend_at = now + self.terms.ack_deadline / 3
            self._extend_all = True
        return self.has_unsent and not self._closed

    def settle(self) -> bytes:
        """Return the body of a SETTLE with what is unsent, and forget it; sent() follows if it was sent.

        It names at most MAX_ENTRIES messages and runs: call again until it returns nothing.
        """
        self._gather()
        if self._closed or not self.has_unsent:
            return b""
        if not self._bodies:
            self._bodies.extend(_bodies(self._parts()))
        return self._bodies.popleft()

    def _parts(self) -> dict[str, Any]:
        """Return all that is unsent, and forget it."""
        runs = [(partition, run) for partition, offsets in self._acked.items() for run in _runs(offsets)]
        parts: dict[str, Any] = {
            "acks": [(partition, run.start, len(run), run.step) for partition, run in runs],
            "nacks": self._nacks,
            "extend": self._extensions,
            "extend_all": self.terms.ack_deadline if self._extend_all else None,
            "started": self._started,
        }
        self._clear()
        return {name: part for name, part in parts.items() if part}

    def _gather(self) -> None:
        """Note what is done in the portions in hand."""
        if not self._manner.manual:
            for portion in self._in_hand.values():
                self._report_done(portion)

    def sent(self, number: int) -> None:
        """The body went out as the SETTLE of this number; all of them only with the last of several."""
        if self._key_order and not self._bodies:
            self._key_order.sent(number)


def _place(message: Message) -> tuple[int, int]:
    return message.partition, message.offset


def _runs(offsets: list[int]) -> list[range]:
    first, last, count = offsets[0], offsets[-1], len(offsets)
    step = (last - first) // (count - 1) if count > 1 else 1
    if step > 0 and offsets == list(range(first, last + 1, step)):  # nearly always, and fast
        return [range(first, last + 1, step)]
    return list(runs_of(sorted(set(offsets))))


def _bodies(parts: dict[str, Any]) -> Iterator[bytes]:
    """Yield the bodies of as many SETTLEs as it takes, in the order in which the broker carries them out."""
    while parts:
        body: dict[str, Any] = {}
        room = MAX_ENTRIES
        for name, part in list(parts.items()):
            if isinstance(part, list):
                body[name], rest = part[:room], part[room:]
                room -= len(body[name])
            else:
                body[name], rest = part, []
            if rest:
                parts[name] = rest
                break
            del parts[name]
        yield msgspec.json.encode(body)


def _sendable(reason: str) -> str:
    """Return a reason that any JSON reader accepts."""
    return reason[:MAX_REASON].encode(errors="replace").decode()
