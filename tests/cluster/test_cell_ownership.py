"""A broker whose lease has run out sends nothing more, by any door, and its process ends as if it were killed."""

from __future__ import annotations

import socket
from typing import Any, NoReturn

import pytest
import trio

from qb.cluster.cell_ownership import CellOwnership
from qb.core.wire.errors import BadRequest
from qb.doors.socket_poll import SocketPoll
from qb.doors.transport import Transport


class Killed(BaseException):
    """Where the process would have ended."""


class Keeper:
    """A lease that the test takes away."""

    holds = True

    def may_answer(self) -> bool:
        return self.holds


class View:
    cell, name = "main", "a"

    def named(self, name: str) -> Any:
        return None


def end(why: str) -> NoReturn:
    raise Killed(why)


def ownership_of(keeper: Keeper, stop: trio.Event | None = None) -> CellOwnership:
    return CellOwnership(View(), keeper, 3, 15.0, trio.Event() if stop is None else stop, end)  # type: ignore[arg-type]


def test_a_stale_owner_sends_nothing() -> None:
    keeper = Keeper()
    ownership = ownership_of(keeper)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        transport = Transport(ours, check=ownership.check)
        transport.send(b"fresh")
        keeper.holds = False
        with pytest.raises(Killed, match="lease"):
            transport.send(b"stale")
        assert theirs.recv(100) == b"fresh"


async def test_what_was_queued_is_not_sent_by_a_stale_owner() -> None:
    keeper = Keeper()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transport = Transport(ours, check=ownership_of(keeper).check)
        theirs.setblocking(False)
        transport.send(b"x" * 10_000_000)
        sent = transport.taken
        assert transport.queued
        keeper.holds = False
        theirs.recv(10_000_000)
        with pytest.raises(Killed):
            transport._send_some()
        assert transport.taken == sent


def test_a_stale_owner_begins_no_step() -> None:
    keeper, taken = Keeper(), list[bytes]()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        poll = SocketPoll(check=ownership_of(keeper).check)
        poll.add(ours, lambda data: taken.append(bytes(data)))
        theirs.send(b"fresh")
        poll._attend([(ours.fileno(), 1)])
        keeper.holds = False
        theirs.send(b"stale")
        with pytest.raises(Killed):
            poll._attend([(ours.fileno(), 1)])
        poll._epoll.close()
    assert taken == [b"fresh"]


async def test_an_owner_without_peers_notices_too(autojump_clock: trio.testing.MockClock) -> None:
    keeper = Keeper()
    ownership = ownership_of(keeper)
    with trio.move_on_after(60):
        await ownership.watch()
    keeper.holds = False
    with pytest.raises(Killed):
        await ownership.watch()


async def test_a_cell_is_moved_only_to_a_broker_that_is_there() -> None:
    stop = trio.Event()
    ownership = ownership_of(Keeper(), stop)
    with pytest.raises(BadRequest, match="no broker 'b'"):
        await ownership.move("b")
    assert not stop.is_set()
    await ownership.move(None)
    assert stop.is_set()
    assert ownership.is_moving
