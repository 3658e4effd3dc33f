"""One poll of all peers' sockets, in one step of the event loop.

A task that waits for one socket costs trio a change of its registration and a change of tasks for each request. Here
sockets stay registered. All that can be read is received first, and handed over then: system calls in a row, and our
own work in a row, are each quicker than both in turn. Where there is no epoll, each session waits for its own socket.
"""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from time import perf_counter
from typing import NamedTuple, Protocol

import trio

from qb.core.pacing import asking
from qb.doors.step_shares import SERVED, ActiveAccounts, StepShares
from qb.storage.faults import keep_running

log = logging.getLogger("qb.server")

RECEIVE_BYTES = 524_288  # that are received before they are handed over
ROOM = 262_144  # that each of several peers finds at least
TIGHT_BYTES = 16_384  # that are received of each while peers hold as much as they may
STEP_BYTES = 2_097_152  # received in one step of one account; of several it is RECEIVE_BYTES in a pass, in equal shares
AVAILABLE = hasattr(select, "epoll")
AT_ONCE = 256  # sockets that are read after one poll
# Seconds within which a peer that publishes one message at a time is expected to send the next. With low latency the
# event loop does not sleep at once after such a publish: waking it takes about as long as all our work on it.
AWAKE = 0.0005
RETRY = 0.01  # seconds until a poll that failed by a fault of ours is tried again, the first time
LOOKS = 32  # polls while it is awake, between two turns of other tasks: they take about as long as a turn


class PollStep(Protocol):
    """What has become of one step."""

    at_once: bool  # was something short made durable at its end?


def _apart(only_one: bool) -> AbstractContextManager[None]:
    return nullcontext()


Take = Callable[[memoryview], None]
Ready = Sequence[tuple[int, int]]  # descriptors and what epoll says of them


class Attended(NamedTuple):
    """A socket that is listened to."""

    sock: socket.socket
    take: Take
    portion: int
    account: Hashable


class SocketPoll:
    """Sockets, and the callbacks that take what is received from them. All methods belong to the event loop."""

    def __init__(
        self,
        commit_step: Callable[[bool], AbstractContextManager[PollStep | None]] = _apart,
        is_tight: Callable[[], bool] = lambda: False,
        low_latency: bool = False,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`commit_step` is entered around the calls of one step, with whether only one peer is being served.

        `is_tight` says whether peers hold so much that little should be received of each. With `low_latency` the event
        loop stays awake for the next message of a peer that publishes one at a time. `check` is called where a step
        begins, and returns only if this broker may answer.
        """
        self._epoll = select.epoll()
        self._commit_step = commit_step
        self._is_tight = is_tight
        self._low_latency = low_latency
        self._check = check
        self._speaker = -1  # the descriptor of the peer that spoke last
        self._others_spoke = perf_counter()  # when another one did
        self._accounts = ActiveAccounts()
        self._attended: dict[int, Attended] = {}
        self._long: set[Hashable] = set()  # accounts that had their whole share in the last pass: they have more
        self._behind: list[tuple[int, int]] = []  # ready when enough for a step, or for their account, had been brought
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))

    def add(self, sock: socket.socket, take: Take, portion: int = 0, account: Hashable = None) -> None:
        """Hand what the socket brings to `take`, which must neither raise nor keep it; empty: the peer has gone.

        At most `portion` bytes are received at a time; 0: as many as there is room for. All sockets of an `account`
        together have one share of a step; None: this one has its own.
        """
        number = sock.fileno()
        self._attended[number] = Attended(sock, take, portion, number if account is None else account)
        self._epoll.register(sock, select.EPOLLIN | select.EPOLLRDHUP)

    def remove(self, sock: socket.socket) -> None:
        """Receive no more from it; one that is not there is no error."""
        if self._attended.pop(sock.fileno(), None) is not None and not self._epoll.closed:
            with suppress(OSError):  # it is not registered any more
                self._epoll.unregister(sock)

    def heard(self, number: int) -> None:
        """The peer with this descriptor has spoken. A door that receives without this poll calls it itself."""
        if number != self._speaker:
            self._speaker, self._others_spoke = number, perf_counter()

    async def run(self) -> None:
        """Receive and hand over, until cancelled; then nothing can be added any more.

        A fault of the poll itself is logged, and it begins anew; that of a peer ends its session alone.
        """
        with self._epoll, asking(self._peers_wait):
            await keep_running("the poll of sockets", self._run, RETRY)

    def _peers_wait(self) -> bool:
        """Return whether another account than the last one is being served, and there is something to receive."""
        return not self._accounts.is_alone(perf_counter()) and bool(self._behind or self._epoll.poll(0, 1))

    async def _run(self) -> None:
        answered = 0.0  # when a lone publish was answered last
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            ready: Ready = self._epoll.poll(0, AT_ONCE)
            near = perf_counter() - answered < AWAKE
            while self._attend(ready) and self._low_latency:
                answered = perf_counter()
                if not near or not (ready := await self._next_before(answered + AWAKE)):
                    break

    def _attend(self, ready: Ready) -> bool:
        """Take what these bring, in one step; returns whether that was a lone publish, and is done."""
        if self._check is not None:
            self._check()
        if self._behind:
            waiting, self._behind = self._behind, []
            ready = [*waiting, *(each for each in ready if each not in waiting)]
        for number, _ in ready[:2]:
            self.heard(number)
        if self._is_shared(ready):
            self._attend_several(ready)
            return False
        return self._attend_one(ready)

    def _attend_one(self, ready: Ready) -> bool:
        """Take what one account brings in a step of its own; returns whether that was a lone publish, and is done."""
        with self._commit_step(perf_counter() - self._others_spoke > SERVED) as step:
            left = STEP_BYTES
            while ready and left > 0:
                taken = self._take(ready, left)
                left -= taken
                # A peer that sends much has more on its way: what arrives in one step is committed in one batch.
                ready = self._epoll.poll(0, AT_ONCE) if taken >= ROOM and not self._is_shared(ready) else ()
        return step is not None and step.at_once

    def _attend_several(self, ready: Ready) -> None:
        """Take what several accounts bring, in two steps: those that had their share the last time come second."""
        there = [each for each in ready if each[0] in self._attended]
        shares = StepShares(RECEIVE_BYTES, len({self._account(each) for each in there}))
        brief = [each for each in there if self._account(each) not in self._long]
        long = [each for each in there if self._account(each) in self._long]
        for some in filter(None, (brief, long)):
            with self._commit_step(False):
                self._take(some, RECEIVE_BYTES, shares)
        self._long = shares.used_up

    def _account(self, each: tuple[int, int]) -> Hashable:
        return self._attended[each[0]].account

    def _is_shared(self, ready: Ready) -> bool:
        """Return whether several accounts are being served."""
        now = perf_counter()
        for account in {self._account(each) for each in ready if each[0] in self._attended}:
            self._accounts.heard(account, now)
        return not self._accounts.is_alone(now)

    def _take(self, ready: Ready, enough: int, shares: StepShares | None = None) -> int:
        """Receive what these bring and hand it over; returns how many bytes.

        When that is enough, those behind come first the next time, and so do those whose account has had its share.
        """
        taken, rest = 0, iter(ready)
        for received in self._received(rest, shares):
            for number, data in received:
                taken += len(data)
                if attended := self._attended.get(number):  # one before it may have ended it
                    try:
                        attended.take(data)
                    except Exception:  # what was received of the others must still reach them
                        self._end(attended.sock)
            if taken >= enough:
                self._behind += rest
                break
        return taken

    def _end(self, sock: socket.socket) -> None:
        """A listener has raised, which it must not: nothing more is heard of its peer."""
        log.exception("a listener of a socket failed; its peer is disconnected")
        self.remove(sock)
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _received(
        self, ready: Iterator[tuple[int, int]], shares: StepShares | None
    ) -> Iterator[list[tuple[int, memoryview]]]:
        """Yield what has come, as much at a time as there is room for."""
        received: list[tuple[int, memoryview]] = []
        room = self._buffer
        tight = TIGHT_BYTES if self._is_tight() else 0
        for each in ready:
            number = each[0]
            attended = self._attended.get(number)
            if attended is None:
                continue
            most = tight or attended.portion
            if shares is not None:
                share = shares.left(attended.account)
                if not share:
                    self._behind.append(each)
                    continue
                most = min(most, share) if most else share
            size = receive_into(attended.sock, room, most)
            if size is None:
                continue
            if shares is not None:
                shares.take(attended.account, size)
            received.append((number, room[:size]))
            room = room[size:]
            if len(room) < ROOM:
                yield received
                received, room = [], self._buffer
        yield received

    async def _next_before(self, deadline: float) -> Ready:
        """Poll until a socket is ready or the deadline is over; other tasks run in between."""
        poll = self._epoll.poll
        while perf_counter() < deadline:
            await trio.lowlevel.checkpoint()
            for _ in range(LOOKS):
                if ready := poll(0, AT_ONCE):
                    return ready
        return ()


def receive_into(sock: socket.socket, room: memoryview, most: int = 0) -> int | None:
    """Return how much has come from a peer: 0 if it has gone, None if nothing has come yet.

    At most so many bytes are received; 0: as many as there is room for.
    """
    try:
        return sock.recv_into(room, min(most, len(room)))
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return 0
